"""From examples to documents: one text, tokenised once, trained where its spans say so."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from swiftkit.data.conversation import SYSTEM_ROLES, Conversation, TrainOn
from swiftkit.data.document import Document
from swiftkit.data.shapes import Completion, Example
from swiftkit.data.template import ChatTemplate, Layout, ThinkingHistory, resolve_chat_template
from swiftkit.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
        return [
            self._document(layout, ids, offsets)
            for layout, (ids, offsets) in zip(
                layouts, self.tokens([layout.text for layout in layouts]), strict=True
            )
        ]

    def tokens(self, texts: Sequence[str]) -> list[tuple[NDArray[np.int32], NDArray[np.int64]]]:
        """Ids [tokens] and character ranges [tokens, 2] of texts, without added special tokens."""
        if not texts:
            return []
        encoded = self._tokenizer(
            list(texts),
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            verbose=False,
        )
        return [
            (np.array(ids, np.int32), np.array(offsets, np.int64).reshape(-1, 2))
            for ids, offsets in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
        ]

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The template, checked on first use: plain text needs none."""
        return ChatTemplate(self._tokenizer, source=self._source)

    def _document(self, layout: Layout, ids: NDArray[np.int32], offsets: NDArray[np.int64]) -> Document:
        trained = _overlaps(offsets, layout.spans)
        bos, eos = self.bos_id, self.eos_id
        if layout.starts and self.adds_bos and bos is not None and ids[:1] != bos:
            ids, trained = np.insert(ids, 0, bos), np.insert(trained, 0, False)
        if layout.stops and ids[-1:] != eos:
            ids, trained = np.append(ids, np.int32(eos)), np.append(trained, True)
        return Document(ids, trained, layout.origin)

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


def _overlaps(offsets: NDArray[np.int64], spans: Sequence[tuple[int, int]]) -> NDArray[np.bool_]:
    """Which tokens touch a span.

    Args:
        offsets: character range of each token, [tokens, 2].
        spans: character ranges.
    """
    starts, ends = offsets[:, 0], offsets[:, 1]
    # Byte-level tokenizers may trim spaces off their ranges (indentation even becomes empty); what lies
    # between two tokens belongs to the later one.
    reached = np.maximum.accumulate(np.concatenate([[0], ends]))[:-1]
    starts = np.minimum(starts, reached)
    touched = np.zeros(len(offsets), bool)
    for start, stop in spans:
        touched |= (starts < stop) & (ends > start)
    return touched
