"""Marks around what a model writes in a message, and where they stand in the rendered text.

The marks are Unicode's noncharacters: never in real text, never white space, so that templates pass them
through. Messages take two sets in turn, which tells where one ends and the next begins.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from swiftkit.data.conversation import Message
from swiftkit.data.document import Origin

NONCHARACTERS = tuple(map(chr, range(0xFDD0, 0xFDF0)))
_MARK = re.compile(f"[{NONCHARACTERS[0]}-{NONCHARACTERS[-1]}]")
THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # keys that hold what was thought before the answer
THINK, UNTHINK = "<think>", "</think>"
Kind: TypeAlias = Literal["start", "end", "name", "thought"]
KINDS: tuple[Kind, ...] = ("start", "end", "name", "thought")


@dataclass(frozen=True, slots=True)
class Found:
    """A mark in the rendered text.

    Attributes:
        kind: start and end stand around words, two names around a function's name, thought in a thought.
        at: characters of the text, without marks, before it.
    """

    kind: Kind
    at: int


class Marks:
    """The marks of one row: those that its own words do not use.

    Raises:
        RowError: the row uses nearly all of them.
    """

    def __init__(self, messages: Sequence[Message], origin: Origin) -> None:
        written = json.dumps(messages, ensure_ascii=False, default=str)
        used = set(_MARK.findall(written))
        free = [mark for mark in NONCHARACTERS if mark not in used]
        if len(free) < 2 * len(KINDS) + 2:
            raise origin.error("the row uses up the characters U+FDD0 to U+FDEF; take some out")
        self._sets = [dict(zip(KINDS, free[parity::2], strict=False)) for parity in (0, 1)]
        self._known = {mark: (kind, parity) for parity in (0, 1) for kind, mark in self._sets[parity].items()}
        self.hidden = (free[-2], free[-1])  # stand for <think> and </think>

    def put(self, messages: Sequence[Message], chosen: Iterable[int]) -> list[Message]:
        """The messages, with marks in the chosen ones."""
        marked = list(messages)
        for place, index in enumerate(chosen):
            marked[index] = _marked(messages[index], self._sets[place % 2])
        return marked

    def take(self, text: str) -> tuple[str, list[list[Found]]]:
        """The text without marks, and the marks of each message in their order."""
        plain: list[str] = []
        groups: list[list[Found]] = []
        last: int | None = None
        at = begun = 0
        for mark in _MARK.finditer(text):
            if mark.group() not in self._known:
                continue
            kind, parity = self._known[mark.group()]
            plain.append(text[begun : mark.start()])
            at, begun = at + mark.start() - begun, mark.end()
            if parity != last:
                groups.append([])
                last = parity
            groups[-1].append(Found(kind, at))
        return "".join([*plain, text[begun:]]), groups


def has_thought(content: str) -> bool:
    """Whether an answer begins with a thinking block that is not empty."""
    before, _, rest = content.partition(THINK)
    thought, closed, _ = rest.partition(UNTHINK)
    return bool(closed and thought.strip() and not before.strip())


def _marked(message: Message, marks: dict[Kind, str]) -> Message:
    start, end, name, thought = (marks[kind] for kind in KINDS)
    marked = dict(message)
    for key in THOUGHTS:
        if isinstance(message.get(key), str):
            marked[key] = _wrap(message[key], thought, "")
    content = message["content"]
    if message.get("tool_calls"):
        marked["tool_calls"] = [
            {
                **call,
                "function": {
                    "name": _wrap(call["function"]["name"], name, name),
                    "arguments": _leaves(call["function"]["arguments"], start, end),
                },
            }
            for call in message["tool_calls"]
        ]
        if not content.strip():
            return marked
    if has_thought(content):
        before, opened, rest = content.partition(THINK)
        content = before + opened + _wrap(rest, thought, "")
    marked["content"] = _wrap(content, start, end)
    return marked


def _leaves(value: Any, start: str, end: str) -> Any:
    """Marks around every text in a call's arguments."""
    if isinstance(value, dict):
        return {key: _leaves(part, start, end) for key, part in value.items()}
    if isinstance(value, list):
        return [_leaves(part, start, end) for part in value]
    return _wrap(value, start, end) if isinstance(value, str) and value.strip() else value


def _wrap(content: str, start: str, end: str) -> str:
    """Marks stand inside the outer white space, so that a template's trim acts as without them."""
    core = content.strip()
    lead = len(content) - len(content.lstrip())
    return content[:lead] + start + core + end + content[lead + len(core) :]
