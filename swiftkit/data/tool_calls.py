"""Tool calls, tool results and tool descriptions, from every spelling to the one that templates read.

That one is OpenAI's, with arguments as an object: {"type": "function", "function": {"name", "arguments"}}.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from swiftkit.data.content import check_characters, json_of, listed, shortly, text_of
from swiftkit.data.document import Origin

CALL_ROLES = ("tool_call", "function_call")
RESULT_ROLES = ("tool", "tool_response", "function", "observation", "ipython")
Call = dict[str, Any]


def calls_of_message(
    message: Mapping[str, Any], number: int, origin: Origin, *, columnar: bool
) -> list[Call]:
    """The calls in an assistant's `tool_calls`, or in its older `function_call`.

    Raises:
        RowError: a call without a name, or with arguments that are no object.
    """
    calls = message.get("tool_calls") or []
    if message.get("function_call"):
        calls = [message["function_call"]]
    return [
        _call(call, f"call {place} of message {number}", origin, columnar=columnar)
        for place, call in enumerate(listed(calls, f"tool_calls of message {number}", origin), start=1)
    ]


def call_of_turn(content: Any, number: int, origin: Origin, *, columnar: bool) -> list[Call]:
    """The call (or list of calls) that is the content of a turn of its own, as an object or as JSON text.

    Raises:
        RowError: as above.
    """
    value = json_of(content, f"call in message {number}", origin) if isinstance(content, str) else content
    return [
        _call(call, f"call in message {number}", origin, columnar=columnar)
        for call in (value if isinstance(value, list) else [value])
    ]


def result_text(content: Any, name: str, origin: Origin) -> str:
    """What a tool gave back: text, text parts, or any other JSON value, which is written as JSON.

    Raises:
        RowError: it is null.
    """
    texts = isinstance(content, list) and all(isinstance(part, dict) and "type" in part for part in content)
    if content is None or isinstance(content, str) or texts:
        return text_of(content, name, origin)
    return _json(content, name, origin)


def tools_of(tools: Any, origin: Origin, *, columnar: bool) -> list[dict[str, Any]] | None:
    """The row's tool descriptions, from a list or JSON text; none where there are none.

    Raises:
        RowError: they are no list of objects.
    """
    if not tools:
        return None
    found = listed(tools, "'tools'", origin)
    found = [
        json_of(tool, "description of a tool", origin) if isinstance(tool, str) else tool for tool in found
    ]
    if not all(isinstance(tool, dict) for tool in found):
        raise origin.error("'tools' is a list of objects that describe functions")
    _json(found, "'tools'", origin)
    # Shared columns give every tool the keys of all others; a description has no use for a null.
    return [_without_nulls(tool) for tool in found] if columnar else found


def _call(call: Any, name: str, origin: Origin, *, columnar: bool) -> Call:
    body = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(body, dict) or not isinstance(body.get("name"), str) or not body["name"].strip():
        raise origin.error(f"{name} is no object with a function's name and arguments: {shortly(call)}")
    outer = {} if body is call else {key: value for key, value in call.items() if value is not None}
    arguments = _arguments(body.get("arguments"), name, origin)
    if columnar and not isinstance(body.get("arguments"), str) and _has_null(arguments):
        raise origin.error(
            f"the arguments of {name} hold null, and in columns that rows share nobody can tell a null that "
            "was written from a key that was not; keep arguments as JSON text, or give the rows as .jsonl"
        )
    return {**outer, "type": "function", "function": {"name": body["name"], "arguments": arguments}}


def _arguments(arguments: Any, name: str, origin: Origin) -> dict[str, Any]:
    if arguments is None or arguments == "":
        return {}
    if isinstance(arguments, str):
        arguments = json_of(arguments, f"argument text of {name}", origin)
    if not isinstance(arguments, dict):
        raise origin.error(f"the arguments of {name} are a JSON object, not {shortly(arguments)}")
    _json(arguments, f"arguments of {name}", origin)
    return arguments


def _json(value: Any, name: str, origin: Origin) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as failure:
        raise origin.error(f"the {name} cannot be written as JSON: {failure}") from None
    check_characters(text, origin)
    return text


def _has_null(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_null, value.values()))
    return any(map(_has_null, value)) if isinstance(value, list) else value is None


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value
