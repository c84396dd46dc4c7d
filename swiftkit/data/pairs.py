"""From sources to rows of preferences as tokens, every row accounted for."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from swiftkit.data.answers import AnswerBatch, AnswerRow, collate_answers, shared_prefix
from swiftkit.data.cache import Entry, told
from swiftkit.data.choose import SILENT, TruncationStrategy, all_cut, check_enough_left, drawn, too_long
from swiftkit.data.conversation import Message, TrainOn
from swiftkit.data.document import Document
from swiftkit.data.documents import Documents
from swiftkit.data.encode_preferences import PreferenceEncoder, Rows
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
TIE = "chosen and rejected are the same, so it teaches nothing"


class PairReport(DataReport):
    """Counts of rows of preferences; a window is one row."""

    def lines(self) -> list[str]:
        """For the terminal, one fact a line."""
        shared = [
            f"longest   {self.longest:,} tokens of a prompt with its answer, at most {self.max_length:,}"
        ]
        return [line for line in DataReport.lines(self) if not line.startswith("windows")] + shared


@dataclass(frozen=True, slots=True)
class Pairs:
    """Rows of preferences, ready for training.

    Attributes:
        rows: each with its answers.
        max_length: tokens of a prompt with an answer at most.
        report: what became of the rows.
        prompts: of the first rows, for sample answers.
        evaluation: rows that a split held out.
    """

    rows: tuple[AnswerRow, ...]
    max_length: int
    report: DataReport
    prompts: list[list[Message]]
    evaluation: Pairs | None = None

    @property
    def documents(self) -> list[Document]:
        """All answers with their prompts."""
        return [document for row in self.rows for document in row.documents]

    @property
    def num_windows(self) -> int:
        """Rows."""
        return len(self.rows)

    @property
    def window_lengths(self) -> NDArray[np.int64]:
        """Tokens that go through the model for each row, [rows]."""
        return np.array([row.tokens for row in self.rows], np.int64)

    @property
    def largest_id(self) -> int:
        """No token has a larger id."""
        return max(int(document.ids.max()) for document in self.documents)

    @property
    def fingerprint(self) -> str:
        """sha256 over ids, trained masks, margins and labels."""
        digest = hashlib.sha256()
        for row in self.rows:
            digest.update(repr((len(row.documents), row.margin, row.good)).encode())
            for document in row.documents:
                digest.update(len(document).to_bytes(8, "little"))
                digest.update(document.ids.astype("<i4").tobytes() + document.trained.tobytes())
        return digest.hexdigest()

    def window(self, index: int) -> list[Document]:
        """The answers of a row."""
        return list(self.rows[index].documents)

    def tokens_of(self, indices: Sequence[int]) -> int:
        """Tokens that some rows put through the model."""
        return sum(self.rows[index].tokens for index in indices)

    def collate(self, indices: Sequence[int], *, pad_id: int, pad_to: int | None = None) -> AnswerBatch:
        """Some rows as one batch."""
        return collate_answers([self.rows[index] for index in indices], pad_id=pad_id, pad_to=pad_to)

    def with_reference(self, logprobs: NDArray[np.float64]) -> Pairs:
        """The same with the reference policy's log-probabilities, [answers]."""
        parts = np.split(logprobs, np.cumsum([len(row.documents) for row in self.rows])[:-1])
        rows = tuple(replace(row, reference=own) for row, own in zip(self.rows, parts, strict=True))
        return replace(self, rows=rows)


def prepare_pairs(
    sources: Sequence[str],
    *,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int | Literal["auto"],
    kind: Rows = "pairs",
    truncation_strategy: TruncationStrategy = "drop",
    share_prompt: bool = True,
    system: str | None = None,
    columns: Mapping[str, str] | None = None,
    thinking_history: ThinkingHistory = "template",
    skip_bad_rows: bool = False,
    max_dropped: float = 1.0,
    streaming: bool = False,
    split_ratio: float = 0.0,
    seed: int = 42,
    num_proc: int | Literal["auto"] = 1,
    cache: Path | None = None,
    say: Say = print,
) -> Pairs:
    """Reads, renders, cuts and splits.

    Args:
        sources: what `read` takes.
        tokenizer: a fast one with a chat template where rows are conversations.
        max_length: tokens of a prompt with one of its answers.
        kind: pairs of answers, or single ones with a label (which get a mismatched one each, for kto).
        truncation_strategy: what happens to a row with a longer side.
        share_prompt: what both sides begin with is computed once.
        system, columns, thinking_history, skip_bad_rows, max_dropped, streaming: as for `prepare`.
        split_ratio: share of the rows held out for evaluation.
        seed: of the split.
        num_proc, cache, say: as for `prepare`; tokens are kept, and cut anew.

    Raises:
        UserError: a source or a row is wrong, or none is left.
    """
    rule: TrainOn = "assistant" if kind == "pairs" else "last"  # a label is about the last answer
    renderer = Renderer(tokenizer, system=system, train_on=rule, thinking_history=thinking_history)
    making = Whole(
        sources=sources,
        encoder=PreferenceEncoder(renderer, column_names(columns or {}), skip_bad_rows, kind),
        window=AUTO_MAX_LENGTH,
        streaming=streaming,
        num_proc=num_proc,
        say=say,
    )
    keeping, seen = making.look(cache)
    whole = making.obtain(keeping, seen)
    report = PairReport.of(whole.facts["report"])
    if cache:
        report.cache = told([whole], cache) if seen else NOT_KEPT
    report.max_length = min(max(report.longest, 2), AUTO_MAX_LENGTH) if max_length == "auto" else max_length
    kept = _fitted(_rows_of(whole), report, truncation_strategy, renderer.bos_id)
    check_enough_left(kept, report, max_dropped)
    for row in kept.values():
        if kind == "pairs" and _is_tie(row):
            report.note(row.documents[0].origin, TIE)
    answers = making.encoder.documents_of_row
    prompts = [prompt for document, prompt in whole.facts["prompts"] if document // answers in kept]
    training, held_out = _split(kept, split_ratio, seed)
    _count(report, [bound // answers for bound in whole.facts["bounds"]], training, held_out)
    evaluation = None
    if held_out:
        own = PairReport(list(sources), max_length=report.max_length, longest=report.longest)
        own.rows_read = len(held_out)
        evaluation = _finished(held_out.values(), own, kind, share_prompt)
    found = _finished(training.values(), report, kind, share_prompt)
    return replace(found, prompts=prompts[:SAMPLE_PROMPTS], evaluation=evaluation)


def _rows_of(whole: Entry) -> list[AnswerRow]:
    """The rows as they were tokenised; their tokens stay on the disk."""
    margins, good = whole.arrays["margins"].tolist(), whole.arrays["good"].tolist()
    store = stored(whole)
    documents = Documents.whole(store, np.arange(len(store.lengths)))
    answers = len(documents) // max(len(margins), 1)
    return [
        AnswerRow(
            tuple(documents[row * answers : (row + 1) * answers]), np.zeros(answers), margins[row], good[row]
        )
        for row in range(len(margins))
    ]


def _fitted(
    rows: Sequence[AnswerRow], report: DataReport, strategy: TruncationStrategy, bos_id: int | None
) -> dict[int, AnswerRow]:
    """The rows whose every answer fits, cut or whole, by their number; the report counts the others."""
    kept: dict[int, AnswerRow] = {}
    for number, row in enumerate(rows):
        documents = _cut(row.documents, report.max_length, strategy, bos_id)
        if isinstance(documents, str):
            report.drop(row.documents[0].origin, documents)
        else:
            kept[number] = replace(row, documents=documents)
    return kept


def _cut(
    documents: tuple[Document, ...], size: int, strategy: TruncationStrategy, bos_id: int | None
) -> tuple[Document, ...] | str:
    """Answers of at most `size` tokens, or why they are dropped; a cut on the left is the same for both."""
    if not all(document.targets for document in documents):
        return SILENT
    longest = max(map(len, documents))
    if longest <= size:
        return documents
    if strategy == "drop":
        return too_long(size)
    cut = []
    for document in documents:
        keep = np.arange(len(document))[: size if strategy == "right" else None]
        if strategy == "left":
            keep = keep[longest - size :]
            if len(keep) and document.ids[0] == bos_id:
                keep[0] = 0  # the start token stays in front
        cut.append(Document(document.ids[keep], document.trained[keep], document.origin))
    return tuple(cut) if all(len(document) and document.targets for document in cut) else all_cut(size)


def _is_tie(row: AnswerRow) -> bool:
    chosen, rejected = row.documents
    return np.array_equal(chosen.ids, rejected.ids) and np.array_equal(chosen.trained, rejected.trained)


def _split(
    rows: dict[int, AnswerRow], ratio: float, seed: int
) -> tuple[dict[int, AnswerRow], dict[int, AnswerRow]]:
    """Rows to train on and held-out ones, each in their old order, as `choose.split` draws them."""
    chosen = drawn(len(rows), ratio, seed)
    numbered = list(enumerate(rows.items()))
    return (
        dict(item for place, item in numbered if not chosen[place]),
        dict(item for place, item in numbered if chosen[place]),
    )


def _count(
    report: DataReport,
    bounds: Sequence[int],
    training: Mapping[int, AnswerRow],
    held_out: Mapping[int, AnswerRow],
) -> None:
    """What became of the rows of each source.

    Args:
        report: takes the counts.
        bounds: for each source its first row, and at last the number of rows.
        training, held_out: rows by their number.
    """
    report.rows_held_out = len(held_out)
    for counts, start, stop in zip(report.counts, bounds, bounds[1:], strict=False):
        counts.kept = sum(start <= number < stop for number in training)
        counts.held_out = sum(start <= number < stop for number in held_out)
        counts.dropped = counts.read - counts.kept - counts.held_out


def _finished(found: Iterable[AnswerRow], report: DataReport, kind: Rows, share_prompt: bool) -> Pairs:
    """Rows with what they share, counted."""
    rows = list(found)
    if kind == "labelled":
        rows = _mismatched(rows, report.max_length)
    elif share_prompt:
        rows = [replace(row, shared=shared_prefix(*row.documents)) for row in rows]
    report.rows_kept = report.windows = len(rows)
    report.tokens = sum(row.tokens for row in rows)
    report.trained_tokens = sum(document.targets for row in rows for document in row.documents)
    return Pairs(tuple(rows), report.max_length, report, [])


def _mismatched(rows: Sequence[AnswerRow], size: int) -> list[AnswerRow]:
    """Each labelled row with its prompt before the next row's answer, for kto's estimate of the divergence.

    Source: KTO (Ethayarajh et al. 2024, https://arxiv.org/abs/2402.01306), section 4.2.
    """
    found = []
    for place, row in enumerate(rows):
        own, other = row.documents[0], rows[(place + 1) % len(rows)].documents[0]
        start, begin = (int(np.argmax(document.trained)) for document in (own, other))
        if start == 0 or len(rows) == 1:  # no prompt, or nothing else to answer it with
            mixed = own
        else:
            ids = np.concatenate([own.ids[:start], other.ids[begin:]])[:size]
            trained = np.concatenate([own.trained[:start], other.trained[begin:]])[:size]
            mixed = Document(ids, trained, own.origin)
            mixed = mixed if mixed.targets else own
        found.append(replace(row, documents=(own, mixed), reference=np.zeros(2)))
    return found
