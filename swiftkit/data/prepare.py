"""The whole way from sources to packed windows, with every row accounted for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from swiftkit.data.arrays import Arrays, write_arrays
from swiftkit.data.batch import PackedBatch, collate
from swiftkit.data.cache import Entry, key_of, told
from swiftkit.data.choose import BySource, TruncationStrategy, check_enough_left, fitted, mix, split
from swiftkit.data.conversation import Message, TrainOn
from swiftkit.data.document import Document
from swiftkit.data.documents import Documents
from swiftkit.data.encode import Encoder
from swiftkit.data.mix import StoppingStrategy
from swiftkit.data.pack import Windows, one_each, pack_windows
from swiftkit.data.render import Renderer
from swiftkit.data.report import DataReport
from swiftkit.data.shapes import column_names
from swiftkit.data.template import ThinkingHistory
from swiftkit.data.whole import NOT_KEPT, Whole, stored
from swiftkit.hub.files import Say

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

AUTO_MAX_LENGTH = 4096
SAMPLE_PROMPTS = 3
PARTS = ("training", "evaluation")


@dataclass(frozen=True, slots=True)
class Prepared:
    """A data set ready for training; its tokens lie on a disk, mapped into memory.

    Attributes:
        documents: the kept rows, in the order of the sources.
        windows: for each window the indices of its documents.
        max_length: tokens of a window.
        report: what became of the rows.
        fingerprint: sha256 over the ids and trained masks of all documents.
        prompts: the conversations before the first answer of the first three distinct rows.
        evaluation: the rows that a split held out.
        largest_id: no token of the sources has a larger id; -1 where there is none.
    """

    documents: Documents
    windows: Windows
    max_length: int
    report: DataReport
    fingerprint: str
    prompts: list[list[Message]]
    largest_id: int
    evaluation: Prepared | None = None

    def window(self, index: int) -> list[Document]:
        """The documents of one window."""
        return [self.documents[document] for document in self.windows[index]]

    @property
    def num_windows(self) -> int:
        """How many windows there are."""
        return len(self.windows)

    def tokens_of(self, indices: Sequence[int]) -> int:
        """Tokens of some windows."""
        return sum(len(document) for index in indices for document in self.window(index))

    def collate(self, indices: Sequence[int], *, pad_id: int, pad_to: int | None = None) -> PackedBatch:
        """Some windows as one batch."""
        return collate([self.window(index) for index in indices], pad_id=pad_id, pad_to=pad_to)

    @property
    def window_lengths(self) -> NDArray[np.int64]:
        """Tokens of each window, [windows]."""
        ends = np.cumsum(self.documents.lengths[self.windows.members])[self.windows.bounds[1:] - 1]
        return np.diff(ends, prepend=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How rows become windows: every knob that changes them.

    Attributes:
        max_length: tokens of a window; auto is the longest row, at most 4,096.
        packing: documents share windows; else each has one.
        truncation_strategy: what happens to a row longer than a window.
        system: system message for conversations that have none.
        chat_template: a built-in name or a Jinja file in place of the tokenizer's own template.
        columns: names of the rows' columns, where they are not those of a known shape.
        train_on: the assistant's words, its last answer, or everything.
        thinking_history: thoughts of older answers as the template has them, or kept.
        skip_bad_rows: count rows that cannot be used, and go on.
        max_dropped: share of the rows that may be dropped or skipped, 0 to 1.
        interleave_prob: share of each source in the mix; empty takes every row once.
        stopping_strategy: which source a mix takes whole (see `mixed`).
        streaming: a hub's rows are fetched as they are read.
        split_ratio: share of the rows held out for evaluation.
        seed: of the split and the mix.
    """

    max_length: int | Literal["auto"]
    packing: bool
    truncation_strategy: TruncationStrategy
    system: str | None
    chat_template: str | None = None
    columns: Mapping[str, str] | None = None
    train_on: TrainOn = "assistant"
    thinking_history: ThinkingHistory = "template"
    skip_bad_rows: bool = False
    max_dropped: float = 1.0
    interleave_prob: Sequence[float] = ()
    stopping_strategy: StoppingStrategy = "first_exhausted"
    streaming: bool = False
    split_ratio: float = 0.0
    seed: int = 42

    @property
    def text_window(self) -> int:
        """Tokens that a text file is cut into."""
        return AUTO_MAX_LENGTH if self.max_length == "auto" else self.max_length


def prepare(
    sources: Sequence[str],
    *,
    tokenizer: PreTrainedTokenizerBase,
    num_proc: int | Literal["auto"] = 1,
    cache: Path | None = None,
    say: Say = print,
    **settings: Any,
) -> Prepared:
    """Reads, renders, cuts, mixes and packs.

    Args:
        sources: what `read` takes, each with an optional `#N`.
        tokenizer: a fast transformers tokenizer.
        num_proc: processes that render and tokenise; auto is one for little data, else one a core.
        cache: folder for what is made, in which the same data are found again; None keeps nothing.
        say: told how far it is, and when another process prepares the same data.
        settings: those of `Settings`.

    Raises:
        UserError: a source or a row is wrong, too many rows are dropped, or no row with a trained token is
            left.
    """
    knobs = Settings(**settings)
    renderer = Renderer(
        tokenizer,
        chat_template=knobs.chat_template,
        system=knobs.system,
        train_on=knobs.train_on,
        thinking_history=knobs.thinking_history,
    )
    encoder = Encoder(renderer, column_names(knobs.columns or {}), knobs.skip_bad_rows)
    making = Whole(
        sources=sources,
        encoder=encoder,
        window=knobs.text_window,
        streaming=knobs.streaming,
        num_proc=num_proc,
        say=say,
    )
    keeping, seen = making.look(cache)
    whole = making.obtain(keeping, seen)
    name = f"windows-{key_of([making.key(seen), asdict(knobs)])}" if seen else ""
    chosen = keeping.obtain(name, partial(_choose, knobs, renderer.bos_id, whole))
    prepared = _opened(whole, chosen)
    if cache:
        prepared.report.cache = told([whole, chosen], cache) if seen else NOT_KEPT
    return prepared


def _choose(knobs: Settings, bos_id: int | None, whole: Entry, folder: Path) -> None:
    """Writes which documents are taken, how they are cut, and their windows."""
    report = DataReport.of(whole.facts["report"])
    report.settings = {"train_on": knobs.train_on, "thinking_history": knobs.thinking_history}
    report.max_length = knobs.max_length if knobs.max_length != "auto" else _longest(report)
    documents = fitted(stored(whole), report, knobs.truncation_strategy, bos_id=bos_id)
    check_enough_left(Documents.joined(documents), report, knobs.max_dropped)
    prompts = [prompt for row, prompt in whole.facts["prompts"] if any(row in own.rows for own in documents)]
    documents, held_out = split(documents, report, knobs.split_ratio, knobs.seed)
    if knobs.interleave_prob:
        documents = mix(documents, report, knobs.interleave_prob, knobs.stopping_strategy, knobs.seed)
    for rows, counts in zip(documents, report.counts, strict=True):
        counts.kept = len(rows) - counts.repeated
    report.rows_kept = sum(counts.kept for counts in report.counts)
    parts = [_Part(Documents.joined(documents), report)]
    if held_out:
        parts.append(_Part(Documents.joined(held_out), _report_of_evaluation(held_out, report)))
    arrays: Arrays = {}
    facts: dict[str, Any] = {"prompts": prompts[:SAMPLE_PROMPTS]}
    for name, part in zip(PARTS, parts, strict=False):
        part.pack(packing=knobs.packing)
        arrays |= {f"{name}-{key}": array for key, array in part.arrays().items()}
        facts[name] = part.facts()
    write_arrays(folder, arrays, facts)


@dataclass(slots=True)
class _Part:
    """Rows to train on, or those to evaluate on."""

    documents: Documents
    report: DataReport
    windows: Windows = field(default_factory=lambda: one_each(0))

    def pack(self, *, packing: bool) -> None:
        """Makes windows, and counts what is in them."""
        lengths, report = self.documents.lengths, self.report
        self.windows = pack_windows(lengths, report.max_length) if packing else one_each(len(lengths))
        report.tokens = int(lengths.sum())
        report.trained_tokens = int(self.documents.targets.sum())
        report.windows = len(self.windows)

    def arrays(self) -> Arrays:
        """What the windows hold."""
        return {**self.documents.arrays(), "members": self.windows.members, "bounds": self.windows.bounds}

    def facts(self) -> dict[str, Any]:
        """What is said about it."""
        return {"report": self.report.state(), "fingerprint": self.documents.fingerprint()}


def _longest(report: DataReport) -> int:
    return min(max(report.longest, 2), AUTO_MAX_LENGTH)


def _report_of_evaluation(held_out: BySource, whole: DataReport) -> DataReport:
    """A report of their own for the rows that a split held out."""
    report = DataReport(list(whole.sources), settings=whole.settings, max_length=whole.max_length)
    report.rows_read = report.rows_kept = sum(map(len, held_out))
    report.longest = max(int(rows.lengths.max(initial=0)) for rows in held_out)
    return report


def _opened(whole: Entry, chosen: Entry) -> Prepared:
    """What the two steps have written, mapped into memory."""
    documents = stored(whole)
    found: Prepared | None = None
    for name in reversed(PARTS):
        facts = chosen.facts.get(name)
        if facts is None:
            continue
        own = {
            key.removeprefix(f"{name}-"): array
            for key, array in chosen.arrays.items()
            if key.startswith(f"{name}-")
        }
        windows = Windows(own.pop("members"), own.pop("bounds"))
        report = DataReport.of(facts["report"])
        found = Prepared(
            documents=Documents(documents, **own),
            windows=windows,
            max_length=report.max_length,
            report=report,
            fingerprint=facts["fingerprint"],
            prompts=chosen.facts["prompts"] if name == PARTS[0] else [],
            evaluation=found,
            largest_id=whole.facts["largest"],
        )
    assert found is not None
    return found
