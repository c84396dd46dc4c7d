"""From a source's name to its rows: JSON lines, every line accounted for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from swiftkit.data.document import Origin
from swiftkit.errors import UserError, nearest

SUFFIXES = (".jsonl", ".json")
SHIPPED_PREFIX = "swiftkit::"


def _shipped_folder() -> Path:
    """A wheel carries the data sets inside the package; a checkout has them at the repository's root."""
    package = Path(__file__).parents[1]
    return package / "_data" if (package / "_data").is_dir() else package.parent / "data"


@dataclass(frozen=True, slots=True)
class Row:
    """One JSON object of a file."""

    value: dict[str, Any]
    origin: Origin


def read(source: str) -> Iterator[Row]:
    """Yields the rows of a JSON-lines file in order.

    Args:
        source: a path or `swiftkit::NAME` (a data set that ships with the project); `#N` behind it
            takes the first N rows.

    Raises:
        UserError: the source does not exist or is of another kind, or a line is not exactly one JSON
            object in UTF-8 (the message begins with `file:line: `).
    """
    name, limit = _split_limit(source)
    path = shipped(name) if name.startswith(SHIPPED_PREFIX) else _existing(name)
    return _rows(path, name, limit)


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


def _split_limit(source: str) -> tuple[str, int | None]:
    name, mark, count = source.rpartition("#")
    if not mark or Path(source).exists():
        return source, None
    if not re.fullmatch("[0-9]+", count) or int(count) < 1:
        raise UserError(
            f"{source}: behind # stands how many rows to take, a whole number from 1, not {count!r}"
        )
    return name, int(count)


def _existing(name: str) -> Path:
    origin, mark, _ = name.partition("::")
    if mark:
        raise UserError(f"{name}: {origin}:: is not read; give a .jsonl file, or {SHIPPED_PREFIX}NAME")
    path = Path(name).expanduser()
    if path.is_dir():
        raise UserError(f"{name} is a folder; give a file in it, one JSON object a line")
    if not path.exists():
        beside = [entry.name for entry in path.parent.glob("*") if entry.suffix in SUFFIXES]
        raise UserError(f"no file {name}{nearest(path.name, beside, say='; did you mean {}?')}")
    if path.suffix.lower() not in SUFFIXES:
        raise UserError(
            f"{name}: files of kind {path.suffix or 'without a suffix'!r} are not read; "
            f"write one JSON object a line into a {' or '.join(SUFFIXES)} file"
        )
    return path


def _rows(path: Path, name: str, limit: int | None) -> Iterator[Row]:
    taken = 0
    with path.open("rb") as lines:  # bytes: only \n ends a line, whatever else Unicode calls a line break
        for number, line in enumerate(lines, start=1):
            origin = Origin(name, number)
            text = _decoded(line, origin)
            if not text:
                continue
            yield Row(_parsed(text, origin), origin)
            taken += 1
            if taken == limit:
                return


def _decoded(line: bytes, origin: Origin) -> str:
    try:
        # A mark at a later line's start comes from files that were joined; inside a value it is data.
        return line.decode("utf-8").strip(" \t\r\n").removeprefix("\ufeff").strip(" \t\r\n")
    except UnicodeDecodeError as failure:
        raise origin.error(f"byte {failure.start + 1} is not UTF-8; save the file as UTF-8") from None


def _parsed(text: str, origin: Origin) -> dict[str, Any]:
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except json.JSONDecodeError as failure:
        if failure.msg == "Extra data":
            rule = (
                f"more follows the first JSON value at character {failure.pos + 1}; write one object a line"
            )
        elif text in ("[", "{"):
            rule = "the JSON goes on over several lines; write one object a line"
        else:
            rule = f"not valid JSON at character {failure.pos + 1}: {failure.msg}"
        raise origin.error(rule) from None
    except (ValueError, RecursionError) as failure:
        raise origin.error(f"not valid JSON: {failure}") from None
    if not isinstance(value, dict):
        raise origin.error(f"a row is a JSON object {{...}}, not {_kind(value)}; write one object a line")
    return value


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON value; use null or leave the key out")


def _kind(value: Any) -> str:
    kinds = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return kinds.get(type(value), "a number")
