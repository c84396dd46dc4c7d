"""Which documents share a window: first-fit decreasing."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Packs documents into windows, the longest first, each into the first window with room for it.

    Exact first-fit decreasing. A segment tree over the room that is left (0..capacity) knows the lowest
    window at or above any room, so a document costs O(log capacity), and a heap step among windows
    with equal room.

    Args:
        lengths: tokens of each document, each from 1 to `capacity`.
        capacity: tokens of a window.

    Returns:
        For each window, the indices of its documents; every index appears exactly once.
    """
    assert all(0 < length <= capacity for length in lengths), "documents are cut to a window before packing"
    windows: list[list[int]] = []
    rooms = _FirstWithRoom(capacity)
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        length = lengths[index]
        found = rooms.take(length)
        if found is None:
            window, room = len(windows), capacity
            windows.append([])
        else:
            window, room = found
        windows[window].append(index)
        rooms.put(window, room - length)
    return windows


class _FirstWithRoom:
    """Windows by the room that is left in them; the lowest window with enough room comes first."""

    def __init__(self, capacity: int) -> None:
        self._leaves = 1 << capacity.bit_length()  # more than capacity, so that room 0..capacity fits
        self._lowest: list[int | float] = [float("inf")] * (2 * self._leaves)
        self._windows: list[list[int]] = [[] for _ in range(capacity + 1)]

    def put(self, window: int, room: int) -> None:
        heapq.heappush(self._windows[room], window)
        self._refresh(room)

    def take(self, length: int) -> tuple[int, int] | None:
        """Removes and returns (window, room) of the lowest window with room >= length."""
        node = self._best_from(length)
        if self._lowest[node] == float("inf"):
            return None
        while node < self._leaves:
            node = 2 * node + (self._lowest[2 * node] > self._lowest[2 * node + 1])
        room = node - self._leaves
        window = heapq.heappop(self._windows[room])
        self._refresh(room)
        return window, room

    def _best_from(self, room: int) -> int:
        """The node with the lowest window among those that cover all leaves from `room` on."""
        node = best = self._leaves + room
        while node > 1:
            if node % 2 == 0 and self._lowest[node + 1] < self._lowest[best]:
                best = node + 1
            node //= 2
        return best

    def _refresh(self, room: int) -> None:
        node = self._leaves + room
        self._lowest[node] = self._windows[room][0] if self._windows[room] else float("inf")
        while node > 1:
            node //= 2
            self._lowest[node] = min(self._lowest[2 * node], self._lowest[2 * node + 1])
