"""Rows of JSON: one object a line, or a file that is one array of objects."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

from swiftkit.data.document import Origin, RowError
from swiftkit.data.lines import MARK, Row, Rows, text_lines
from swiftkit.errors import UserError

SPACE = " \t\r\n"
_GAP = re.compile(r"[ \t\r\n]*")


def no_constant(word: str) -> NoReturn:
    """Refuses NaN and Infinity, which Python's reader would let through."""
    raise ValueError(f"{word} is no JSON value; use null or leave the key out")


_DECODER = json.JSONDecoder(parse_constant=no_constant)


def json_lines(path: Path, name: str) -> Rows:
    """Yields the object of each line; blank lines are passed over."""
    return _rows_of(text_lines(path, name))


def json_file(path: Path, name: str) -> Rows:
    """Yields the objects of an array, or of lines where the file is no array.

    An array is read as a whole, since it has no lines that stand alone.

    Raises:
        UserError: what stands between two objects is wrong; whatever follows cannot be told.
    """
    lines = text_lines(path, name)
    for origin, text in lines:
        opened = not isinstance(text, RowError) and text.lstrip(SPACE).startswith("[")
        if opened or isinstance(text, RowError) or text.strip(SPACE):
            rest = chain([(origin, text)], lines)
            return _array(rest, name) if opened else _rows_of(rest)
    return iter(())


def _parsed(text: str, origin: Origin) -> Any:
    try:
        return _DECODER.decode(text)
    except json.JSONDecodeError as failure:
        raise origin.error(_rule(text, failure)) from None
    except (ValueError, RecursionError) as failure:
        raise origin.error(f"not valid JSON: {failure}") from None


def _rows_of(lines: Iterator[tuple[Origin, str | RowError]]) -> Rows:
    for origin, text in lines:
        if isinstance(text, RowError):
            yield text
        # Marks at a line's start come from files that were joined, empty ones too; inside a value it is data.
        elif text := text.lstrip(SPACE + MARK).rstrip(SPACE):
            try:
                value = _parsed(text, origin)
            except RowError as bad:
                yield bad
                continue
            yield _row(value, origin, "write one object a line")


def _row(value: Any, origin: Origin, mend: str) -> Row | RowError:
    if isinstance(value, dict):
        return Row(value, origin)
    return origin.error(f"a row is a JSON object {{...}}, not {_kind(value)}; {mend}")


def _array(lines: Iterator[tuple[Origin, str | RowError]], name: str) -> Rows:
    """The objects of one array; a line is counted by the newlines before its object."""
    first, texts = 0, []
    for origin, text in lines:
        if isinstance(text, RowError):
            raise UserError(str(text))  # the array has no rows that stand alone
        first = first or origin.line
        texts.append(text)
    whole = "".join(texts)
    line, counted = first, 0
    at = _after_gap(whole, whole.index("[") + 1)
    while not whole.startswith("]", at):
        line, counted = line + whole.count("\n", counted, at), at
        origin = Origin(name, line)
        try:
            value, at = _DECODER.raw_decode(whole, at)
        except (ValueError, RecursionError) as failure:
            rule = failure.msg if isinstance(failure, json.JSONDecodeError) else str(failure)
            raise UserError(f"{origin}: not valid JSON in this object of the array: {rule}") from None
        yield _row(value, origin, "write an array of objects")
        at = _after_gap(whole, at)
        if whole.startswith(",", at):
            at = _after_gap(whole, at + 1)
            if not whole.startswith("]", at):
                continue
        elif whole.startswith("]", at):
            break
        line += whole.count("\n", counted, at)
        raise UserError(f"{name}:{line}: a comma stands between two objects of an array, ] behind the last")
    rest = _after_gap(whole, at + 1)
    if rest < len(whole):
        line += whole.count("\n", counted, rest)
        raise UserError(f"{name}:{line}: more follows the array; write one array, or one object a line")


def _after_gap(text: str, at: int) -> int:
    gap = _GAP.match(text, at)
    assert gap is not None
    return gap.end()


def _rule(text: str, failure: json.JSONDecodeError) -> str:
    if failure.msg == "Extra data":
        return f"more follows the first JSON value at character {failure.pos + 1}; write one object a line"
    if "\x00" in text:
        return "the line has null bytes: the file may be UTF-16 without its mark; save it as UTF-8"
    if text in ("[", "{"):
        mend = "write one object a line" if text == "{" else "write one object a line, or call the file .json"
        return f"the JSON goes on over several lines; {mend}"
    return f"not valid JSON at character {failure.pos + 1}: {failure.msg}"


def _kind(value: Any) -> str:
    kinds = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return kinds.get(type(value), "a number")
