"""From examples to documents: one text, tokenised once, trained where its spans say so."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from swiftkit.data.conversation import SYSTEM_ROLES, Conversation, TrainOn
from swiftkit.data.document import Document
from swiftkit.data.documents import Tokens
from swiftkit.data.layout import Layout
from swiftkit.data.shapes import Completion, Example
from swiftkit.data.template import ChatTemplate, ThinkingHistory, resolve_chat_template
from swiftkit.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer
    from transformers import PreTrainedTokenizerBase

CHARACTERS_AT_ONCE = 1 << 20


class Ranges(Protocol):
    """Which characters tokens stand for: a part of the tokenizer's `Encoding`."""

    def token_to_chars(self, token_index: int) -> tuple[int, int] | None: ...
    def char_to_token(self, char_pos: int) -> int | None: ...


class Renderer:
    """Turns examples into documents with one tokenizer and one chat template.

    Args:
        tokenizer: a fast transformers tokenizer (only those give character offsets).
        chat_template: a built-in name or a Jinja file in place of the tokenizer's own template.
        system: system message for conversations that have none.
        train_on: the assistant's words, its last answer, or everything.
        thinking_history: thoughts of older answers as the template has them, or kept.

    Raises:
        UserError: the tokenizer is not a fast one or has no end-of-sequence token; no such template.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        chat_template: str | None = None,
        system: str | None = None,
        train_on: TrainOn = "assistant",
        thinking_history: ThinkingHistory = "template",
    ) -> None:
        if not tokenizer.is_fast:
            raise UserError("the model's tokenizer has no tokenizer.json; labels need its character offsets")
        if tokenizer.eos_token_id is None:
            raise UserError("the model's tokenizer has no eos_token; a model could not learn to stop")
        self._tokenizer = tokenizer
        self._source = resolve_chat_template(chat_template)
        self._system = system
        self._train_on = train_on
        self._thinking_history = thinking_history

    def __reduce__(self) -> tuple[Callable[..., Renderer], tuple[Any, ...]]:
        # A compiled template cannot be sent to another process.
        return Renderer._again, (
            self._tokenizer, self._source, self._system, self._train_on, self._thinking_history,
        )  # fmt: skip

    @classmethod
    def _again(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        source: str | None,
        system: str | None,
        train_on: TrainOn,
        thinking_history: ThinkingHistory,
    ) -> Renderer:
        renderer = cls(tokenizer, system=system, train_on=train_on, thinking_history=thinking_history)
        renderer._source = source
        return renderer

    def identity(self) -> list[Any]:
        """All that its documents depend on beside their rows, as JSON values."""
        tokenizer = self._tokenizer
        template = self._source or tokenizer.chat_template
        return [
            hashlib.sha256(self._backend().to_str().encode()).hexdigest(),
            {name: str(word) for name, word in tokenizer.special_tokens_map.items()},
            [self.bos_id, self.eos_id, tokenizer.split_special_tokens],
            template,
            date.today().isoformat() if "strftime_now" in str(template) else None,
            self._system,
            self._train_on,
            self._thinking_history,
        ]

    def with_system(self, conversation: Conversation) -> Conversation:
        """The conversation with the default system message in front, unless it has one."""
        if not self._system or any(m["role"] in SYSTEM_ROLES for m in conversation.messages):
            return conversation
        return conversation.with_front([{"role": "system", "content": self._system}])

    def layout(self, example: Example) -> Layout:
        """One text with its trained spans.

        Raises:
            UserError: there is no chat template for a conversation; RowError where it cannot render this one.
        """
        if isinstance(example, Conversation):
            try:
                return self.chat_template.layout(
                    self.with_system(example),
                    train_on=self._train_on,
                    thinking_history=self._thinking_history,
                )
            except RecursionError:
                raise example.origin.error("the row is nested too deeply to be rendered") from None
        if isinstance(example, Completion):
            text = example.prompt + example.completion
            start = 0 if self._train_on == "all" else len(example.prompt)
        else:
            text, start = example.text, 0
        return Layout(text, ((start, len(text)),), example.origin, starts=True, stops=True)

    def documents(self, examples: Sequence[Example]) -> list[Document]:
        """One document an example, in order.

        Raises:
            UserError: see `layout`.
        """
        return self.encode([self.layout(example) for example in examples])

    def encode(self, layouts: Sequence[Layout]) -> list[Document]:
        """One document a layout, in order, tokenised together."""
        tokens = self.tokenise(layouts).split()
        return [
            Document(ids, trained, layout.origin)
            for layout, (ids, trained) in zip(layouts, tokens, strict=True)
        ]

    def tokenise(self, layouts: Sequence[Layout]) -> Tokens:
        """The same in flat arrays."""
        ids: list[int] = []
        lengths: list[int] = []
        touched: list[tuple[int, int]] = []
        bos = self.bos_id if self.adds_bos else None
        encodings = self._encodings([layout.text for layout in layouts])
        for layout, encoding in zip(layouts, encodings, strict=True):
            begin, own = len(ids), encoding.ids
            if layout.starts and bos is not None and own and own[0] != bos:
                ids.append(bos)
            touched += _touched(encoding, layout.spans, len(own), at=len(ids))
            ids += own
            if layout.stops and own and own[-1] != self.eos_id:
                touched.append((len(ids), len(ids) + 1))
                ids.append(self.eos_id)
            lengths.append(len(ids) - begin)
        trained = np.zeros(len(ids), bool)
        for start, stop in touched:
            trained[start:stop] = True
        return Tokens(np.array(ids, np.int32), trained, np.array(lengths, np.int64))

    def tokens(self, texts: Sequence[str]) -> list[tuple[NDArray[np.int32], NDArray[np.int64]]]:
        """Ids [tokens] and character ranges [tokens, 2] of texts, without added special tokens."""
        return [
            (np.array(found.ids, np.int32), np.array(found.offsets, np.int64).reshape(-1, 2))
            for found in self._encodings(texts)
        ]

    def _encodings(self, texts: Sequence[str]) -> list[Encoding]:
        """What the tokenizer makes of texts, as `tokenizer(texts)` would, but without its Python lists."""
        backend = self._backend()
        found: list[Encoding] = []
        for start, stop in _stretches(texts):
            found += backend.encode_batch(list(texts[start:stop]), add_special_tokens=False)
        return found

    def _backend(self) -> Tokenizer:
        """The tokenizer itself, which neither cuts nor pads."""
        backend = self._tokenizer.backend_tokenizer
        if backend.truncation is not None:
            backend.no_truncation()
        if backend.padding is not None:
            backend.no_padding()
        if backend.encode_special_tokens != self._tokenizer.split_special_tokens:
            backend.encode_special_tokens = self._tokenizer.split_special_tokens
        return backend

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The template, checked on first use: plain text needs none."""
        return ChatTemplate(self._tokenizer, source=self._source)

    @property
    def bos_id(self) -> int | None:
        """The tokenizer's start token."""
        return self._tokenizer.bos_token_id

    @property
    def eos_id(self) -> int:
        """The tokenizer's end-of-sequence token."""
        return int(self._tokenizer.eos_token_id)

    @cached_property
    def adds_bos(self) -> bool:
        """Whether the tokenizer itself puts its start token in front of a text."""
        bos = self._tokenizer.bos_token_id
        first, bare = (
            self._tokenizer("a", add_special_tokens=special)["input_ids"][0] for special in (True, False)
        )
        return bos is not None and first == bos != bare


def _stretches(texts: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Texts that are tokenised at once: the tokenizer needs a hundred times their memory meanwhile."""
    start = characters = 0
    for place, text in enumerate(texts):
        characters += len(text)
        if characters >= CHARACTERS_AT_ONCE:
            yield start, place + 1
            start, characters = place + 1, 0
    if start < len(texts):
        yield start, len(texts)


def _touched(
    encoding: Ranges, spans: Sequence[tuple[int, int]], tokens: int, *, at: int
) -> list[tuple[int, int]]:
    """For each span the range of tokens that touch it, counted from `at`.

    Byte-level tokenizers may trim spaces off their tokens' ranges (indentation even becomes empty); what lies
    between two tokens belongs to the later one. Neither beginnings nor ends of ranges ever go back, so that
    both edges are found by halving: to read all ranges would cost more than to render the row.

    Args:
        encoding: knows the range of characters of a token, and a token by one of its characters.
        spans: ranges of characters.
        tokens: number of tokens.
        at: number of the first token.
    """

    def end(token: int) -> int:
        found = encoding.token_to_chars(token)
        return found[1] if found else 0

    def start(token: int) -> int:
        found = encoding.token_to_chars(token)
        return min(found[0], end(token - 1)) if token and found else 0

    return [
        (
            at + _first_above(end, first, tokens, encoding),
            at + _first_above(start, stop - 1, tokens, encoding),
        )
        for first, stop in spans
    ]


def _first_above(edge: Callable[[int], int], character: int, tokens: int, encoding: Ranges) -> int:
    """The first token whose edge lies above a character; edges never go back."""
    guess = encoding.char_to_token(character) if character >= 0 else 0
    if guess is not None:
        for token in range(guess, min(guess + 2, tokens)):
            if edge(token) > character:
                if token == 0 or edge(token - 1) <= character:
                    return token
                break
    return bisect_right(range(tokens), character, key=edge)
