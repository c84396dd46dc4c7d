"""What a chat template does, found by rendering small conversations: headers, roles, tool calls."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jinja2.exceptions import TemplateError

from swiftkit.data.conversation import SYSTEM_ROLES, Message
from swiftkit.data.marks import NONCHARACTERS

# What a template can raise: its own refusals, and what its expressions do with values they do not expect.
FAILURES = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
QUESTION: list[Message] = [{"role": "user", "content": "Hello"}]
START, END = NONCHARACTERS[:2]
MARKED_ANSWER: Message = {"role": "assistant", "content": f"{START}Good day{END}"}
NAME, KEY, WORD, NUMBER = "lookup_probe", "where_probe", "PLACE_PROBE", 70707
CALL_ID = "probe0000"  # nine letters and digits, as Mistral's templates want


class Render(Protocol):
    """A template: messages to text."""

    def __call__(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str: ...


@dataclass(frozen=True, slots=True)
class Headers:
    """What stands in front of an answer, and behind the last one.

    Attributes:
        prompt: what every generation begins with.
        turn: the part of it that every answer has: a prompt may also open a thinking block, which older
            answers lack.
        opening: where it has none, what the model writes between a prompt and the answer's words.
        closing: what is written behind the last answer, without outer white space.
    """

    prompt: str
    turn: str
    opening: str
    closing: str


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a template wants an assistant's tool calls, and how it writes their end.

    Attributes:
        content: of a message that has only calls.
        as_text: arguments are JSON text, not an object.
        opening: what it writes between a prompt and the function's name.
        closing: what it writes behind the last call's arguments, whatever follows.
        last_closing: the same behind the last message; it begins with `closing`.
    """

    content: str | None
    as_text: bool
    opening: str
    closing: str
    last_closing: str


def probe_headers(render: Render) -> Headers:
    """The headers of a template; they are empty where it has none of its own before an answer."""
    asked = render(QUESTION)
    prompt = render(QUESTION, add_generation_prompt=True)
    before, _, answer = render([*QUESTION, MARKED_ANSWER]).partition(START)
    closing = answer.partition(END)[2].strip()
    header = prompt.removeprefix(asked) if prompt.startswith(asked) else ""
    if not header.strip():
        return Headers("", "", before.removeprefix(prompt) if before.startswith(prompt) else "", closing)
    answered = [*QUESTION, MARKED_ANSWER]
    befores = [render(turns).partition(START)[0] for turns in (answered, [*answered, *QUESTION])]
    openings = [before.removeprefix(asked) for before in befores if before.startswith(asked)]
    common = [opening for opening in openings if opening.strip() and header.startswith(opening)]
    return Headers(header, min(common, key=len, default=header), "", closing)


def takes_role(render: Render, role: str) -> bool:
    """Whether the template shows a first message of this role."""
    assert role in SYSTEM_ROLES
    try:
        return WORD in render([{"role": role, "content": WORD}, *QUESTION])
    except FAILURES:
        return False


def probe_calls(render: Render) -> CallForm | None:
    """How the template takes tool calls; None where it does not show them."""
    for content in ("", None):
        for as_text in (False, True):
            form = _probe_form(render, content, as_text)
            if form is not None:
                return form
    return None


def form_calls(message: Message, form: CallForm) -> Message:
    """The message as the template wants its calls."""
    calls = message["tool_calls"]
    if form.as_text:
        calls = [{**call, "function": _with_text(call["function"])} for call in calls]
    return {**message, "content": message["content"] or form.content, "tool_calls": calls}


def _with_text(function: dict[str, Any]) -> dict[str, Any]:
    return {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}


def _probe_form(render: Render, content: str | None, as_text: bool) -> CallForm | None:
    def call(arguments: dict[str, Any]) -> Message:
        written = json.dumps(arguments) if as_text else arguments
        function = {"name": NAME, "arguments": written}
        calls = [{"type": "function", "id": CALL_ID, "function": function}]
        return {"role": "assistant", "content": content, "tool_calls": calls}

    word = call({KEY: WORD})
    result = {"role": "tool", "content": "3", "tool_call_id": CALL_ID, "name": NAME}
    try:
        prompt = render(QUESTION, add_generation_prompt=True)
        whole = render([*QUESTION, word])
        deep = render([*QUESTION, call({KEY: {KEY: [NUMBER]}})])
        none = render([*QUESTION, call({})])
    except FAILURES:
        return None
    # Python's own spelling of an object, or JSON inside JSON, is not what a model writes.
    if NAME not in whole or WORD not in whole or f"'{KEY}'" in whole or f'\\"{KEY}' in whole:
        return None
    behind = whole.rpartition(WORD)[2]
    ends = [behind, deep.rpartition(str(NUMBER))[2], none.rpartition(NAME)[2]]
    last = _shared_start([end[::-1] for end in ends])[::-1].rstrip().rpartition(CALL_ID)[2]
    if not last.strip():
        return None
    try:
        followed = render([*QUESTION, word, result]).rpartition(WORD)[2]
    except FAILURES:
        followed = behind
    shared = _shared_start([behind.rstrip(), followed])
    closing = shared[behind.rstrip().rindex(last) :].rstrip()
    if not closing:
        return None
    before = whole.partition(NAME)[0]
    shown = _shared_start([before, prompt])
    return CallForm(content, as_text, before[len(shown) :], closing, last)


def _shared_start(texts: Sequence[str]) -> str:
    """The longest beginning that all texts have."""
    shortest = min(texts, key=len)
    differs = (at for at, character in enumerate(shortest) if any(text[at] != character for text in texts))
    return shortest[: next(differs, len(shortest))]
