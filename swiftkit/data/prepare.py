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
from swiftkit.data.cache import DataCache, Entry, Sources, key_of, look_at, told
from swiftkit.data.choose import BySource, TruncationStrategy, fitted, mix, split
from swiftkit.data.conversation import Message, TrainOn
from swiftkit.data.document import Document
from swiftkit.data.documents import Documents, Stored
from swiftkit.data.intake import take_in
from swiftkit.data.mix import StoppingStrategy
from swiftkit.data.pack import Windows, one_each, pack_windows
from swiftkit.data.read import has_text
from swiftkit.data.render import Renderer
from swiftkit.data.report import DataReport, nothing_left
from swiftkit.data.template import ThinkingHistory
from swiftkit.data.workers import processes_for
from swiftkit.errors import UserError
from swiftkit.hub.files import Say

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

AUTO_MAX_LENGTH = 4096
SAMPLE_PROMPTS = 3
NOT_KEPT = "none: what is streamed, or has no fingerprint, cannot be told before it is read"
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
    making = _Making(sources, knobs, renderer, num_proc, say)
    seen = look_at(sources, streaming=knobs.streaming) if cache else None
    keeping = DataCache(cache if seen else None, say)
    names = making.names(seen) if seen else ("", "")
    whole = keeping.obtain(names[0], partial(making.whole, seen))
    chosen = keeping.obtain(names[1], partial(making.chosen, whole))
    prepared = _opened(whole, chosen)
    if cache:
        prepared.report.cache = told([whole, chosen], cache) if seen else NOT_KEPT
    return prepared


@dataclass(frozen=True, slots=True)
class _Making:
    """The two steps: whole documents from sources, and of these the ones that a run takes, in windows."""

    sources: Sequence[str]
    knobs: Settings
    renderer: Renderer
    num_proc: int | Literal["auto"]
    say: Say

    def names(self, seen: Sources) -> tuple[str, str]:
        """A name for the result of each step, by all that it depends on."""
        knobs = self.knobs
        whole = key_of(
            [
                seen.contents,
                self.renderer.identity(),
                knobs.text_window if has_text(self.sources) else None,
                sorted((knobs.columns or {}).items()),
                knobs.skip_bad_rows,
            ]
        )
        return f"tokens-{whole}", f"windows-{key_of([whole, asdict(knobs)])}"

    def whole(self, seen: Sources | None, folder: Path) -> None:
        """Writes whole documents."""
        knobs = self.knobs
        take_in(
            self.sources,
            self.renderer,
            folder,
            window=knobs.text_window,
            columns=knobs.columns,
            skip_bad_rows=knobs.skip_bad_rows,
            streaming=knobs.streaming,
            processes=processes_for(self.sources) if self.num_proc == "auto" else self.num_proc,
            say=self.say,
        )
        if seen:
            seen.check_unchanged()

    def chosen(self, whole: Entry, folder: Path) -> None:
        """Writes which documents are taken, how they are cut, and their windows."""
        knobs, stored = self.knobs, _stored(whole)
        report = DataReport.of(whole.facts["report"])
        report.settings = {"train_on": knobs.train_on, "thinking_history": knobs.thinking_history}
        report.max_length = knobs.max_length if knobs.max_length != "auto" else _longest(report)
        documents = fitted(stored, report, knobs.truncation_strategy, bos_id=self.renderer.bos_id)
        _check_enough_left(documents, report, knobs.max_dropped)
        prompts = [
            prompt for row, prompt in whole.facts["prompts"] if any(row in own.rows for own in documents)
        ]
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


def _check_enough_left(documents: BySource, report: DataReport, max_dropped: float) -> None:
    if not any(map(len, documents)):
        raise UserError(nothing_left(report))
    if report.share_lost > max_dropped:
        raise UserError(
            f"{report.share_lost:.1%} of the rows are lost, --max_dropped allows {max_dropped:.1%}: "
            f"{report.losses()}"
        )


def _report_of_evaluation(held_out: BySource, whole: DataReport) -> DataReport:
    """A report of their own for the rows that a split held out."""
    report = DataReport(list(whole.sources), settings=whole.settings, max_length=whole.max_length)
    report.rows_read = report.rows_kept = sum(map(len, held_out))
    report.longest = max(int(rows.lengths.max(initial=0)) for rows in held_out)
    return report


def _stored(whole: Entry) -> Stored:
    return Stored(whole.arrays, whole.facts["files"], whole.facts["bounds"])


def _opened(whole: Entry, chosen: Entry) -> Prepared:
    """What the two steps have written, mapped into memory."""
    stored = _stored(whole)
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
            documents=Documents(stored, **own),
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
