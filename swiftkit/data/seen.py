"""Rows one by one on the way that training takes, for those who look at them: nothing is kept, none stops."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby, islice

from swiftkit.data.document import Document, RowError
from swiftkit.data.layout import Layout
from swiftkit.data.lines import Row
from swiftkit.data.read import is_text, parse_source, rows_of
from swiftkit.data.render import Renderer
from swiftkit.data.shapes import SHAPES, Example, column_names, to_example
from swiftkit.data.windows import TextWindows

BATCH_ROWS = 512  # rows that the tokenizer takes at once
TEXT_FILE = "text file"


@dataclass(frozen=True, slots=True)
class Seen:
    """A row before any cut.

    Attributes:
        shape: the keys that it was taken by, or TEXT_FILE.
        document: its tokens.
        layout: its text; None for a window of a text file.
        example: what it means; None for a window of a text file.
    """

    shape: str
    document: Document
    layout: Layout | None = None
    example: Example | None = None


def see(
    written: str,
    renderer: Renderer,
    *,
    window: int,
    columns: Mapping[str, str] | None = None,
    streaming: bool = False,
    batch_rows: int = BATCH_ROWS,
) -> Iterator[Seen | RowError]:
    """Yields every row of a source as training takes it, and in the place of a bad one its error.

    Args:
        written: as `read` takes it; `#N` counts the rows that can be used.
        renderer: with tokenizer and template.
        window: tokens that a text file is cut into.
        columns: as `--columns` has it.
        streaming: see `read`.
        batch_rows: rows that are read ahead and tokenised together.

    Raises:
        UserError: the source does not exist or cannot be read on.
    """
    source = parse_source(written)
    names = column_names(columns or {})
    rows = rows_of(source, streaming=streaming)
    found = _all(rows, renderer, names, window=window, batch_rows=batch_rows)
    left = source.limit
    for item in found:
        yield item
        if left is not None and isinstance(item, Seen):
            left -= 1
            if left == 0:
                return


def _all(
    rows: Iterable[Row | RowError],
    renderer: Renderer,
    names: Mapping[str, str],
    *,
    window: int,
    batch_rows: int,
) -> Iterator[Seen | RowError]:
    for text, run in groupby(rows, key=lambda row: row.origin.file if is_text(row.origin) else None):
        if text is None:
            while batch := list(islice(run, batch_rows)):
                yield from _rows(batch, renderer, names)
            continue
        bad: list[RowError] = []
        for document in TextWindows(renderer, window).cut(_good(run, bad)):
            yield from bad
            bad.clear()
            yield Seen(TEXT_FILE, document)
        yield from bad


def _good(rows: Iterable[Row | RowError], bad: list[RowError]) -> Iterator[Row]:
    for row in rows:
        if isinstance(row, Row):
            yield row
        else:
            bad.append(row)


def _rows(
    batch: list[Row | RowError], renderer: Renderer, names: Mapping[str, str]
) -> Iterator[Seen | RowError]:
    taken = [_taken(row, renderer, names) for row in batch]
    layouts = [entry[1] for entry in taken if not isinstance(entry, RowError)]
    documents = iter(renderer.encode(layouts))
    for row, entry in zip(batch, taken, strict=True):
        if isinstance(entry, RowError) or isinstance(row, RowError):
            assert isinstance(entry, RowError)
            yield entry
        else:
            example, layout = entry
            yield Seen(_shape(row, names), next(documents), layout, example)


def _taken(
    row: Row | RowError, renderer: Renderer, names: Mapping[str, str]
) -> tuple[Example, Layout] | RowError:
    if isinstance(row, RowError):
        return row
    try:
        example = to_example(row, names)
        return example, renderer.layout(example)
    except RowError as error:
        return error


def _shape(row: Row, names: Mapping[str, str]) -> str:
    """The keys that `to_example` took the row by: first those that were named, then by the table's order."""
    filled = {names.get(key, key): key in names for key, value in row.value.items() if value is not None}
    fits = [needed for needed in SHAPES if filled.keys() >= set(needed)]
    return " + ".join(min(fits, key=lambda needed: not any(filled[key] for key in needed)))
