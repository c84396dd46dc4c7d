"""Which documents share a window: first-fit decreasing."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import pairwise
from typing import overload

import numpy as np
from numpy.typing import ArrayLike, NDArray


class Windows(Sequence[list[int]]):
    """For each window the indices of its documents, held in flat arrays (which may lie on a disk).

    Args:
        members: the documents of all windows, one window behind the other, int64 [documents].
        bounds: where each window begins in `members`, and the end of the last, int64 [windows + 1].
    """

    __slots__ = ("bounds", "members")

    def __init__(self, members: NDArray[np.int64], bounds: NDArray[np.int64]) -> None:
        self.members = members
        self.bounds = bounds

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @overload
    def __getitem__(self, index: int) -> list[int]: ...
    @overload
    def __getitem__(self, index: slice) -> list[list[int]]: ...
    def __getitem__(self, index: int | slice) -> list[int] | list[list[int]]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        place = range(len(self))[index]
        found: list[int] = self.members[self.bounds[place] : self.bounds[place + 1]].tolist()
        return found

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Windows({len(self):,} windows, {len(self.members):,} documents)"


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Packs documents into windows, the longest first, each into the first window with room for it.

    Args:
        lengths: tokens of each document, each from 1 to `capacity`.
        capacity: tokens of a window.

    Returns:
        For each window, the indices of its documents; every index appears exactly once.
    """
    return list(pack_windows(lengths, capacity))


def pack_windows(lengths: ArrayLike, capacity: int) -> Windows:
    """As `pack`, in flat arrays.

    Exact first-fit decreasing in O(documents x log documents + capacity). Documents of one length are placed
    together: the lowest window with room for one takes as many as fit, then the next. Windows wait in a heap
    while they have room for the current length, else by their room until lengths have come down to it.
    """
    sizes = np.asarray(lengths, np.int64)
    assert not len(sizes) or 0 < sizes.min() <= sizes.max() <= capacity, "documents are cut to a window first"
    order = np.argsort(-sizes, kind="stable")
    changes = np.flatnonzero(np.diff(sizes[order], prepend=0)).tolist()
    placing = _Placing(capacity)
    for start, stop in pairwise([*changes, len(sizes)]):
        placing.place(int(sizes[order[start]]), stop - start)
    window_of = np.repeat(np.array(placing.windows, np.int64), np.array(placing.counts, np.int64))
    members = order[np.argsort(window_of, kind="stable")]
    bounds = np.concatenate([[0], np.cumsum(np.bincount(window_of, minlength=placing.opened))])
    return Windows(members.astype(np.int64), bounds.astype(np.int64))


def one_each(documents: int) -> Windows:
    """A window for each document."""
    return Windows(np.arange(documents), np.arange(documents + 1))


class _Placing:
    """Where documents went, in the order of their placing: `counts[i]` more of them into `windows[i]`."""

    def __init__(self, capacity: int) -> None:
        self.windows: list[int] = []
        self.counts: list[int] = []
        self.opened = 0
        self._capacity = capacity
        self._length = capacity + 1
        self._fitting: list[tuple[int, int]] = []  # heap of (window, room), room for the current length
        self._waiting: dict[int, list[int]] = {}  # by a smaller room

    def place(self, length: int, count: int) -> None:
        """Places `count` documents of one length, which is less than that of the call before."""
        for room in range(length, self._length):
            for window in self._waiting.pop(room, ()):
                heapq.heappush(self._fitting, (window, room))
        self._length = length
        while count:
            if self._fitting:
                window, room = heapq.heappop(self._fitting)
            else:
                window, room = self.opened, self._capacity
                self.opened += 1
            taken = min(room // length, count)
            self.windows.append(window)
            self.counts.append(taken)
            count -= taken
            room -= taken * length
            if room >= length:
                heapq.heappush(self._fitting, (window, room))
            elif room:
                self._waiting.setdefault(room, []).append(window)
