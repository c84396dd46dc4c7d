"""Some rows at once, from what was read to tokens: what each worker process does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from swiftkit.data.conversation import Conversation, Message
from swiftkit.data.document import RowError
from swiftkit.data.documents import STORED, Tokens
from swiftkit.data.layout import Layout
from swiftkit.data.lines import Row
from swiftkit.data.render import Renderer
from swiftkit.data.shapes import Completion, Example, to_example
from swiftkit.data.windows import tokens_of

SAMPLE_CANDIDATES = 32  # prompts looked at, as their rows may be dropped later


@dataclass(slots=True)
class Encoded:
    """Some rows as documents, and what is to be said about them.

    Attributes:
        tokens: of the documents.
        numbers: for each document the number of its row.
        shapes: documents by what their rows were taken for.
        notes: number of a row, and what was done with it.
        errors: of bad rows, in their order.
        prompts: number of a document, and its conversation before the first answer; all unlike.
        values: what rows have beside their documents, by the name under which it is stored, [rows].
    """

    tokens: Tokens
    numbers: list[int]
    shapes: dict[str, int] = field(default_factory=dict)
    notes: list[tuple[int, str]] = field(default_factory=list)
    errors: list[RowError] = field(default_factory=list)
    prompts: list[tuple[int, list[Message]]] = field(default_factory=list)
    values: dict[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Taken:
    """What a row was taken for.

    Attributes:
        examples: a document each.
        values: as in `Encoded`, of this row.
    """

    examples: tuple[Example, ...]
    values: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Encoder:
    """From rows to tokens.

    Args:
        renderer: with tokenizer and template.
        columns: from the rows' names to those of a shape.
        skip_bad_rows: errors are collected; else the first one is raised.
    """

    renderer: Renderer
    columns: Mapping[str, str]
    skip_bad_rows: bool

    cuts_text: ClassVar[bool] = True  # text files are windows, not rows
    stored: ClassVar[Mapping[str, type[np.generic]]] = STORED

    @property
    def kind(self) -> str:
        """What rows are taken for, in the name of what is cached."""
        return "examples"

    @property
    def documents_of_row(self) -> int:
        """How many documents every row becomes."""
        return 1

    def take(self, row: Row) -> Taken:
        """What a row is taken for.

        Raises:
            RowError: there is nothing to take it for.
        """
        return Taken((to_example(row, self.columns),))

    def shape_of(self, taken: Taken) -> str:
        """What the report counts the row under."""
        return _shape_name(taken.examples[0])

    def rows(self, rows: Sequence[Row | RowError], *, prompts: bool) -> Encoded:
        """Encodes rows.

        Args:
            rows: what a reader gave.
            prompts: whether conversations are looked through for prompts.

        Raises:
            UserError: the first bad row, unless they are skipped; there is no chat template.
        """
        kept: list[Taken] = []
        layouts: list[list[Layout]] = []
        numbers: list[int] = []
        errors: list[RowError] = []
        for number, row in enumerate(rows):
            try:
                if isinstance(row, RowError):
                    raise row
                taken = self.take(row)
                layouts.append([self.renderer.layout(example) for example in taken.examples])
            except RowError as error:
                if not self.skip_bad_rows:
                    raise
                errors.append(error)
                continue
            kept.append(taken)
            numbers.append(number)
        by_document = [number for number in numbers for _ in range(self.documents_of_row)]
        tokens = self.renderer.tokenise(list(chain.from_iterable(layouts)))
        found = Encoded(tokens, by_document, errors=errors)
        for taken in kept:
            shape = self.shape_of(taken)
            found.shapes[shape] = found.shapes.get(shape, 0) + 1
            for name, value in taken.values.items():
                found.values.setdefault(name, []).append(value)
        found.notes = [
            (number, words)
            for number, own in zip(numbers, layouts, strict=True)
            for words in dict.fromkeys(words for layout in own for words in layout.notes)
        ]
        if prompts:
            found.prompts = self._prompts([taken.examples[0] for taken in kept])
        return found

    def text(self, row: Row | RowError) -> NDArray[np.int64]:
        """The ids and lines of a stretch of text; none of one that cannot be read."""
        return tokens_of(row, self.renderer) if isinstance(row, Row) else np.zeros((2, 0), np.int64)

    def _prompts(self, examples: Sequence[Example]) -> list[tuple[int, list[Message]]]:
        """Of the first document of each row."""
        found: list[tuple[int, list[Message]]] = []
        for row, example in enumerate(examples):
            if len(found) >= SAMPLE_CANDIDATES:
                break
            if not isinstance(example, Conversation) or example.tools:
                continue
            prompt = _prompt(self.renderer.with_system(example))
            if prompt and all(prompt != known for _, known in found):
                found.append((row * self.documents_of_row, prompt))
        return found


def _shape_name(example: Example) -> str:
    if isinstance(example, Conversation):
        return "conversations by the chat template"
    return "prompts with completion as plain text" if isinstance(example, Completion) else "plain texts"


def _prompt(conversation: Conversation) -> list[Message]:
    """What stands before the first answer; empty when there is no question."""
    roles = [message["role"] for message in conversation.messages]
    before = conversation.messages[: roles.index("assistant")] if "assistant" in roles else []
    return before if any(message["role"] == "user" for message in before) else []
