"""Documents in flat arrays: as they are encoded, as they lie on a disk, and as a run takes them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
from numpy.typing import NDArray

from swiftkit.data.arrays import Arrays, let_go
from swiftkit.data.document import Document, Mask, Origin, TokenIds

STORED: dict[str, type[np.generic]] = {
    "ids": np.int32,
    "trained": np.bool_,
    "lengths": np.int64,
    "targets": np.int64,
    "lines": np.int64,
    "places": np.int32,
}
FORGET_ROWS = 1 << 16


@dataclass(frozen=True, slots=True)
class Tokens:
    """Some documents, one behind the other.

    Attributes:
        ids: token ids, [tokens].
        trained: whether the model learns to produce this token, [tokens].
        lengths: tokens of each document, [documents].
    """

    ids: TokenIds
    trained: Mask
    lengths: NDArray[np.int64]

    @property
    def targets(self) -> NDArray[np.int64]:
        """Trained tokens of each document without its first one, [documents]."""
        ends = np.cumsum(self.lengths)
        starts = ends - self.lengths
        before = np.concatenate([[0], np.cumsum(self.trained)])
        filled = self.lengths > 0
        first = np.zeros(len(ends), np.int64)
        first[filled] = self.trained[starts[filled]]
        return before[ends] - before[starts] - first

    def split(self) -> Iterator[tuple[TokenIds, Mask]]:
        """The ids and the mask of each document."""
        start = 0
        for length in self.lengths.tolist():
            yield self.ids[start : start + length], self.trained[start : start + length]
            start += length


class Stored:
    """The whole documents of all sources, before any cut, as flat arrays.

    Args:
        arrays: ids and trained [tokens]; lengths, targets, lines and places [documents].
        files: name and unit of each file, which `places` point to.
        bounds: for each source its first document, and at last the number of documents.
    """

    def __init__(self, arrays: Arrays, files: Sequence[Sequence[str]], bounds: Sequence[int]) -> None:
        self.ids, self.trained, self.lengths = arrays["ids"], arrays["trained"], arrays["lengths"]
        self.targets, self.lines, self.places = arrays["targets"], arrays["lines"], arrays["places"]
        self.starts = np.cumsum(self.lengths) - self.lengths
        self.files = files
        self.bounds = bounds

    def let_go(self) -> None:
        """Takes the tokens out of memory: for those who go over all of them."""
        for array in (self.ids, self.trained):
            let_go(array)

    def origin(self, row: int) -> Origin:
        """Where a document's row stands."""
        file, unit = self.files[self.places[row]]
        return Origin(file, int(self.lines[row]), "row" if unit == "row" else "line")


class Documents(Sequence[Document]):
    """Chosen documents, each perhaps cut; they are made when they are asked for.

    Args:
        stored: where their tokens are.
        rows: which of its documents, int64 [documents].
        skipped: tokens that are cut off in front, int64 [documents].
        lengths: tokens that are left, int64 [documents].
        targets: trained tokens without the first, int64 [documents].
        keeps_first: the row's own first token replaces the first that is left, bool [documents].
    """

    def __init__(
        self,
        stored: Stored,
        *,
        rows: NDArray[np.int64],
        skipped: NDArray[np.int64],
        lengths: NDArray[np.int64],
        targets: NDArray[np.int64],
        keeps_first: Mask,
    ) -> None:
        self.stored = stored
        self.rows, self.skipped, self.lengths = rows, skipped, lengths
        self.targets, self.keeps_first = targets, keeps_first

    @classmethod
    def whole(cls, stored: Stored, rows: NDArray[np.int64]) -> Documents:
        """Documents without a cut."""
        return cls(
            stored,
            rows=rows,
            skipped=np.zeros(len(rows), np.int64),
            lengths=stored.lengths[rows],
            targets=stored.targets[rows],
            keeps_first=np.zeros(len(rows), bool),
        )

    @classmethod
    def joined(cls, parts: Sequence[Documents]) -> Documents:
        """Several selections of one store, one behind the other."""
        arrays = [part.arrays() for part in parts]
        return cls(
            parts[0].stored, **{name: np.concatenate([each[name] for each in arrays]) for name in arrays[0]}
        )

    def arrays(self) -> Arrays:
        """What chooses and cuts: all arguments of the class but the store."""
        return {
            "rows": self.rows,
            "skipped": self.skipped,
            "lengths": self.lengths,
            "targets": self.targets,
            "keeps_first": self.keeps_first,
        }

    def take(self, indices: NDArray[np.int64] | Mask) -> Documents:
        """Some of these documents, in that order, a repeated one as often as it is named."""
        return Documents(self.stored, **{name: array[indices] for name, array in self.arrays().items()})

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> Document: ...
    @overload
    def __getitem__(self, index: slice) -> list[Document]: ...
    def __getitem__(self, index: int | slice) -> Document | list[Document]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        place = range(len(self))[index]
        return Document(*self._tokens(place), self.stored.origin(int(self.rows[place])))

    def __repr__(self) -> str:
        return f"Documents({len(self):,} documents, {int(self.lengths.sum()):,} tokens)"

    def fingerprint(self) -> str:
        """sha256 over the lengths, ids and trained masks of all documents."""
        digest = hashlib.sha256()
        for first in range(0, len(self), FORGET_ROWS):
            self.stored.let_go()
            places = range(first, min(first + FORGET_ROWS, len(self)))
            begins = (self.stored.starts[self.rows[places]] + self.skipped[places]).tolist()
            lengths, keeps_first = self.lengths[places].tolist(), self.keeps_first[places].tolist()
            for place, begin, length, cut in zip(places, begins, lengths, keeps_first, strict=True):
                if cut:
                    ids, trained = self._tokens(place)
                else:
                    ids = self.stored.ids[begin : begin + length]
                    trained = self.stored.trained[begin : begin + length]
                digest.update(length.to_bytes(8, "little"))
                digest.update(ids.astype("<i4", copy=False).data)
                digest.update(trained.data)
        return digest.hexdigest()

    def _tokens(self, place: int) -> tuple[TokenIds, Mask]:
        stored, row = self.stored, self.rows[place]
        first = int(stored.starts[row])
        start = first + int(self.skipped[place])
        stop = start + int(self.lengths[place])
        ids, trained = stored.ids[start:stop], stored.trained[start:stop]
        if self.keeps_first[place]:
            ids, trained = ids.copy(), trained.copy()
            ids[0], trained[0] = stored.ids[first], stored.trained[first]
        return ids, trained
