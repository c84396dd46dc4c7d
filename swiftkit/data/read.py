"""From a source as the user writes it to its rows, every line accounted for."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from swiftkit.data.document import Origin, RowError
from swiftkit.data.lines import Row, Rows
from swiftkit.data.read_hub import hub_rows
from swiftkit.data.read_json import json_file, json_lines
from swiftkit.data.read_table import comma_separated, parquet_rows, tab_separated
from swiftkit.data.read_text import stretches
from swiftkit.errors import UserError, nearest

READERS: dict[str, Callable[[Path, str], Rows]] = {
    ".jsonl": json_lines,
    ".json": json_file,
    ".csv": comma_separated,
    ".tsv": tab_separated,
    ".parquet": parquet_rows,
    ".txt": stretches,
}
SHIPPED_PREFIX = "swiftkit::"
HUBS = ("hf", "ms")


@dataclass(frozen=True, slots=True)
class Source:
    """A data set as it is written: a name, and how many rows of it to take (None is all)."""

    name: str
    limit: int | None = None


def read(
    written: str, *, on_bad: Callable[[RowError], None] | None = None, streaming: bool = False
) -> Iterator[Row]:
    """Yields the rows of a source in order.

    Args:
        written: a .jsonl, .json, .csv, .tsv, .parquet or .txt file, a folder of them, `hf::ID`, `ms::ID`,
            or `swiftkit::NAME` (a data set that ships with the project); `#N` behind it takes the first N
            rows (of a .txt, whose windows are cut later, all stretches come).
        on_bad: takes the error of a row that cannot be read; without it the first one is raised.
        streaming: a hub's rows are fetched as they are read.

    Raises:
        UserError: the source does not exist or is of another kind, or cannot be read on; RowError for a row
            (the message begins with `file:line: `).
    """
    source = parse_source(written)
    rows = rows_of(source, streaming=streaming)
    return islice(_good(rows, on_bad), source.limit) if source.limit else _good(rows, on_bad)


def parse_source(written: str) -> Source:
    """Takes the `#N` off a name. A file that is really called so is meant as it is.

    Raises:
        UserError: what follows # is no whole number from 1.
    """
    name, mark, count = written.rpartition("#")
    if not mark or Path(written).expanduser().exists():
        return Source(written)
    if not re.fullmatch("[0-9]+", count) or int(count) < 1:
        raise UserError(
            f"{written}: behind # stands how many rows to take, a whole number from 1, not {count!r}"
        )
    return Source(name, int(count))


def rows_of(source: Source, *, streaming: bool = False) -> Rows:
    """Yields all rows of a source, whatever its limit, and in the place of a bad row its error.

    Raises:
        UserError: the source does not exist or is of another kind.
    """
    files = files_of_source(source)
    return hub_rows(source.name, streaming=streaming) if files is None else _rows(files)


def files_of_source(source: Source) -> list[tuple[Path, str]] | None:
    """The files that a source stands for, each with the name that errors call it; None for a hub's data set.

    Raises:
        UserError: the source does not exist or is of another kind.
    """
    name = source.name
    hub, mark, _ = name.partition("::")
    if mark and hub in HUBS:
        return None
    if name.startswith(SHIPPED_PREFIX):
        return [(shipped(name), name)]
    if mark and not Path(name).exists():
        raise UserError(f"{name}: {hub}:: is not read; give a file, hf::ID, ms::ID or {SHIPPED_PREFIX}NAME")
    return files_of(name)


def files_of(name: str) -> list[tuple[Path, str]]:
    """The files that a path stands for, each with the name that errors call it.

    A folder stands for all files in and below it that can be read, in the order of their paths; hidden ones
    are left alone.

    Raises:
        UserError: there is no such file, or it is of a kind that is not read.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        inside = [
            entry
            for entry in sorted(path.rglob("*"))
            if entry.suffix.lower() in READERS
            and entry.is_file()
            and not any(part.startswith(".") for part in entry.relative_to(path).parts)
        ]
        if not inside:
            raise UserError(f"{name} is a folder without a {_kinds()} file")
        return [(entry, f"{name.rstrip('/')}/{entry.relative_to(path).as_posix()}") for entry in inside]
    if not path.is_file():
        beside = [entry.name for entry in path.parent.glob("*") if entry.suffix in READERS]
        raise UserError(f"no file {name}{nearest(path.name, beside, say='; did you mean {}?')}")
    if path.suffix.lower() not in READERS:
        raise UserError(
            f"{name}: files of kind {path.suffix or 'without a suffix'!r} are not read; "
            f"give a {_kinds()} file"
        )
    return [(path, name)]


def has_text(sources: Sequence[str]) -> bool:
    """Whether a text file is among the files of sources."""
    files = [files_of_source(parse_source(written)) or [] for written in sources]
    return any(path.suffix.lower() == ".txt" for own in files for path, _ in own)


def is_text(origin: Origin) -> bool:
    """Whether a row is a stretch of a text file."""
    return origin.unit == "line" and origin.file[-4:].lower() == ".txt"


def shipped(name: str) -> Path:
    """The file of a data set that ships with the project.

    Args:
        name: `swiftkit::NAME`.

    Raises:
        UserError: there is no such data set; the nearest name is offered.
    """
    word = name.removeprefix(SHIPPED_PREFIX)
    known = {path.stem: path for path in _shipped_folder().glob("*.jsonl")}
    if word in known:
        return known[word]
    offer = nearest(word, known, say=f"; did you mean {SHIPPED_PREFIX}{{}}?")
    raise UserError(f"no data set {name}: there are {', '.join(sorted(known)) or 'none'}{offer}")


def _shipped_folder() -> Path:
    """A wheel carries the data sets inside the package; a checkout has them at the repository's root."""
    package = Path(__file__).parents[1]
    return package / "_data" if (package / "_data").is_dir() else package.parent / "data"


def _kinds() -> str:
    *some, last = READERS
    return f"{', '.join(some)} or {last}"


def _rows(files: list[tuple[Path, str]]) -> Rows:
    for path, name in files:
        try:
            yield from READERS[path.suffix.lower()](path, name)
        except OSError as failure:
            raise UserError(f"{name} cannot be read: {failure.strerror or failure}") from None


def _good(rows: Rows, on_bad: Callable[[RowError], None] | None) -> Iterator[Row]:
    for row in rows:
        if isinstance(row, Row):
            yield row
        elif on_bad is None:
            raise row
        else:
            on_bad(row)
