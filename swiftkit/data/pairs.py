"""From sources to rows of preferences as tokens, every row accounted for."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from swiftkit.data.answers import AnswerBatch, AnswerRow, collate_answers, shared_prefix
from swiftkit.data.choose import SILENT, TruncationStrategy, all_cut, too_long
from swiftkit.data.conversation import Conversation, Message, TrainOn
from swiftkit.data.document import Document, RowError
from swiftkit.data.layout import Layout
from swiftkit.data.lines import Row
from swiftkit.data.preferences import Preference, to_labelled, to_pair
from swiftkit.data.read import read
from swiftkit.data.render import Renderer
from swiftkit.data.report import DataReport, SourceCounts, nothing_left
from swiftkit.data.shapes import column_names
from swiftkit.data.template import ThinkingHistory
from swiftkit.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

AUTO_MAX_LENGTH = 4096
SAMPLE_PROMPTS = 3
BATCH_ROWS = 256  # that the tokenizer takes at once
TIE = "chosen and rejected are the same, so it teaches nothing"
Rows = Literal["pairs", "labelled"]


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

    def apart(self) -> Pairs:
        """The same without shared prompts."""
        rows = tuple(replace(row, shared=0) for row in self.rows)
        return replace(
            self, rows=rows, evaluation=None if self.evaluation is None else self.evaluation.apart()
        )

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
) -> Pairs:
    """Reads, renders, cuts and splits; in this process, and in memory.

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

    Raises:
        UserError: a source or a row is wrong, or none is left.
    """
    rule: TrainOn = "assistant" if kind == "pairs" else "last"  # a label is about the last answer
    renderer = Renderer(tokenizer, system=system, train_on=rule, thinking_history=thinking_history)
    reading = _Reading(renderer, column_names(columns or {}), kind, skip_bad_rows, PairReport(list(sources)))
    for source in sources:
        reading.take(source, streaming=streaming)
    report = reading.report
    report.max_length = min(max(report.longest, 2), AUTO_MAX_LENGTH) if max_length == "auto" else max_length
    kept = _fitted(reading.found, report, truncation_strategy, renderer.bos_id)
    if not kept:
        raise UserError(nothing_left(report))
    if report.share_lost > max_dropped:
        raise UserError(
            f"{report.share_lost:.1%} of the rows are lost, --max_dropped allows {max_dropped:.1%}: "
            f"{report.losses()}"
        )
    for row in kept:
        if kind == "pairs" and _is_tie(row):
            report.note(row.documents[0].origin, TIE)
    kept, held_out = _split(kept, split_ratio, seed)
    evaluation = None
    if held_out:
        own = PairReport(list(sources), max_length=report.max_length, longest=report.longest)
        own.rows_read = len(held_out)
        evaluation = _finished(held_out, own, kind, share_prompt)
    report.rows_held_out = len(held_out)
    return replace(
        _finished(kept, report, kind, share_prompt), prompts=reading.prompts, evaluation=evaluation
    )


@dataclass(slots=True)
class _Reading:
    """Rows on their way to tokens."""

    renderer: Renderer
    columns: Mapping[str, str]
    kind: Rows
    skip_bad_rows: bool
    report: DataReport
    found: list[AnswerRow] = field(default_factory=list)
    prompts: list[list[Message]] = field(default_factory=list)

    def take(self, source: str, *, streaming: bool) -> None:
        """All rows of a source."""
        self.report.counts.append(SourceCounts(source))
        rows = read(source, on_bad=self._bad if self.skip_bad_rows else None, streaming=streaming)
        while batch := list(islice(rows, BATCH_ROWS)):
            self._keep(*self._laid_out(batch))

    def _laid_out(self, rows: Sequence[Row]) -> tuple[list[Preference], list[list[Layout]]]:
        preferences: list[Preference] = []
        layouts: list[list[Layout]] = []
        for row in rows:
            try:
                found = (to_pair if self.kind == "pairs" else to_labelled)(row, self.columns)
                layouts.append([self.renderer.layout(answer) for answer in found.answers])
            except RowError as error:
                if not self.skip_bad_rows:
                    raise
                self._bad(error)
                continue
            preferences.append(found)
        return preferences, layouts

    def _keep(self, preferences: Sequence[Preference], layouts: Sequence[Sequence[Layout]]) -> None:
        documents = iter(self.renderer.encode([layout for own in layouts for layout in own]))
        report = self.report
        for found, own in zip(preferences, layouts, strict=True):
            row = AnswerRow(tuple(islice(documents, len(own))), np.zeros(len(own)), found.margin, found.good)
            self.found.append(row)
            report.rows_read += 1
            report.counts[-1].read += 1
            report.longest = max(report.longest, *map(len, row.documents))
            shape = "conversations" if isinstance(found.answers[0], Conversation) else "plain texts"
            shape = f"{shape}, {'pairs' if self.kind == 'pairs' else 'labelled'}"
            report.shapes[shape] = report.shapes.get(shape, 0) + 1
            for words in {words for layout in own for words in layout.notes}:
                report.note(found.origin, words)
            self._offer(found)

    def _offer(self, found: Preference) -> None:
        """Remember the prompt of one of the first rows."""
        answer = found.answers[0]
        if len(self.prompts) >= SAMPLE_PROMPTS or not isinstance(answer, Conversation) or answer.tools:
            return
        messages = self.renderer.with_system(answer).messages
        roles = [message["role"] for message in messages]
        prompt = messages[: roles.index("assistant")]
        if any(message["role"] == "user" for message in prompt) and prompt not in self.prompts:
            self.prompts.append(prompt)

    def _bad(self, error: RowError) -> None:
        self.report.skip(error)
        self.report.counts[-1].skipped += 1


def _fitted(
    rows: Sequence[AnswerRow], report: DataReport, strategy: TruncationStrategy, bos_id: int | None
) -> list[AnswerRow]:
    """The rows whose every answer fits, cut or whole; the report counts the others."""
    kept: list[AnswerRow] = []
    for row in rows:
        documents = _cut(row.documents, report.max_length, strategy, bos_id)
        if isinstance(documents, str):
            report.drop(row.documents[0].origin, documents)
        else:
            kept.append(replace(row, documents=documents))
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


def _split(rows: list[AnswerRow], ratio: float, seed: int) -> tuple[list[AnswerRow], list[AnswerRow]]:
    """Rows to train on and held-out ones, each in their old order, as `choose.split` draws them."""
    if not ratio:
        return rows, []
    if len(rows) < 2:
        raise UserError("--split_dataset_ratio needs at least two rows; give --val_dataset, or more rows")
    count = min(max(1, round(len(rows) * ratio)), len(rows) - 1)
    keys = np.random.PCG64(np.random.SeedSequence(seed)).random_raw(len(rows))
    chosen = set(np.argsort(keys, kind="stable")[:count].tolist())
    return (
        [row for place, row in enumerate(rows) if place not in chosen],
        [row for place, row in enumerate(rows) if place in chosen],
    )


def _finished(rows: Sequence[AnswerRow], report: DataReport, kind: Rows, share_prompt: bool) -> Pairs:
    """Rows with what they share, counted."""
    if kind == "labelled":
        rows = _mismatched(rows, report.max_length)
    elif share_prompt:
        rows = [replace(row, shared=shared_prefix(*row.documents)) for row in rows]
    report.rows_kept = report.windows = len(rows)
    report.tokens = sum(row.tokens for row in rows)
    report.trained_tokens = sum(document.targets for row in rows for document in row.documents)
    if len(report.counts) == 1:
        report.counts[0].kept = len(rows)
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
