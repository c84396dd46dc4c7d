"""From whole documents to those that a run takes: cut, split and mixed, every one accounted for."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from swiftkit.data.document import Document
from swiftkit.data.documents import Documents, Stored
from swiftkit.data.mix import StoppingStrategy, mixed
from swiftkit.data.report import DataReport, nothing_left
from swiftkit.errors import UserError

TruncationStrategy: TypeAlias = Literal["drop", "left", "right"]
BySource: TypeAlias = list[Documents]

SILENT = "no answer to train on"


def too_long(size: int) -> str:
    """Why a row is dropped that does not fit."""
    return f"longer than {size:,} tokens"


def all_cut(size: int) -> str:
    """Why a row is dropped of which nothing trained is left."""
    return f"no trained token left after the cut to {size:,} tokens"


def fit(
    document: Document, max_length: int, strategy: TruncationStrategy, *, bos_id: int | None
) -> Document | str:
    """One document cut to a window, or the reason why it is dropped: what `fitted` does to all of them."""
    if not document.targets:
        return SILENT
    if len(document) <= max_length:
        return document
    if strategy == "drop":
        return too_long(max_length)
    keep = np.arange(max_length)
    if strategy == "left":
        keep += len(document) - max_length
        if document.ids[0] == bos_id:
            keep[0] = 0  # the start token stays in front
    cut = Document(document.ids[keep], document.trained[keep], document.origin)
    return cut if cut.targets else all_cut(max_length)


def fitted(
    stored: Stored, report: DataReport, strategy: TruncationStrategy, *, bos_id: int | None
) -> BySource:
    """The documents of each source that fit a window, cut or whole; the report counts the others."""
    size = report.max_length
    long = stored.lengths > size
    silent = stored.targets == 0
    documents = Documents.whole(stored, np.arange(len(stored.lengths)))
    lost = {SILENT: silent}
    if strategy == "drop":
        lost[too_long(size)] = long & ~silent
    else:
        documents = _cut(documents, np.flatnonzero(long & ~silent), size, strategy, bos_id=bos_id)
        lost[all_cut(size)] = (documents.targets == 0) & ~silent
    dropped = np.logical_or.reduce(list(lost.values()))
    for row in np.flatnonzero(dropped).tolist():
        report.drop(stored.origin(row), next(reason for reason, rows in lost.items() if rows[row]))
    found: BySource = []
    for counts, start, stop in zip(report.counts, stored.bounds, stored.bounds[1:], strict=False):
        kept = start + np.flatnonzero(~dropped[start:stop])
        counts.dropped += stop - start - len(kept)
        found.append(documents.take(kept))
    return found


def _cut(
    documents: Documents,
    rows: NDArray[np.int64],
    size: int,
    strategy: Literal["left", "right"],
    *,
    bos_id: int | None,
) -> Documents:
    """All documents of a store, of which some lose their beginning or their end."""
    stored = documents.stored
    skipped, targets = documents.skipped.copy(), documents.targets.copy()
    keeps_first, lengths = documents.keeps_first.copy(), documents.lengths.copy()
    lengths[rows] = size
    if strategy == "left":
        skipped[rows] = stored.lengths[rows] - size
        if bos_id is not None:
            keeps_first[rows] = stored.ids[stored.starts[rows]] == bos_id  # the start token stays in front
    for row in rows.tolist():
        start = stored.starts[row] + skipped[row]
        targets[row] = np.count_nonzero(stored.trained[start + 1 : start + size])
    return Documents(
        stored,
        rows=documents.rows,
        skipped=skipped,
        lengths=lengths,
        targets=targets,
        keeps_first=keeps_first,
    )


def split(documents: BySource, report: DataReport, ratio: float, seed: int) -> tuple[BySource, BySource]:
    """Training and held-out documents, each in their old order; a ratio above 0 holds out at least one."""
    if not ratio:
        return documents, []
    chosen = drawn(sum(map(len, documents)), ratio, seed)
    report.rows_held_out = int(chosen.sum())
    training: BySource = []
    held_out: BySource = []
    for own, counts in zip(documents, report.counts, strict=True):
        mine, chosen = chosen[: len(own)], chosen[len(own) :]
        training.append(own.take(~mine))
        held_out.append(own.take(mine))
        counts.held_out = len(held_out[-1])
    return training, held_out


def drawn(rows: int, ratio: float, seed: int) -> NDArray[np.bool_]:
    """Which of so many rows a split holds out; a ratio above 0 holds out at least one.

    Raises:
        UserError: there is nothing to split.
    """
    chosen = np.zeros(rows, bool)
    if not ratio:
        return chosen
    if rows < 2:
        raise UserError("--split_dataset_ratio needs at least two rows; give --val_dataset, or more rows")
    count = min(max(1, round(rows * ratio)), rows - 1)
    keys = np.random.PCG64(np.random.SeedSequence(seed)).random_raw(rows)
    chosen[np.argsort(keys, kind="stable")[:count]] = True
    return chosen


def check_enough_left(kept: Sized, report: DataReport, max_dropped: float) -> None:
    """Refuse to go on without a row, or with fewer than was allowed.

    Raises:
        UserError: saying why rows were lost.
    """
    if not len(kept):
        raise UserError(nothing_left(report))
    if report.share_lost > max_dropped:
        raise UserError(
            f"{report.share_lost:.1%} of the rows are lost, --max_dropped allows {max_dropped:.1%}: "
            f"{report.losses()}"
        )


def mix(
    documents: BySource,
    report: DataReport,
    shares: Sequence[float],
    strategy: StoppingStrategy,
    seed: int,
) -> BySource:
    """What each source gives to the mix; the report counts what is left out and what comes again."""
    for own, counts in zip(documents, report.counts, strict=True):
        if not len(own):
            raise UserError(f"{counts.source}: no row is left to mix; take it and its --interleave_prob out")
    chosen = mixed([len(own) for own in documents], shares, strategy=strategy, seed=seed)
    for own, indices, counts in zip(documents, chosen, report.counts, strict=True):
        different = len(np.unique(indices))
        counts.left_out = len(own) - different
        counts.repeated = len(indices) - different
        report.rows_left_out += counts.left_out
        report.rows_repeated += counts.repeated
    return [own.take(np.array(indices, np.int64)) for own, indices in zip(documents, chosen, strict=True)]
