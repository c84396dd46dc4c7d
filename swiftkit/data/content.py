"""Texts and lists inside a row: what counts as one, and the words that refuse what does not."""

from __future__ import annotations

import json
from typing import Any

from swiftkit.data.document import Origin
from swiftkit.data.read_json import no_constant


def text_of(content: Any, name: str, origin: Origin) -> str:
    """Text as it is, or the text parts of a list joined.

    Raises:
        RowError: it is neither, or a part is no text.
    """
    if isinstance(content, list):
        content = "".join(_part(part, name, origin) for part in content)
    if content is None:
        raise origin.error(f"the {name} is null; it needs a text")
    if not isinstance(content, str):
        raise origin.error(f"the {name} is text or a list of text parts, not {shortly(content)}")
    check_characters(content, origin)
    return content


def listed(value: Any, name: str, origin: Origin) -> list[Any]:
    """A list as it is, or written as JSON text (as csv and parquet files often have it).

    Raises:
        RowError: it is no list.
    """
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = json_of(value, name, origin)
    if not isinstance(value, list):
        raise origin.error(f"the {name} is a list, not {shortly(value)}")
    return value


def json_of(text: str, name: str, origin: Origin) -> Any:
    """The value of a JSON text inside a row.

    Raises:
        RowError: it is not exactly one JSON value.
    """
    try:
        return json.loads(text, parse_constant=no_constant)
    except (ValueError, RecursionError) as failure:
        raise origin.error(f"the {name} is not valid JSON: {failure}") from None


def check_answer(words: str, name: str, origin: Origin) -> None:
    """Refuses an answer without words."""
    if not words.strip():
        raise origin.error(f"the {name} is empty; an empty answer would train the stop token alone")


def check_characters(words: str, origin: Origin) -> None:
    """Refuses half a character, which no tokenizer takes."""
    if words.isascii():  # known without a look at them
        return
    try:
        words.encode("utf-8")
    except UnicodeEncodeError as failure:
        raise origin.error(
            f"half a character (a lone surrogate, {words[failure.start]!r}) in a text"
        ) from None


def shortly(value: Any) -> str:
    """A value for an error message."""
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def _part(part: Any, name: str, origin: Origin) -> str:
    if isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else part
    raise origin.error(
        f"the {name} has a part that is not text ({shortly(kind)}); only text parts are trained"
    )
