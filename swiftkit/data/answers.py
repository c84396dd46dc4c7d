"""Batches of whole answers: each has a log-probability or a score, and may share its beginning with another.

Two answers to one prompt lie in a row as prompt, first rest, second rest. Positions of both rests go on from
the prompt's, and attention (`prefixes`) lets each see the prompt and itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from swiftkit.data.batch import padding_lengths
from swiftkit.data.document import Document

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class AnswerRow:
    """What one row of preferences adds to a batch.

    Attributes:
        documents: its answers with their prompts.
        reference: of each answer its log-probability by the reference policy, float64 [answers].
        margin: by how much the first should win.
        good: the label of a labelled row.
        shared: tokens that both documents begin with and that are computed once.
    """

    documents: tuple[Document, ...]
    reference: NDArray[np.float64]
    margin: float = 0.0
    good: bool = True
    shared: int = 0

    @property
    def tokens(self) -> int:
        """Tokens that go through the model."""
        return sum(map(len, self.documents)) - self.shared * (len(self.documents) - 1)


@dataclass(frozen=True, slots=True)
class AnswerBatch:
    """The answers of some rows, one behind the other.

    Attributes:
        input_ids, position_ids: int64 [tokens].
        positions: int64 [targets], where an answer's token is predicted; one that both share comes twice.
        targets: int64 [targets], the token that follows there.
        lengths: tokens of each segment.
        prefixes: for each segment the one whose keys it sees besides its own, or -1; empty where all are -1.
        answer: int64 [targets], the answer that a target belongs to.
        sizes: int64 [answers], targets of each.
        ends: int64 [answers], the last token of each.
        reference: float32 [answers].
        margins: float32 [rows].
        good: bool [rows].
        tokens: without padding.
    """

    input_ids: Ints
    position_ids: Ints
    positions: Ints
    targets: Ints
    lengths: list[int]
    prefixes: tuple[int, ...]
    answer: Ints
    sizes: Ints
    ends: Ints
    reference: NDArray[np.float32]
    margins: NDArray[np.float32]
    good: NDArray[np.bool_]
    tokens: int

    @property
    def denominator(self) -> int:
        """What the sum of the losses is divided by: rows."""
        return len(self.margins)


def shared_prefix(first: Document, second: Document) -> int:
    """Tokens that both begin with, up to the first trained one of either."""
    most = min(len(first), len(second))
    differ = np.flatnonzero(first.ids[:most] != second.ids[:most])
    starts = [int(np.argmax(document.trained)) for document in (first, second) if document.trained.any()]
    return min([most, *differ[:1].tolist(), *starts])


def collate_answers(rows: Sequence[AnswerRow], *, pad_id: int, pad_to: int | None = None) -> AnswerBatch:
    """Join rows.

    Args:
        rows: at least one.
        pad_id: token that fills the batch up.
        pad_to: length in tokens.

    Raises:
        ValueError: the batch is longer than `pad_to`.
    """
    tokens = sum(row.tokens for row in rows)
    if pad_to is not None and tokens > pad_to:
        raise ValueError(f"{tokens} tokens do not fit into pad_to={pad_to}")
    joining = _Joining()
    for row in rows:
        joining.add(row)
    for length in padding_lengths(0 if pad_to is None else pad_to - tokens):
        joining.segment(np.full(length, pad_id), first=0)
    return AnswerBatch(
        input_ids=np.concatenate(joining.ids).astype(np.int64),
        position_ids=np.concatenate(joining.places),
        positions=np.concatenate(joining.positions),
        targets=np.concatenate(joining.targets),
        lengths=[len(piece) for piece in joining.ids],
        prefixes=tuple(joining.prefixes) if max(joining.prefixes) >= 0 else (),
        answer=np.repeat(np.arange(len(joining.targets)), [len(own) for own in joining.targets]),
        sizes=np.array([len(own) for own in joining.targets], np.int64),
        ends=np.array(joining.ends, np.int64),
        reference=np.concatenate([row.reference for row in rows]).astype(np.float32),
        margins=np.array([row.margin for row in rows], np.float32),
        good=np.array([row.good for row in rows], bool),
        tokens=tokens,
    )


@dataclass(slots=True)
class _Joining:
    """A batch as far as it has come."""

    ids: list[NDArray[np.integer]] = field(default_factory=list)
    places: list[Ints] = field(default_factory=list)
    prefixes: list[int] = field(default_factory=list)
    positions: list[Ints] = field(default_factory=list)
    targets: list[Ints] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    length: int = 0

    def segment(self, ids: NDArray[np.integer], *, first: int, prefix: int = -1) -> int:
        """Add tokens whose positions begin at `first`; gives the place of the first one in the batch."""
        start = self.length
        self.ids.append(ids)
        self.places.append(np.arange(first, first + len(ids), dtype=np.int64))
        self.prefixes.append(prefix)
        self.length += len(ids)
        return start

    def add(self, row: AnswerRow) -> None:
        shared = row.shared
        prefix, before = -1, 0
        if shared:
            prefix = len(self.ids)
            before = self.segment(row.documents[0].ids[:shared], first=0)
        for document in row.documents:
            start = self.segment(document.ids[shared:], first=shared, prefix=prefix)
            # Where token t of the document lies in the batch.
            place = np.concatenate([before + np.arange(shared), start + np.arange(len(document) - shared)])
            trained = np.flatnonzero(document.trained[1:]) + 1
            self.positions.append(place[trained - 1].astype(np.int64))
            self.targets.append(document.ids[trained].astype(np.int64))
            self.ends.append(int(place[-1]))
