"""The whole way from sources to packed windows, with every row accounted for."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from swiftkit.data.conversation import Message, TrainOn
from swiftkit.data.document import Document
from swiftkit.data.intake import Intake, take_in
from swiftkit.data.mix import StoppingStrategy, mixed
from swiftkit.data.pack import pack
from swiftkit.data.render import Renderer
from swiftkit.data.report import DataReport, nothing_left
from swiftkit.data.template import ThinkingHistory
from swiftkit.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

AUTO_MAX_LENGTH = 4096
SAMPLE_PROMPTS = 3

TruncationStrategy: TypeAlias = Literal["drop", "left", "right"]
BySource: TypeAlias = list[list[Document]]


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
    columns: Mapping[str, str] | None = None,
    train_on: TrainOn = "assistant",
    thinking_history: ThinkingHistory = "template",
    skip_bad_rows: bool = False,
    max_dropped: float = 1.0,
    interleave_prob: Sequence[float] = (),
    stopping_strategy: StoppingStrategy = "first_exhausted",
    streaming: bool = False,
    split_ratio: float = 0.0,
    seed: int = 42,
) -> Prepared:
    """Reads, renders, cuts, mixes and packs.

    Args:
        sources: what `read` takes, each with an optional `#N`.
        tokenizer: a fast transformers tokenizer.
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

    Raises:
        UserError: a source or a row is wrong, too many rows are dropped, or no row with a trained token is
            left.
    """
    renderer = Renderer(
        tokenizer,
        chat_template=chat_template,
        system=system,
        train_on=train_on,
        thinking_history=thinking_history,
    )
    intake = take_in(
        sources,
        renderer,
        window=AUTO_MAX_LENGTH if max_length == "auto" else max_length,
        columns=columns,
        skip_bad_rows=skip_bad_rows,
        streaming=streaming,
    )
    report = intake.report
    report.settings = {"train_on": train_on, "thinking_history": thinking_history}
    report.max_length = min(max(report.longest, 2), AUTO_MAX_LENGTH) if max_length == "auto" else max_length
    documents = _fitted(intake, truncation_strategy, bos_id=tokenizer.bos_token_id)
    _check_enough_left(documents, report, max_dropped)
    kept = {document.origin for rows in documents for document in rows}
    documents, held_out = _split(documents, report, split_ratio, seed)
    if interleave_prob:
        documents = _mixed(documents, report, interleave_prob, stopping_strategy, seed)
    for rows, counts in zip(documents, report.counts, strict=True):
        counts.kept = len(rows) - counts.repeated
    report.rows_kept = sum(counts.kept for counts in report.counts)
    return _packed(
        [document for rows in documents for document in rows],
        report,
        packing=packing,
        prompts=[prompt for origin, prompt in intake.prompts if origin in kept][:SAMPLE_PROMPTS],
        evaluation=_evaluation(held_out, report, packing=packing) if held_out else None,
    )


def _check_enough_left(documents: BySource, report: DataReport, max_dropped: float) -> None:
    if not any(documents):
        raise UserError(nothing_left(report))
    if report.share_lost > max_dropped:
        raise UserError(
            f"{report.share_lost:.1%} of the rows are lost, --max_dropped allows {max_dropped:.1%}: "
            f"{report.losses()}"
        )


def _evaluation(held_out: list[Document], whole: DataReport, *, packing: bool) -> Prepared:
    """The rows that a split held out, with a report of their own."""
    report = DataReport(list(whole.sources), settings=whole.settings, max_length=whole.max_length)
    report.rows_read = report.rows_kept = len(held_out)
    report.longest = max(map(len, held_out))
    return _packed(held_out, report, packing=packing, prompts=[])


def _fitted(intake: Intake, strategy: TruncationStrategy, *, bos_id: int | None) -> BySource:
    """The documents that fit a window, cut or whole; the report counts the others."""
    report = intake.report
    fitted: BySource = []
    for documents, counts in zip(intake.documents, report.counts, strict=True):
        fitted.append([])
        for document in documents:
            fit = _fit(document, report.max_length, strategy, bos_id=bos_id)
            if isinstance(fit, Document):
                fitted[-1].append(fit)
            else:
                report.drop(document.origin, fit)
                counts.dropped += 1
    return fitted


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


def _split(
    documents: BySource, report: DataReport, ratio: float, seed: int
) -> tuple[BySource, list[Document]]:
    """Training and held-out documents, each in their old order; a ratio above 0 holds out at least one."""
    rows = sum(map(len, documents))
    if not ratio:
        return documents, []
    if rows < 2:
        raise UserError("--split_dataset_ratio needs at least two rows; give --val_dataset, or more rows")
    count = min(max(1, round(rows * ratio)), rows - 1)
    keys = np.random.PCG64(np.random.SeedSequence(seed)).random_raw(rows)
    chosen = set(np.argsort(keys, kind="stable")[:count].tolist())
    training: BySource = []
    held_out: list[Document] = []
    index = 0
    for own, counts in zip(documents, report.counts, strict=True):
        training.append([])
        for document in own:
            (held_out if index in chosen else training[-1]).append(document)
            index += 1
        counts.held_out = len(own) - len(training[-1])
    report.rows_held_out = count
    return training, held_out


def _mixed(
    documents: BySource,
    report: DataReport,
    shares: Sequence[float],
    strategy: StoppingStrategy,
    seed: int,
) -> BySource:
    """What each source gives to the mix; the report counts what is left out and what comes again."""
    for own, counts in zip(documents, report.counts, strict=True):
        if not own:
            raise UserError(f"{counts.source}: no row is left to mix; take it and its --interleave_prob out")
    chosen = mixed([len(own) for own in documents], shares, strategy=strategy, seed=seed)
    for own, indices, counts in zip(documents, chosen, report.counts, strict=True):
        counts.left_out = len(own) - len(set(indices))
        counts.repeated = len(indices) - len(set(indices))
        report.rows_left_out += counts.left_out
        report.rows_repeated += counts.repeated
    return [[own[index] for index in indices] for own, indices in zip(documents, chosen, strict=True)]


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
