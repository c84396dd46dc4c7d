"""The whole way from sources to packed windows, with every row accounted for."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from swiftkit.data.document import Document
from swiftkit.data.pack import pack
from swiftkit.data.read import Row, read
from swiftkit.data.render import Renderer
from swiftkit.data.report import DataReport
from swiftkit.data.shapes import Completion, Conversation, Example, Message, to_example
from swiftkit.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

AUTO_MAX_LENGTH = 4096
BATCH_ROWS = 512  # rows that the tokenizer takes at once
SAMPLE_PROMPTS = 3
SAMPLE_CANDIDATES = 32  # prompts looked at, as their rows may be dropped later

TruncationStrategy: TypeAlias = Literal["drop", "left", "right"]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A data set ready for training.

    Attributes:
        documents: the kept rows, in the order of the sources.
        windows: for each window the indices of its documents.
        max_length: tokens of a window.
        report: what became of the rows.
        fingerprint: sha256 over the ids and trained masks of all documents.
        prompts: the conversations before the first answer of the first three distinct rows.
        evaluation: the rows that a split held out.
    """

    documents: list[Document]
    windows: list[list[int]]
    max_length: int
    report: DataReport
    fingerprint: str
    prompts: list[list[Message]]
    evaluation: Prepared | None = None

    def window(self, index: int) -> list[Document]:
        """The documents of one window."""
        return [self.documents[document] for document in self.windows[index]]


def prepare(
    sources: Sequence[str],
    *,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int | Literal["auto"],
    packing: bool,
    truncation_strategy: TruncationStrategy,
    system: str | None,
    chat_template: str | None = None,
    split_ratio: float = 0.0,
    seed: int = 42,
) -> Prepared:
    """Reads, renders, cuts and packs.

    Args:
        sources: files or `swiftkit::NAME`, each with an optional `#N`.
        tokenizer: a fast transformers tokenizer.
        max_length: tokens of a window; auto is the longest row, at most 4,096.
        packing: documents share windows; else each has one.
        truncation_strategy: what happens to a row longer than a window.
        system: system message for conversations that have none.
        chat_template: a built-in name or a Jinja file in place of the tokenizer's own template.
        split_ratio: share of the rows held out for evaluation.
        seed: of the split.

    Raises:
        UserError: a source or a row is wrong, or no row with a trained token is left.
    """
    renderer = Renderer(tokenizer, chat_template=chat_template, system=system)
    intake = _take_in(sources, renderer)
    report = intake.report
    report.max_length = min(max(report.longest, 2), AUTO_MAX_LENGTH) if max_length == "auto" else max_length
    documents = _fitted(intake, truncation_strategy, bos_id=tokenizer.bos_token_id)
    if not documents:
        raise UserError(_nothing_left(report))
    training, held_out = _split(documents, split_ratio, seed)
    evaluation = None
    if held_out:
        report.rows_held_out = len(held_out)
        beside = DataReport(list(sources), rows_read=len(held_out), max_length=report.max_length)
        beside.longest = max(map(len, held_out))
        evaluation = _packed(held_out, beside, packing=packing, prompts=[])
    kept = {document.origin for document in documents}
    prompts = [prompt for row, prompt in intake.prompts if row.origin in kept][:SAMPLE_PROMPTS]
    return _packed(training, report, packing=packing, prompts=prompts, evaluation=evaluation)


@dataclass(slots=True)
class _Intake:
    """All rows as whole documents, before any cut."""

    report: DataReport
    documents: list[Document] = field(default_factory=list)
    prompts: list[tuple[Row, list[Message]]] = field(default_factory=list)


def _take_in(sources: Sequence[str], renderer: Renderer) -> _Intake:
    intake = _Intake(DataReport(list(sources)))
    rows = (row for source in sources for row in read(source))
    for batch in _batches(rows):
        examples = [to_example(row) for row in batch]
        documents = renderer.documents(examples)
        for row, example, document in zip(batch, examples, documents, strict=True):
            intake.report.rows_read += 1
            intake.report.longest = max(intake.report.longest, len(document))
            shape = _shape_name(example)
            intake.report.shapes[shape] = intake.report.shapes.get(shape, 0) + 1
            intake.documents.append(document)
            if isinstance(example, Conversation) and len(intake.prompts) < SAMPLE_CANDIDATES:
                prompt = _prompt(renderer.with_system(example))
                if prompt and all(prompt != known for _, known in intake.prompts):
                    intake.prompts.append((row, prompt))
    return intake


def _batches(rows: Iterable[Row]) -> Iterator[list[Row]]:
    remaining = iter(rows)
    while batch := list(islice(remaining, BATCH_ROWS)):
        yield batch


def _shape_name(example: Example) -> str:
    if isinstance(example, Conversation):
        return "conversations by the chat template"
    return "prompts with completion as plain text" if isinstance(example, Completion) else "plain texts"


def _prompt(conversation: Conversation) -> list[Message]:
    """What stands before the first answer; empty when there is no question."""
    roles = [message["role"] for message in conversation.messages]
    before = conversation.messages[: roles.index("assistant")] if "assistant" in roles else []
    return before if any(message["role"] == "user" for message in before) else []


def _fitted(intake: _Intake, strategy: TruncationStrategy, *, bos_id: int | None) -> list[Document]:
    """The documents that fit a window, cut or whole; the report counts the others."""
    documents: list[Document] = []
    for document in intake.documents:
        fitted = _fit(document, intake.report.max_length, strategy, bos_id=bos_id)
        if isinstance(fitted, Document):
            documents.append(fitted)
        else:
            intake.report.drop(document.origin, fitted)
    return documents


def _fit(
    document: Document, max_length: int, strategy: TruncationStrategy, *, bos_id: int | None
) -> Document | str:
    """The document cut to a window, or the reason why it is dropped."""
    if not document.targets:
        return "no answer to train on"
    if len(document) <= max_length:
        return document
    if strategy == "drop":
        return f"longer than {max_length:,} tokens"
    if strategy == "right":
        keep = np.arange(max_length)
    else:
        keep = np.arange(len(document) - max_length, len(document))
        if document.ids[0] == bos_id:
            keep[0] = 0  # the start token stays in front
    cut = Document(document.ids[keep], document.trained[keep], document.origin)
    return cut if cut.targets else f"no trained token left after the cut to {max_length:,} tokens"


def _nothing_left(report: DataReport) -> str:
    names = ", ".join(report.sources)
    if not report.rows_read:
        return f"{names}: there are no rows"
    reasons = "; ".join(
        f"{entry.rows:,} dropped: {reason} ({', '.join(entry.first)})"
        for reason, entry in report.dropped.items()
    )
    return (
        f"{names}: no row has a trainable token ({reasons}); the longest row has {report.longest:,} tokens, "
        f"--max_length is {report.max_length:,}"
    )


def _split(documents: list[Document], ratio: float, seed: int) -> tuple[list[Document], list[Document]]:
    """Training and held-out documents, each in their old order; a ratio above 0 holds out at least one."""
    if not ratio:
        return documents, []
    if len(documents) < 2:
        raise UserError("--split_dataset_ratio needs at least two rows; give --val_dataset, or more rows")
    count = min(max(1, round(len(documents) * ratio)), len(documents) - 1)
    keys = np.random.PCG64(np.random.SeedSequence(seed)).random_raw(len(documents))
    chosen = set(np.argsort(keys, kind="stable")[:count].tolist())
    return (
        [document for index, document in enumerate(documents) if index not in chosen],
        [document for index, document in enumerate(documents) if index in chosen],
    )


def _packed(
    documents: list[Document],
    report: DataReport,
    *,
    packing: bool,
    prompts: list[list[Message]],
    evaluation: Prepared | None = None,
) -> Prepared:
    lengths = [len(document) for document in documents]
    windows = pack(lengths, report.max_length) if packing else [[index] for index in range(len(documents))]
    report.rows_kept = len(documents)
    report.tokens = sum(lengths)
    report.trained_tokens = sum(document.targets for document in documents)
    report.windows = len(windows)
    return Prepared(
        documents=documents,
        windows=windows,
        max_length=report.max_length,
        report=report,
        fingerprint=_fingerprint(documents),
        prompts=prompts,
        evaluation=evaluation,
    )


def _fingerprint(documents: Iterable[Document]) -> str:
    digest = hashlib.sha256()
    for document in documents:
        digest.update(len(document).to_bytes(8, "little"))
        digest.update(document.ids.astype("<i4").tobytes())
        digest.update(document.trained.tobytes())
    return digest.hexdigest()
