"""A .txt file: one long text, in stretches that end where a line does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from swiftkit.data.document import Origin, RowError
from swiftkit.data.lines import MARK, Row, Rows, text_lines

STRETCH = 1 << 16  # characters, more or less: what is tokenised at once


def stretches(path: Path, name: str) -> Rows:
    """Yields the text in order, as rows with the one key `text`; \\r\\n becomes \\n.

    What is tokenised ends at a line's end (in a very long line at a space), so that the tokens are those of
    the whole text, but for what a tokenizer joins over a line's end.
    """
    begun: list[str] = []
    begin = Origin(name, 1)
    size = 0
    for origin, text in text_lines(path, name):
        if isinstance(text, RowError):
            yield text
            continue
        text = text.removeprefix(MARK)  # of files that were joined
        plain = text[:-2] + "\n" if text.endswith("\r\n") else text
        for piece in _pieces(plain):
            begin = begin if begun else origin
            begun.append(piece)
            size += len(piece)
            if size >= STRETCH:
                yield Row({"text": "".join(begun)}, begin, stretch=True)
                begun, size = [], 0
    if begun:
        yield Row({"text": "".join(begun)}, begin, stretch=True)


def _pieces(line: str) -> Iterator[str]:
    at = 0
    while len(line) - at > 2 * STRETCH:
        space = line.rfind(" ", at + 1, at + STRETCH)
        stop = at + STRETCH if space < 0 else space
        yield line[at:stop]
        at = stop
    yield line[at:]
