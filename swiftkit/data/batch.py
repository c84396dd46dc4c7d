"""From windows to the arrays of one micro-batch: a single row without padding between documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from swiftkit.data.document import Document

IGNORED = -100  # the label that torch's cross entropy leaves out
PADDING_LENGTH = 128  # tokens; attention over one long document of padding would cost the square of it


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """The documents of some windows, one behind the other.

    Attributes:
        input_ids: int64 [tokens].
        position_ids: int64 [tokens], from 0 in every document.
        labels: int64 [tokens], already shifted: the next token of the same document where that one is
            trained, else -100.
        cu_seqlens: int32 [documents + 1], where documents begin, and the end of the last.
        trained_tokens: labels that are not -100.
        tokens: tokens of documents; padding is not counted.
    """

    input_ids: NDArray[np.int64]
    position_ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    cu_seqlens: NDArray[np.int32]
    trained_tokens: int
    tokens: int

    @property
    def positions(self) -> NDArray[np.int64]:
        """Where there is a label, [targets]."""
        return np.flatnonzero(self.labels != IGNORED)

    @property
    def targets(self) -> NDArray[np.int64]:
        """The labels there, [targets]."""
        return self.labels[self.positions]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each document."""
        lengths: list[int] = np.diff(self.cu_seqlens).tolist()
        return lengths

    @property
    def denominator(self) -> int:
        """What the sum of the losses is divided by: trained tokens."""
        return self.trained_tokens


def collate(windows: Sequence[Sequence[Document]], *, pad_id: int, pad_to: int | None = None) -> PackedBatch:
    """Joins the documents of windows into one row.

    Args:
        windows: the documents of each window.
        pad_id: token that fills the row up.
        pad_to: length of the row in tokens; what is missing becomes documents of at most PADDING_LENGTH
            tokens without labels.

    Raises:
        ValueError: there are no documents, or the row is longer than `pad_to`.
    """
    documents = [document for window in windows for document in window]
    if not documents:
        raise ValueError("a batch needs at least one document")
    tokens = sum(len(document) for document in documents)
    if pad_to is not None and tokens > pad_to:
        raise ValueError(f"{tokens} tokens do not fit into pad_to={pad_to}")
    padding = 0 if pad_to is None else pad_to - tokens
    lengths = [*map(len, documents), *padding_lengths(padding)]
    labels = np.concatenate([*map(_labels, documents), np.full(padding, IGNORED, np.int64)])
    return PackedBatch(
        input_ids=np.concatenate(
            [*(document.ids for document in documents), np.full(padding, pad_id, np.int32)], dtype=np.int64
        ),
        position_ids=np.concatenate([np.arange(length, dtype=np.int64) for length in lengths]),
        labels=labels,
        cu_seqlens=np.cumsum([0, *lengths], dtype=np.int32),
        trained_tokens=int(np.count_nonzero(labels != IGNORED)),
        tokens=tokens,
    )


def padding_lengths(padding: int) -> list[int]:
    """Tokens of the documents that so much padding becomes."""
    whole, rest = divmod(padding, PADDING_LENGTH)
    return [PADDING_LENGTH] * whole + [rest] * (rest > 0)


def _labels(document: Document) -> NDArray[np.int64]:
    """[tokens]; the last token of a document has nothing to predict."""
    labels = np.full(len(document), IGNORED, np.int64)
    labels[:-1] = np.where(document.trained[1:], document.ids[1:], IGNORED)
    return labels
