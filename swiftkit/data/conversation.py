"""Conversations: what a row with turns becomes, and the checks that every turn passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from swiftkit.data.content import check_answer, listed, text_of
from swiftkit.data.document import Origin
from swiftkit.data.tool_calls import (
    CALL_ROLES,
    RESULT_ROLES,
    call_of_turn,
    calls_of_message,
    result_text,
    tools_of,
)
from swiftkit.errors import nearest

Message: TypeAlias = dict[str, Any]
TrainOn: TypeAlias = Literal["assistant", "last", "all"]

ROLES = {
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "model", "bot", "chatgpt"), "assistant"),
    **dict.fromkeys(RESULT_ROLES, "tool"),
    **dict.fromkeys(CALL_ROLES, "assistant"),
    "system": "system",
    "developer": "developer",
}
SYSTEM_ROLES = ("system", "developer")
# Other tools' switches for a turn that is context only: ms-swift, axolotl, and OpenAI's fine-tuning format.
LOSS_SWITCHES = ("loss", "train", "weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Turns that the chat template renders; answers are trained.

    Attributes:
        messages: dicts with `role` and `content` (text), `tool_calls` (whose arguments are objects), and
            what else the template may read.
        origin: the row's file and line.
        tools: tool descriptions for the template.
        context: indices of messages that are shown but never trained.
        wanted: indices of messages that are trained whatever the rule says.
    """

    messages: list[Message]
    origin: Origin
    tools: list[dict[str, Any]] | None = None
    context: frozenset[int] = frozenset()
    wanted: frozenset[int] = frozenset()

    def trained(self, rule: TrainOn) -> list[int]:
        """Indices of the messages that are trained; `last` is all that follows the last answered question."""
        roles = [message["role"] for message in self.messages]
        answers = {index for index, role in enumerate(roles) if role == "assistant"}
        if rule == "last" and answers:
            question = max((i for i in range(max(answers)) if roles[i] == "user"), default=-1)
            answers = {index for index in answers if index > question}
        return sorted((answers | self.wanted) - self.context)

    def told_apart(self, rule: TrainOn) -> list[int]:
        """Indices of the messages whose place in the text has to be known: answers, and exceptions."""
        answers = {index for index, message in enumerate(self.messages) if message["role"] == "assistant"}
        return sorted(answers.union(self.trained(rule), self.context if rule == "all" else ()))

    def with_front(self, front: Sequence[Message], *, dropping: int = 0) -> Conversation:
        """The conversation with other messages in the place of its first ones."""
        by = len(front) - dropping
        return replace(
            self,
            messages=[*front, *self.messages[dropping:]],
            context=frozenset(index + by for index in self.context if index >= dropping),
            wanted=frozenset(index + by for index in self.wanted if index >= dropping),
        )


def conversation(
    value: Mapping[str, Any], turns: Any, origin: Origin, *, shown: int = 0, columnar: bool = False
) -> Conversation:
    """A conversation from the turns of a row, with its `system` and `tools` columns.

    Args:
        value: the row.
        turns: its messages, as they are written.
        origin: where it stands.
        shown: the first turns, of which none is trained.
        columnar: see Row.

    Raises:
        RowError: for the first turn that is wrong.
    """
    turns = listed(turns, "conversation", origin)
    if not turns:
        raise origin.error("the conversation is empty; it needs messages with role and content")
    messages: list[Message] = []
    switches: list[bool | None] = []
    for number, turn in enumerate(turns, start=1):
        message, switch = _message(turn, number, origin, columnar=columnar)
        switch = False if number <= shown else switch
        if turn["role"] in CALL_ROLES and messages and messages[-1]["role"] == "assistant":
            # Several calls, or words and a call, of one answer.
            messages[-1].setdefault("tool_calls", []).extend(message["tool_calls"])
        else:
            messages.append(message)
            switches.append(switch)
    for number, message in enumerate(messages, start=1):
        if message["role"] == "assistant" and not message.get("tool_calls"):
            check_answer(message["content"], f"content of message {number}", origin)
    found = Conversation(
        messages=messages,
        origin=origin,
        context=frozenset(index for index, switch in enumerate(switches) if switch is False),
        wanted=frozenset(index for index, switch in enumerate(switches) if switch),
    )
    return completed(found, value, columnar=columnar)


def completed(found: Conversation, value: Mapping[str, Any], *, columnar: bool) -> Conversation:
    """A conversation with the `tools` and the `system` column of its row.

    Raises:
        RowError: for a column that is wrong.
    """
    if tools := tools_of(value.get("tools"), found.origin, columnar=columnar):
        found = replace(found, tools=tools)
    system = value.get("system")
    if system and found.messages[0]["role"] not in SYSTEM_ROLES:
        return found.with_front([{"role": "system", "content": text_of(system, "system", found.origin)}])
    return found


def _message(turn: Any, number: int, origin: Origin, *, columnar: bool) -> tuple[Message, bool | None]:
    """A checked message, and what the turn says about its training (None is nothing)."""
    if not isinstance(turn, dict) or not isinstance(turn.get("role"), str):
        raise origin.error(f"message {number} is no object with role and content")
    written = turn["role"]
    if written not in ROLES:
        offer = nearest(written, ROLES, say="; did you mean {}?")
        raise origin.error(f"message {number} has the unknown role {written!r}{offer}")
    role = ROLES[written]
    # Null-filled columns would count as defined in a template.
    message = {key: value for key, value in turn.items() if value is not None}
    said = [message.pop(switch) for switch in LOSS_SWITCHES if switch in message]
    message["role"] = role
    name = f"content of message {number}"
    if written in CALL_ROLES:
        message["tool_calls"] = call_of_turn(turn.get("content"), number, origin, columnar=columnar)
        message["content"] = ""
    elif role == "tool":
        message["content"] = result_text(turn.get("content"), name, origin)
    elif role == "assistant" and (calls := calls_of_message(message, number, origin, columnar=columnar)):
        message.pop("function_call", None)
        message["tool_calls"] = calls
        message["content"] = "" if turn.get("content") is None else text_of(turn["content"], name, origin)
    else:
        message.pop("tool_calls", None)  # an empty list
        message["content"] = text_of(turn.get("content"), name, origin)
    return message, all(said) if said else None
