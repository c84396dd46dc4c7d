"""Rows of tables: csv, tsv and parquet."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swiftkit.data.document import Origin, RowError
from swiftkit.data.lines import Row, Rows, text_lines
from swiftkit.errors import UserError

if TYPE_CHECKING:
    import pyarrow.parquet

LONGEST_FIELD = 2**31 - 1  # of the csv module, whose own limit of 128 KiB is for the whole process
BATCH_ROWS = 1024  # of parquet, in memory at once


def comma_separated(path: Path, name: str) -> Rows:
    """Yields the rows of a csv file; the first line names the columns."""
    return _separated(path, name, ",")


def tab_separated(path: Path, name: str) -> Rows:
    """Yields the rows of a tsv file; the first line names the columns."""
    return _separated(path, name, "\t")


def _separated(path: Path, name: str, delimiter: str) -> Rows:
    """Every field stays the text that it is; an empty one counts as not there (null).

    Raises:
        UserError: a quote is left open or stands in the wrong place: where a row ends cannot be told then,
            so that the rows behind it could be read as something else.
    """
    csv.field_size_limit(LONGEST_FIELD)
    reader = csv.reader(_sound(text_lines(path, name)), delimiter=delimiter, strict=True)
    columns: list[str] = []
    while True:
        origin = Origin(name, reader.line_num + 1)
        try:
            fields = next(reader, None)
        except csv.Error as failure:
            raise UserError(f"{origin}: the row that begins here is not sound csv: {failure}") from None
        if fields is None:
            return
        if not fields:
            continue
        if not columns:
            columns = _columns(fields, origin)
        elif len(fields) == len(columns):
            yield Row({key: text or None for key, text in zip(columns, fields, strict=True)}, origin)
        else:
            yield origin.error(f"{len(fields)} fields, where the first line names {len(columns)} columns")


def _sound(lines: Iterator[tuple[Origin, str | RowError]]) -> Iterator[str]:
    for _, text in lines:
        if isinstance(text, RowError):
            raise UserError(str(text))  # the line may be the middle of a row
        yield text


def _columns(fields: list[str], origin: Origin) -> list[str]:
    twice = next((field for field in fields if fields.count(field) > 1), None)
    if twice is not None or not all(fields):
        said = f"{twice!r} twice" if twice else "a column without a name"
        raise UserError(f"{origin}: the first line names the columns, and has {said}")
    return fields


def parquet_rows(path: Path, name: str) -> Rows:
    """Yields the rows of a parquet file, with the types of its columns.

    Raises:
        UserError: pyarrow is not installed, or the file is damaged.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError(f"{name}: parquet files need pyarrow; pip install 'swiftkit[parquet]'") from None
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for value in _records(file):
                number += 1
                yield Row(value, Origin(name, number, "row"), columnar=True)
    except (pyarrow.ArrowException, UnicodeDecodeError) as failure:
        place = Origin(name, number + 1, "row")
        raise UserError(f"{place}: the file is no sound parquet: {_one_line(failure)}") from None


def _records(file: pyarrow.parquet.ParquetFile) -> Iterator[dict[str, Any]]:
    for batch in file.iter_batches(batch_size=BATCH_ROWS):
        yield from batch.to_pylist()


def _one_line(failure: Exception) -> str:
    return " ".join(str(failure).split())
