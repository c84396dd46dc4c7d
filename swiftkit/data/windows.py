"""A long text, cut into windows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from swiftkit.data.content import check_characters
from swiftkit.data.document import Document, Origin
from swiftkit.data.lines import Row
from swiftkit.data.render import Renderer


def tokens_of(row: Row, renderer: Renderer) -> NDArray[np.int64]:
    """The ids of a stretch of text, and the line of each, [2, tokens]."""
    text = row.value["text"]
    check_characters(text, row.origin)
    ((ids, offsets),) = renderer.tokens([text])
    breaks = np.flatnonzero(np.frombuffer(text.encode("utf-32-le"), np.uint32) == ord("\n"))
    return np.stack([ids, row.origin.line + np.searchsorted(breaks, offsets[:, 0])])


class TextWindows:
    """Cuts one text into documents that fill a window.

    Each begins with the tokenizer's start token, where it has the habit to put one; the last ends with the
    end-of-sequence token. A window's first word follows nothing, so it is no target.

    Args:
        renderer: with the tokenizer.
        window: tokens of a window, at least 2.
    """

    def __init__(self, renderer: Renderer, window: int) -> None:
        self._renderer = renderer
        self._bos = renderer.bos_id if renderer.adds_bos else None
        self._room = window - (self._bos is not None)

    def cut(self, stretches: Iterable[Row]) -> Iterator[Document]:
        """Yields the windows of the text that the stretches make up, reading no further than each needs."""
        return self.cut_tokens((row, tokens_of(row, self._renderer)) for row in stretches)

    def cut_tokens(self, stretches: Iterable[tuple[Row, NDArray[np.int64]]]) -> Iterator[Document]:
        """The same of stretches with their tokens (see `tokens_of`)."""
        waiting = np.zeros((2, 0), np.int64)  # ids, and the line of each
        file = ""
        for row, tokens in stretches:
            file = row.origin.file
            if not waiting.size and self._bos is not None and tokens[0, :1] == self._bos:
                tokens = tokens[:, 1:]  # the text writes its start token itself
            waiting = np.concatenate([waiting, tokens], axis=1)
            while waiting.shape[1] > self._room:  # one more stays, so that the end is known as such
                yield self._window(waiting[:, : self._room], file)
                waiting = waiting[:, self._room :]
        if not waiting.size:
            return
        if waiting[0, -1] != self._renderer.eos_id:
            waiting = np.append(waiting, [[self._renderer.eos_id], [waiting[1, -1]]], axis=1)
        for start in range(0, waiting.shape[1], self._room):
            yield self._window(waiting[:, start : start + self._room], file)

    def _window(self, tokens: NDArray[np.int64], file: str) -> Document:
        ids, origin = tokens[0].astype(np.int32), Origin(file, int(tokens[1, 0]))
        trained = np.ones(len(ids), bool)
        if self._bos is not None:
            ids, trained = np.insert(ids, 0, self._bos), np.insert(trained, 0, False)
        return Document(ids, trained, origin)
