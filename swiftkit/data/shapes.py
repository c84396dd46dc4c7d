"""From a row of any known shape to a conversation, a prompt with its completion, or plain text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from swiftkit.data.document import Origin
from swiftkit.data.read import Row
from swiftkit.errors import nearest

Message: TypeAlias = dict[str, Any]

ROLES = {
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "model", "bot", "chatgpt"), "assistant"),
    "system": "system",
    "developer": "developer",
}
TOOL_ROLES = frozenset(
    {"tool", "tool_call", "tool_response", "function", "function_call", "observation", "ipython"}
)
# Other tools' switches for a turn that is context only: ms-swift, axolotl, and OpenAI's fine-tuning format.
LOSS_SWITCHES = ("loss", "train", "weight")
NO_TOOLS = "tool calls are not supported in training rows; take this row out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Turns that the chat template renders; answers are trained.

    Attributes:
        messages: dicts with `role` and `content` (text), and what else the template may read.
        origin: the row's file and line.
        tools: tool descriptions for the template.
        context: indices of answers that are shown but not trained.
    """

    messages: list[Message]
    origin: Origin
    tools: list[dict[str, Any]] | None = None
    context: frozenset[int] = frozenset()

    @property
    def answers(self) -> list[int]:
        """Indices of the messages that are trained."""
        return [
            index
            for index, message in enumerate(self.messages)
            if message["role"] == "assistant" and index not in self.context
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """Raw text without a template: the completion is trained, the prompt is not."""

    prompt: str
    completion: str
    origin: Origin


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainText:
    """Raw text without a template, all of it trained."""

    text: str
    origin: Origin


Example: TypeAlias = Conversation | Completion | PlainText


def to_example(row: Row) -> Example:
    """Finds the row's shape by its keys and gives it its one meaning.

    Raises:
        UserError: no known shape, a null or empty text where one is needed, an unknown role, a tool call.
    """
    return _shape_of(row)(row.value, row.origin)


def _shape_of(row: Row) -> Callable[[Mapping[str, Any], Origin], Example]:
    filled = {key for key, value in row.value.items() if value is not None}
    for needed, convert in SHAPES.items():
        if filled.issuperset(needed):
            return convert
    for needed in SHAPES:
        if row.value.keys() >= set(needed):
            null = next(key for key in needed if key not in filled)
            raise row.origin.error(f"{null!r} is null; it needs a value")
    keys = ", ".join(map(repr, row.value)) or "none"
    known = "; ".join(" + ".join(needed) for needed in SHAPES)
    raise row.origin.error(f"no known row shape with the keys {keys}; known are: {known}")


def _from_messages(value: Mapping[str, Any], origin: Origin) -> Conversation:
    return _conversation(value, value["messages"], origin)


def _from_sharegpt(value: Mapping[str, Any], origin: Origin) -> Conversation:
    turns = value["conversations"]
    if isinstance(turns, list):
        turns = [_sharegpt_turn(turn) if isinstance(turn, dict) else turn for turn in turns]
    return _conversation(value, turns, origin)


def _sharegpt_turn(turn: dict[str, Any]) -> dict[str, Any]:
    renamed = {"from": "role", "value": "content"}
    return {renamed.get(key, key): value for key, value in turn.items()}


def _from_prompt(value: Mapping[str, Any], origin: Origin) -> Example:
    prompt, completion = value["prompt"], value["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        _check_answer(completion, "completion", origin)
        _check_characters(prompt + completion, origin)
        return Completion(prompt=prompt, completion=completion, origin=origin)
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    answered = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
    for key, turns in (("prompt", asked), ("completion", answered)):
        if not isinstance(turns, list):
            raise origin.error(f"{key!r} is text or a list of messages, not {turns!r}")
    return _conversation(value, asked + answered, origin, shown=len(asked))


def _asked(question: str, answer: str, *, extra: str | None = None) -> Callable[..., Conversation]:
    """A shape of one question column and one answer column, with optional system and history."""

    def convert(value: Mapping[str, Any], origin: Origin) -> Conversation:
        words = _content(value[question], question, origin)
        if extra and value.get(extra):
            words = "\n".join(part for part in (words, _content(value[extra], extra, origin)) if part)
        turns = _history(value.get("history"), origin)
        turns += [{"role": "user", "content": words}, {"role": "assistant", "content": value[answer]}]
        return _conversation(value, turns, origin)

    return convert


def _history(history: Any, origin: Origin) -> list[Message]:
    if history is None:
        return []
    if not isinstance(history, list) or not all(
        isinstance(pair, list) and len(pair) == 2 for pair in history
    ):
        raise origin.error("'history' is a list of [question, answer] pairs")
    return [
        {"role": role, "content": words}
        for pair in history
        for role, words in zip(("user", "assistant"), pair, strict=True)
    ]


def _from_text(value: Mapping[str, Any], origin: Origin) -> PlainText:
    text = _content(value["text"], "text", origin)
    _check_answer(text, "text", origin)
    return PlainText(text=text, origin=origin)


SHAPES: dict[tuple[str, ...], Callable[[Mapping[str, Any], Origin], Example]] = {
    ("messages",): _from_messages,
    ("conversations",): _from_sharegpt,
    ("prompt", "completion"): _from_prompt,
    ("instruction", "output"): _asked("instruction", "output", extra="input"),
    ("query", "response"): _asked("query", "response"),
    ("question", "answer"): _asked("question", "answer"),
    ("text",): _from_text,
}


def _conversation(value: Mapping[str, Any], turns: Any, origin: Origin, *, shown: int = 0) -> Conversation:
    """Checks every turn; answers among the first `shown` turns are context."""
    if not isinstance(turns, list) or not turns:
        raise origin.error("the conversation is an empty or no list; it needs messages with role and content")
    if value.get("tools"):
        raise origin.error(NO_TOOLS)
    messages = [_message(turn, number, origin) for number, turn in enumerate(turns, start=1)]
    off = {index for index, message in enumerate(messages) if not _is_trained(message) or index < shown}
    for message in messages:
        for switch in LOSS_SWITCHES:
            message.pop(switch, None)
    system = value.get("system")
    if system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": _content(system, "system", origin)})
        off = {index + 1 for index in off}
    return Conversation(messages=messages, origin=origin, context=frozenset(off))


def _message(turn: Any, number: int, origin: Origin) -> Message:
    if not isinstance(turn, dict) or not isinstance(turn.get("role"), str):
        raise origin.error(f"message {number} is no object with role and content")
    role = turn["role"]
    if role in TOOL_ROLES or turn.get("tool_calls") or turn.get("function_call"):
        raise origin.error(NO_TOOLS)
    if role not in ROLES:
        offer = nearest(role, ROLES, say="; did you mean {}?")
        raise origin.error(f"message {number} has the unknown role {role!r}{offer}")
    content = _content(turn.get("content"), f"content of message {number}", origin)
    if ROLES[role] == "assistant":
        _check_answer(content, f"content of message {number}", origin)
    # Null-filled columns would count as defined in a template.
    kept = {key: value for key, value in turn.items() if value is not None}
    return {**kept, "role": ROLES[role], "content": content}


def _is_trained(message: Message) -> bool:
    return all(message.get(switch, True) for switch in LOSS_SWITCHES)


def _content(content: Any, name: str, origin: Origin) -> str:
    """Text as it is, or the text parts of a list joined."""
    if isinstance(content, list):
        content = "".join(_part(part, name, origin) for part in content)
    if content is None:
        raise origin.error(f"the {name} is null; it needs a text")
    if not isinstance(content, str):
        raise origin.error(f"the {name} is text or a list of text parts, not {content!r}")
    _check_characters(content, origin)
    return content


def _part(part: Any, name: str, origin: Origin) -> str:
    if isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else part
    raise origin.error(f"the {name} has a part that is not text ({kind!r}); only text parts are trained")


def _check_answer(words: str, name: str, origin: Origin) -> None:
    if not words.strip():
        raise origin.error(f"the {name} is empty; an empty answer would train the stop token alone")


def _check_characters(words: str, origin: Origin) -> None:
    try:
        words.encode("utf-8")
    except UnicodeEncodeError as failure:
        raise origin.error(
            f"half a character (a lone surrogate, {words[failure.start]!r}) in a text"
        ) from None
