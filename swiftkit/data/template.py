"""A conversation through its chat template, and which characters of the text are the model's own.

Trained characters are found by rendering twice: once as it is, and once with each answer between two
marks. Token ids are never searched, so that an answer which a user quotes is not taken for an answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2.exceptions import TemplateError

from swiftkit.data.document import Origin
from swiftkit.data.shapes import Conversation, Message
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
# Unicode's noncharacters: never in real text, never white space, so templates pass them through.
MARKS = tuple(map(chr, range(0xFDD0, 0xFDF0)))
# What a template is probed with.
QUESTION: list[Message] = [{"role": "user", "content": "Hello"}]
MARKED_ANSWER: Message = {"role": "assistant", "content": f"{MARKS[0]}Good day{MARKS[1]}"}


@dataclass(frozen=True, slots=True)
class Layout:
    """Text with what is trained in it, before it becomes tokens.

    Attributes:
        text: what is tokenised, once and as a whole.
        spans: character ranges [start, stop) that are trained.
        origin: the row's file and line.
        starts: the tokenizer puts its own start token in front.
        stops: the end-of-sequence token follows the text, trained.
    """

    text: str
    spans: tuple[tuple[int, int], ...]
    origin: Origin
    starts: bool = False
    stops: bool = False


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
            self._prompt_header, self._turn_header = self._probe_headers()
            closing = self._probe_closing()
        except TemplateError as failure:
            raise UserError(f"the chat template fails on one question and its answer: {failure}") from None
        self._turn_end = _turn_end(tokenizer, closing)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        """The conversation as text; the template's own errors pass through."""
        text = self._tokenizer.apply_chat_template(
            list(messages),
            chat_template=self._source,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
        )
        assert isinstance(text, str)
        return text

    def layout(self, conversation: Conversation) -> Layout:
        """The rendered conversation with the spans of its answers.

        A span begins behind the header that a generation begins with (so that an empty thinking block
        which the template adds is learnt), or with the answer where a template has no such header. It
        ends behind the end-of-turn mark.

        Raises:
            UserError: the template refuses the row, leaves words out, or its answers cannot be told.
        """
        origin, answers = conversation.origin, conversation.answers
        text = self._checked(conversation.messages, origin)
        _check_words_kept(conversation, text)
        start_mark, end_mark = _free_marks(conversation)
        marked = self._checked(
            [
                {**message, "content": _wrap(message["content"], start_mark, end_mark)}
                if index in answers
                else message
                for index, message in enumerate(conversation.messages)
            ],
            origin,
        )
        if marked.replace(start_mark, "").replace(end_mark, "") != text:
            raise origin.error(
                "the chat template changes the answers, so that they cannot be told from the rest; "
                "give another --chat_template"
            )
        *turns, _ = marked.split(end_mark)
        if len(turns) != len(answers):
            raise origin.error(
                f"the chat template shows {len(turns)} of {len(answers)} answers; give another one"
            )
        return self._spans(text, turns, start_mark, origin)

    def _spans(self, text: str, turns: Sequence[str], start_mark: str, origin: Origin) -> Layout:
        """Reads the marks: each turn is marked text from the end of an answer to the end of the next."""
        spans: list[tuple[int, int]] = []
        stops = False
        offset = 0  # characters of `text` before this turn
        for turn in turns:
            before, mark, answer = turn.partition(start_mark)
            header = self._header_end(before)
            if start_mark in answer or (header is None and not mark):
                raise origin.error(
                    "the chat template cuts an answer, so that its beginning cannot be told; "
                    "give another --chat_template"
                )
            start = offset + (len(before) if header is None else header)
            offset += len(before) + len(answer)
            end = self._turn_end.match(text, offset)
            stop = end.end() if end else offset
            # Without a special token behind the last answer the model would never learn to stop.
            stops = not (end and end["token"]) and not text[stop:].strip()
            spans.append((start, len(text) if stops else stop))
        return Layout(text, tuple(spans), origin, stops=stops)

    def _checked(self, messages: Sequence[Message], origin: Origin) -> str:
        try:
            return self.render(messages)
        except TemplateError as failure:
            raise origin.error(f"the chat template refuses the row: {failure}") from None

    def _header_end(self, before: str) -> int | None:
        """Where the last header in the text before an answer ends."""
        opened = before.rfind(self._turn_header) if self._turn_header else -1
        if opened < 0:
            return None
        whole = before.startswith(self._prompt_header, opened)
        return opened + len(self._prompt_header if whole else self._turn_header)

    def _probe_headers(self) -> tuple[str, str]:
        """What every generation begins with, and the part of it that every answer has.

        They differ where a prompt also opens a thinking block, which older answers lack.
        """
        asked = self.render(QUESTION)
        prompt = self.render(QUESTION, add_generation_prompt=True)
        header = prompt.removeprefix(asked) if prompt.startswith(asked) else ""
        if not header.strip():
            return "", ""
        answered = [*QUESTION, MARKED_ANSWER]
        befores = [self.render(turns).partition(MARKS[0])[0] for turns in (answered, [*answered, *QUESTION])]
        openings = [before.removeprefix(asked) for before in befores if before.startswith(asked)]
        common = [opening for opening in openings if opening.strip() and header.startswith(opening)]
        return header, min(common, key=len, default=header)

    def _probe_closing(self) -> str:
        """What the template writes behind the last answer."""
        return self.render([*QUESTION, MARKED_ANSWER]).partition(MARKS[1])[2].strip()


def _turn_end(tokenizer: PreTrainedTokenizerBase, closing: str) -> re.Pattern[str]:
    """Matches the end-of-turn mark behind an answer: a token of its own, or the template's words."""
    added: list[Any] = [token.content for token in tokenizer.added_tokens_decoder.values()]
    marks = sorted((word for word in added if word.strip()), key=len, reverse=True)
    token = "|".join(map(re.escape, marks)) or "(?!)"
    return re.compile(rf"\s*(?:(?P<token>{token})|{re.escape(closing) or '(?!)'})")


def _wrap(content: str, start_mark: str, end_mark: str) -> str:
    """Marks stand inside the outer white space, so that a template's trim acts as without them."""
    core = content.strip()
    lead = len(content) - len(content.lstrip())
    return content[:lead] + start_mark + core + end_mark + content[lead + len(core) :]


def _free_marks(conversation: Conversation) -> tuple[str, str]:
    free = [
        mark for mark in MARKS if not any(mark in message["content"] for message in conversation.messages)
    ]
    if len(free) < 2:
        raise conversation.origin.error("the row uses up the characters U+FDD0 to U+FDEF; take some out")
    return free[0], free[1]


def _check_words_kept(conversation: Conversation, text: str) -> None:
    """Answers may lose old thoughts; what was said to the model must be there."""
    for number, message in enumerate(conversation.messages, start=1):
        if message["role"] != "assistant" and message["content"].strip() not in text:
            raise conversation.origin.error(
                f"the chat template leaves out the words of message {number} ({message['role']}); "
                "take the message out, or give another --chat_template"
            )
