"""The lines of a text file, each decoded alone, so that a bad one has a number and its neighbours survive."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from swiftkit.data.document import Origin, RowError

CHUNK = 1 << 16  # bytes of a UTF-16 file that are decoded at once
MARK = "\ufeff"
UTF16 = {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a source.

    Attributes:
        value: its columns.
        origin: where it stands.
        columnar: it comes from columns that all rows share, where a null may only mean "not in this row".
        stretch: it is a part of one long text (a .txt file), which goes on in the next row.
    """

    value: dict[str, Any]
    origin: Origin
    columnar: bool = False
    stretch: bool = False


Rows = Iterator[Row | RowError]
"""What a reader gives: rows, and in the place of a bad one its error."""


def text_lines(path: Path, name: str) -> Iterator[tuple[Origin, str | RowError]]:
    """Yields every line of a file, its line end included, or the error of one that cannot be decoded.

    Only \\n ends a line, whatever else Unicode calls a line break. The byte-order mark at the file's start is
    taken away.

    Args:
        path: UTF-8, or UTF-16 if it begins with that mark.
        name: what the user calls the file.
    """
    with path.open("rb") as file:
        codec = UTF16.get(file.read(2))
        file.seek(0)
        if codec is None:
            for number, line in enumerate(file, start=1):
                origin = Origin(name, number)
                try:
                    text = line.decode("utf-8")
                    yield origin, text.lstrip(MARK) if number == 1 else text
                except UnicodeDecodeError as failure:
                    yield (
                        origin,
                        origin.error(f"byte {failure.start + 1} is not UTF-8; save the file as UTF-8"),
                    )
            return
        for number, text in enumerate(_split(_decoded(file, codec)), start=1):
            origin = Origin(name, number)
            broken = next((c for c in text if "\ud800" <= c <= "\udfff"), None)
            if broken is not None:
                yield origin, origin.error(f"half a UTF-16 character ({broken!r}); save the file as UTF-8")
            else:
                yield origin, text.lstrip(MARK) if number == 1 else text


def _decoded(file: IO[bytes], codec: str) -> Iterator[str]:
    """UTF-16 as text; what is broken comes out as a lone surrogate, which no sound text has."""
    decoder = codecs.getincrementaldecoder(codec)(errors="surrogatepass")
    while chunk := file.read(CHUNK):
        yield decoder.decode(chunk)
    rest, _ = decoder.getstate()
    if rest:  # half a code unit, or the first half of a pair
        yield "\udfff"


def _split(chunks: Iterable[str]) -> Iterator[str]:
    begun: list[str] = []
    for chunk in chunks:
        *whole, rest = chunk.split("\n")
        for line in whole:
            yield "".join([*begun, line, "\n"])
            begun = []
        if rest:
            begun.append(rest)
    if begun:
        yield "".join(begun)
