"""From examples to documents: one text, tokenised once, trained where its spans say so."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from swiftkit.data.document import Document
from swiftkit.data.shapes import Completion, Conversation, Example
from swiftkit.data.template import ChatTemplate, Layout, resolve_chat_template
from swiftkit.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Renderer:
    """Turns examples into documents with one tokenizer and one chat template.

    Args:
        tokenizer: a fast transformers tokenizer (only those give character offsets).
        chat_template: a built-in name or a Jinja file in place of the tokenizer's own template.
        system: system message for conversations that have none.

    Raises:
        UserError: the tokenizer is not a fast one or has no end-of-sequence token; no such template.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        chat_template: str | None = None,
        system: str | None = None,
    ) -> None:
        if not tokenizer.is_fast:
            raise UserError("the model's tokenizer has no tokenizer.json; labels need its character offsets")
        if tokenizer.eos_token_id is None:
            raise UserError("the model's tokenizer has no eos_token; a model could not learn to stop")
        self._tokenizer = tokenizer
        self._source = resolve_chat_template(chat_template)
        self._system = system

    def with_system(self, conversation: Conversation) -> Conversation:
        """The conversation with the default system message in front, unless it has one."""
        if not self._system or any(m["role"] in ("system", "developer") for m in conversation.messages):
            return conversation
        return Conversation(
            messages=[{"role": "system", "content": self._system}, *conversation.messages],
            origin=conversation.origin,
            tools=conversation.tools,
            context=frozenset(index + 1 for index in conversation.context),
        )

    def documents(self, examples: Sequence[Example]) -> list[Document]:
        """One document an example, in order.

        Raises:
            UserError: no chat template for a conversation, or the template cannot render one.
        """
        layouts = [self._layout(example) for example in examples]
        if not layouts:
            return []
        encoded = self._tokenizer(
            [layout.text for layout in layouts],
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            verbose=False,
        )
        return [
            self._document(layout, np.array(ids, np.int32), np.array(offsets, np.int64).reshape(-1, 2))
            for layout, ids, offsets in zip(
                layouts, encoded["input_ids"], encoded["offset_mapping"], strict=True
            )
        ]

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The template, checked on first use: plain text needs none."""
        return ChatTemplate(self._tokenizer, source=self._source)

    def _layout(self, example: Example) -> Layout:
        if isinstance(example, Conversation):
            return self.chat_template.layout(self.with_system(example))
        if isinstance(example, Completion):
            text, start = example.prompt + example.completion, len(example.prompt)
        else:
            text, start = example.text, 0
        return Layout(text, ((start, len(text)),), example.origin, starts=True, stops=True)

    def _document(self, layout: Layout, ids: NDArray[np.int32], offsets: NDArray[np.int64]) -> Document:
        trained = _overlaps(offsets, layout.spans)
        bos, eos = self._tokenizer.bos_token_id, self._tokenizer.eos_token_id
        if layout.starts and self._adds_bos and ids[:1] != bos:
            ids, trained = np.insert(ids, 0, bos), np.insert(trained, 0, False)
        if layout.stops and ids[-1:] != eos:
            ids, trained = np.append(ids, np.int32(eos)), np.append(trained, True)
        return Document(ids, trained, layout.origin)

    @cached_property
    def _adds_bos(self) -> bool:
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
