"""The short way through a chat template: what it writes around the words of messages, learnt once a pattern.

A template may do anything with a message, so each row is still rendered; but where the text is what the
outline foretells, to the character, its answers stand where the outline has them, and need no marks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from swiftkit.data.conversation import Conversation, Message, TrainOn
from swiftkit.data.document import Origin, RowError
from swiftkit.data.layout import Layout
from swiftkit.data.marks import NONCHARACTERS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_PATTERNS = 4096  # of a data set whose conversations have many lengths; the rest goes the long way
THOUGHT = "think>"  # the end of <think> and of </think>, which the long way looks at

RenderPlain: TypeAlias = Callable[[Sequence[Message]], str]


class LongWay(Protocol):
    """The layout of any conversation, by marks."""

    def __call__(self, conversation: Conversation, notes: Sequence[str] = (), /) -> Layout: ...


@dataclass(frozen=True, slots=True)
class Outline:
    """What a template writes for conversations of one pattern.

    Attributes:
        pieces: its own text: before the first message's words, between them, and behind the last.
        edges: where spans begin and end: so many words before, and so many characters of the pieces.
        bare: messages whose words must begin and end without white space.
        stops: see Layout.
    """

    pieces: tuple[str, ...]
    edges: tuple[tuple[int, int], ...]
    bare: frozenset[int]
    stops: bool

    def layout(self, conversation: Conversation, render: RenderPlain, notes: Sequence[str]) -> Layout | None:
        """The layout of a conversation of this pattern, or None where its text is not as foretold."""
        words: list[str] = []
        for index, message in enumerate(conversation.messages):
            content = message["content"]
            if len(message) != 2 or not _is_plain(content, bare=index in self.bare):
                return None
            words.append(content)
        text = "".join(chain.from_iterable(zip(self.pieces, (*words, ""), strict=True)))
        if render(conversation.messages) != text:
            return None
        before = [0, *accumulate(map(len, words))]
        edges = [before[passed] + own for passed, own in self.edges]
        spans = tuple(zip(edges[::2], edges[1::2], strict=True))
        return Layout(text, spans, conversation.origin, stops=self.stops, notes=tuple(notes))


class Outlines:
    """The outlines of one template, by the pattern of conversations: roles, and what else decides the labels.

    Args:
        render: the short way to a text; None where there is none.
        has_header: the template has a header of its own in front of an answer, which tells where that begins,
            whatever stands before it.
    """

    def __init__(self, render: RenderPlain | None, *, has_header: bool) -> None:
        self._render = render
        self._has_header = has_header
        self._known: dict[Hashable, Outline | None] = {}

    def layout(
        self, conversation: Conversation, notes: Sequence[str], *, train_on: TrainOn, long_way: LongWay
    ) -> Layout | None:
        """The layout of a conversation, or None where it takes the long way."""
        if self._render is None or conversation.tools:
            return None
        roles = tuple([message["role"] for message in conversation.messages])
        pattern = roles, conversation.context, conversation.wanted, train_on
        if pattern not in self._known:
            if len(self._known) >= MOST_PATTERNS:
                return None
            every = range(len(roles))
            bare = conversation.told_apart(train_on) if self._has_header else every
            self._known[pattern] = outline_of(conversation, long_way, self._render, bare=frozenset(bare))
        outline = self._known[pattern]
        return outline.layout(conversation, self._render, notes) if outline else None


def _is_plain(words: str, *, bare: bool) -> bool:
    """Whether words have nothing in them that the long way would look at."""
    if not words or words.isspace() or THOUGHT in words:
        return False
    if not words.isascii() and any(mark in words for mark in NONCHARACTERS):
        return False
    return not (bare and (words[0].isspace() or words[-1].isspace()))


def outline_of(
    conversation: Conversation, long_way: LongWay, render: RenderPlain, *, bare: frozenset[int]
) -> Outline | None:
    """The outline of a conversation's pattern; None where the template has none.

    Args:
        conversation: one of the pattern.
        long_way: gives the layout of the same conversation with other words.
        render: the short way to its text.
        bare: see Outline.
    """
    words = [f"PLACE{index:05}HOLDER" for index in range(len(conversation.messages))]
    messages = [
        {"role": message["role"], "content": word}
        for message, word in zip(conversation.messages, words, strict=True)
    ]
    stand_in = Conversation(
        messages=messages,
        origin=Origin("an outline", 1),
        context=conversation.context,
        wanted=conversation.wanted,
    )
    try:
        layout = long_way(stand_in)
        text = render(messages)
    except RowError:
        return None
    places = [text.find(word) for word in words]
    if text != layout.text or -1 in places or places != sorted(places):
        return None
    if any(text.count(word) != 1 for word in words):
        return None
    ends = [place + len(word) for place, word in zip(places, words, strict=True)]
    pieces = [text[start:stop] for start, stop in zip([0, *ends], [*places, len(text)], strict=True)]
    edges = []
    for edge in chain.from_iterable(layout.spans):
        if any(place < edge < end for place, end in zip(places, ends, strict=True)):
            return None
        passed = sum(end <= edge for end in ends)
        edges.append((passed, edge - sum(map(len, words[:passed]))))
    return Outline(tuple(pieces), tuple(edges), bare, layout.stops)


def short_render(tokenizer: PreTrainedTokenizerBase, source: str | None) -> RenderPlain | None:
    """The template as transformers compiles it, for messages of role and content in plain text.

    `apply_chat_template` looks through every value for things that templates cannot take, which costs more
    than the rendering. None where this transformers compiles templates elsewhere.
    """
    from transformers.utils import chat_template_utils

    compile_template = getattr(chat_template_utils, "_compile_jinja_template", None)
    if compile_template is None:
        return None
    template = compile_template(tokenizer.get_chat_template(source))
    names: Mapping[str, Any] = {
        "tools": None,
        "documents": None,
        "add_generation_prompt": False,
        **tokenizer.special_tokens_map,
    }

    def render(messages: Sequence[Message]) -> str:
        text: str = template.render(messages=messages, **names)
        return text

    return render
