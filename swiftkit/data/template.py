"""A conversation through its chat template, and which characters of the text are the model's own.

Trained characters are found by rendering twice: once as it is, and once with marks in each answer. Token ids
are never searched, so that an answer which a user quotes is not taken for an answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from swiftkit.data.content import check_characters
from swiftkit.data.conversation import SYSTEM_ROLES, Conversation, Message, TrainOn
from swiftkit.data.document import Origin
from swiftkit.data.layout import Layout
from swiftkit.data.marks import THINK, THOUGHTS, UNTHINK, Found, Marks, has_thought
from swiftkit.data.outline import Outlines, short_render
from swiftkit.data.probe import (
    FAILURES,
    CallForm,
    Headers,
    form_calls,
    probe_calls,
    probe_headers,
    takes_role,
)
from swiftkit.errors import UserError, nearest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
BUILTIN = {"chatml": CHATML}
OTHER = "give another --chat_template"
FOLDED = "system words put in front of the first question, as the chat template has no system turn"
NO_TOOLS = "tool descriptions that the chat template does not show"
FORGOTTEN = "thoughts of older answers that the chat template leaves out"

ThinkingHistory: TypeAlias = Literal["template", "keep"]


def resolve_chat_template(name: str | None) -> str | None:
    """The Jinja source behind `--chat_template`: a built-in name or a file; None stays None.

    Raises:
        UserError: neither a built-in template nor a readable file.
    """
    if name is None or name in BUILTIN:
        return BUILTIN[name] if name else None
    path = Path(name).expanduser()
    if not path.is_file():
        offer = nearest(name, BUILTIN, say="; did you mean {}?")
        raise UserError(f"--chat_template {name}: neither a file nor one of {', '.join(BUILTIN)}{offer}")
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"--chat_template {name}: the file is not UTF-8 text") from None


class ChatTemplate:
    """Renders conversations and finds the answers in them.

    Args:
        tokenizer: brings its template and its special tokens.
        source: Jinja source in place of the tokenizer's own template.

    Raises:
        UserError: there is no template, or it does not render a question with its answer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, source: str | None = None) -> None:
        if source is None and tokenizer.chat_template is None:
            raise UserError(
                "the model has no chat template, and the rows are conversations; take an instruct model, "
                "or give --chat_template chatml or a Jinja file"
            )
        self._tokenizer = tokenizer
        self._source = source
        try:
            self._headers = probe_headers(self.render)
        except FAILURES as failure:
            raise UserError(f"the chat template fails on one question and its answer: {failure}") from None
        self._turn_end = _turn_end(tokenizer, self._headers)
        self._outlines = Outlines(short_render(tokenizer, source), has_header=bool(self._headers.turn))

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = False,
        tools: list[Any] | None = None,
    ) -> str:
        """The conversation as text; the template's own errors pass through."""
        text = self._tokenizer.apply_chat_template(
            list(messages),
            tools=tools,
            chat_template=self._source,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
        )
        assert isinstance(text, str)
        return text

    def fitted(self, conversation: Conversation) -> tuple[Conversation, list[str]]:
        """The conversation in the roles that the template knows, and what had to be changed for it.

        A developer's words become a system message. Where a template has no system turn, the first one is put
        in front of the first question, with an empty line between them.

        Raises:
            RowError: system words that have no place.
        """
        roles = [message["role"] for message in conversation.messages]
        if "developer" in roles and not self._roles["developer"]:
            renamed = [
                {**message, "role": "system"} if message["role"] == "developer" else message
                for message in conversation.messages
            ]
            roles = [message["role"] for message in renamed]
            conversation = replace(conversation, messages=renamed)
        if "system" not in roles or self._roles["system"]:
            return conversation, []
        if roles[:2] != ["system", "user"] or "system" in roles[1:]:
            raise conversation.origin.error(
                "the chat template has no system turn, and system words can only be put in front of the "
                "first question: one system message first, then a user's; "
                f"here it goes {', '.join(roles[:4])}"
            )
        system, question = conversation.messages[:2]
        words = f"{system['content'].strip()}\n\n{question['content']}"
        return conversation.with_front([{**question, "content": words}], dropping=2), [FOLDED]

    def layout(
        self,
        conversation: Conversation,
        *,
        train_on: TrainOn = "assistant",
        thinking_history: ThinkingHistory = "template",
    ) -> Layout:
        """The rendered conversation with the spans of its answers.

        A span begins behind the header that a generation begins with (so that an empty thinking block
        which the template adds is learnt), or with the answer where a template has no such header. It
        ends behind the end-of-turn mark; with tool calls it holds what the template writes for them.

        Raises:
            RowError: the template refuses the row, leaves words out, or its answers cannot be told.
        """
        conversation, notes = self.fitted(conversation)
        long_way = partial(self._marked_layout, train_on=train_on, thinking_history=thinking_history)
        short = self._outlines.layout(conversation, notes, train_on=train_on, long_way=long_way)
        return short or long_way(conversation, notes)

    def _marked_layout(
        self,
        conversation: Conversation,
        notes: Sequence[str] = (),
        *,
        train_on: TrainOn,
        thinking_history: ThinkingHistory,
    ) -> Layout:
        """The same by marks around the words of messages, whatever they hold."""
        trained, found = conversation.trained(train_on), conversation.told_apart(train_on)
        origin = conversation.origin
        notes = list(notes)
        messages = conversation.messages
        if any(message.get("tool_calls") for message in messages) and self._calls is None:
            raise origin.error(
                f"the chat template does not show tool calls; take a model that has them, or {OTHER}"
            )
        marks = Marks(messages, origin)
        text, groups = self._rendered(messages, conversation, marks, found)
        forgotten = [i for i, group in zip(found, groups, strict=True) if _forgets(messages[i], group)]
        if forgotten and thinking_history == "keep":
            messages = [_hide(m, marks) if i in forgotten else m for i, m in enumerate(messages)]
            text, groups = self._rendered(messages, conversation, marks, found)
        elif forgotten:
            notes.append(FORGOTTEN)
        check_characters(text, origin)
        if conversation.tools and not all(_name_of(tool) in text for tool in conversation.tools):
            notes.append(NO_TOOLS)
        spans, stops = self._spans(text, messages, found, groups, origin)
        kept = [spans[index] for index in trained]
        if train_on == "all":
            kept = _outside(text, [spans[index] for index in sorted(conversation.context)])
        if stops and found and found[-1] in trained:
            kept[-1] = (kept[-1][0], len(text))
        else:
            stops = False
        return Layout(text, tuple(kept), origin, stops=stops, notes=tuple(notes))

    @cached_property
    def _roles(self) -> dict[str, bool]:
        return {role: takes_role(self.render, role) for role in SYSTEM_ROLES}

    @cached_property
    def _calls(self) -> CallForm | None:
        return probe_calls(self.render)

    def _rendered(
        self, messages: list[Message], conversation: Conversation, marks: Marks, found: Sequence[int]
    ) -> tuple[str, list[list[Found]]]:
        """The text as it is, and where the marks of the chosen messages stand in it."""
        origin = conversation.origin
        text = self._checked(messages, conversation, marks)
        _check_words_kept(conversation, text)
        plain, groups = marks.take(self._checked(marks.put(messages, found), conversation, marks))
        if plain != text:
            raise origin.error(
                f"the chat template changes the answers, so that they cannot be told from the rest; {OTHER}"
            )
        if len(groups) != len(found):
            raise origin.error(f"the chat template shows {len(groups)} of {len(found)} answers; {OTHER}")
        return text, groups

    def _checked(self, messages: Sequence[Message], conversation: Conversation, marks: Marks) -> str:
        form = self._calls if any(message.get("tool_calls") for message in messages) else None
        written = [form_calls(m, form) if form and m.get("tool_calls") else m for m in messages]
        try:
            text = self.render(written, tools=conversation.tools)
        except FAILURES as failure:
            raise conversation.origin.error(f"the chat template refuses the row: {failure}") from None
        opened, closed = marks.hidden
        return text.replace(opened, THINK).replace(closed, UNTHINK)

    def _spans(
        self,
        text: str,
        messages: Sequence[Message],
        found: Sequence[int],
        groups: Sequence[Sequence[Found]],
        origin: Origin,
    ) -> tuple[dict[int, tuple[int, int]], bool]:
        """The characters of each message that was marked, and whether the last one never ends."""
        spans: dict[int, tuple[int, int]] = {}
        before = 0  # where the message before ends
        stops = False
        for index, group in zip(found, groups, strict=True):
            message = messages[index]
            start = self._start(text[before : group[0].at], message, group)
            if message.get("tool_calls"):
                end, closed = self._end_of_calls(text, group), True
            else:
                after = next((mark.at for mark in reversed(group) if mark.kind == "end"), None)
                match = None if after is None else self._turn_end.match(text, after)
                end = match.end() if match else after
                closed = bool(match and match["token"])
            if start is None or end is None:
                raise origin.error(
                    f"the chat template cuts message {index + 1}, so that where it begins or ends cannot be "
                    f"told; {OTHER}"
                )
            # Without a special token behind the last answer the model would never learn to stop.
            stops = not closed and not text[end:].strip()
            spans[index] = (before + start, end)
            before = end
        return spans, stops

    def _start(self, before: str, message: Message, group: Sequence[Found]) -> int | None:
        """Where a message begins in the text between the one before and its first mark."""
        headers = self._headers
        if message["role"] == "assistant":
            opened = before.rfind(headers.turn) if headers.turn else -1
            if opened >= 0:
                whole = before.startswith(headers.prompt, opened)
                return opened + len(headers.prompt if whole else headers.turn)
        first = group[0].kind
        if first == "name" and self._calls and before.endswith(self._calls.opening):
            return len(before) - len(self._calls.opening)
        if first == "start" and message["role"] == "assistant" and before.endswith(headers.opening):
            return len(before) - len(headers.opening)
        return len(before) if first == "start" else None

    def _end_of_calls(self, text: str, group: Sequence[Found]) -> int | None:
        """Behind the first closing that no call quotes."""
        form = self._calls
        assert form is not None
        quoted = _pairs(group)
        at = text.find(form.closing, group[0].at)
        while at >= 0 and (inside := next((stop for start, stop in quoted if start <= at < stop), None)):
            at = text.find(form.closing, inside)
        words = [mark.at for mark in group if mark.kind == "end"]
        if at < 0 or any(word > at for word in words):
            return None
        last = text.startswith(form.last_closing, at)
        return at + len(form.last_closing if last else form.closing)


def _turn_end(tokenizer: PreTrainedTokenizerBase, headers: Headers) -> re.Pattern[str]:
    """Matches the end-of-turn mark behind an answer: a token of its own, or the template's words."""
    added: list[Any] = [token.content for token in tokenizer.added_tokens_decoder.values()]
    marks = sorted((word for word in added if word.strip()), key=len, reverse=True)
    token = "|".join(map(re.escape, marks)) or "(?!)"
    return re.compile(rf"\s*(?:(?P<token>{token})|{re.escape(headers.closing) or '(?!)'})")


def _forgets(message: Message, group: Sequence[Found]) -> bool:
    """Whether thoughts of a message are not in the text."""
    apart = any(isinstance(message.get(key), str) and message[key].strip() for key in THOUGHTS)
    return (apart or has_thought(message["content"])) and all(mark.kind != "thought" for mark in group)


def _hide(message: Message, marks: Marks) -> Message:
    """The message with its thoughts in a form that the template takes for an answer's words."""
    opened, closed = marks.hidden
    content = message["content"]
    apart = next((message[key] for key in THOUGHTS if isinstance(message.get(key), str)), None)
    if apart is not None:
        content = f"{THINK}\n{apart.strip()}\n{UNTHINK}\n\n{content}"
    hidden = {key: value for key, value in message.items() if key not in THOUGHTS}
    return {**hidden, "content": content.replace(THINK, opened).replace(UNTHINK, closed)}


def _pairs(group: Sequence[Found]) -> list[tuple[int, int]]:
    """The stretches of text that stand between marks of a kind."""
    words = [mark.at for mark in group if mark.kind in ("start", "end")]
    names = [mark.at for mark in group if mark.kind == "name"]
    return [*zip(words[::2], words[1::2], strict=False), *zip(names[::2], names[1::2], strict=False)]


def _outside(text: str, spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The characters that are in no span."""
    edges = [0, *(edge for span in spans for edge in span), len(text)]
    return [(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if start < stop]


def _name_of(tool: dict[str, Any]) -> str:
    function = tool.get("function", tool)
    return str(function.get("name", "")) if isinstance(function, dict) else ""


def _check_words_kept(conversation: Conversation, text: str) -> None:
    """Answers may lose old thoughts; what was said to the model must be there."""
    for number, message in enumerate(conversation.messages, start=1):
        words = message["content"].strip()
        if message["role"] == "assistant":
            continue
        if words not in text and json.dumps(words, ensure_ascii=False)[1:-1] not in text:
            raise conversation.origin.error(
                f"the chat template leaves out the words of message {number} ({message['role']}); "
                f"take the message out, or {OTHER}"
            )
