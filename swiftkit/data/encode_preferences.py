"""Rows of preferences to tokens: two answers to one prompt, or one with a label."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

import numpy as np

from swiftkit.data.conversation import Conversation
from swiftkit.data.documents import STORED
from swiftkit.data.encode import Encoder, Taken
from swiftkit.data.lines import Row
from swiftkit.data.preferences import to_labelled, to_pair

Rows: TypeAlias = Literal["pairs", "labelled"]


@dataclass(frozen=True, slots=True)
class PreferenceEncoder(Encoder):
    """A document for each answer, with its prompt.

    Args:
        rows_are: pairs, or single answers with a label.
    """

    rows_are: Rows = "pairs"

    cuts_text: ClassVar[bool] = False  # a text file has no answers, which is said of its first line
    stored: ClassVar[Mapping[str, type[np.generic]]] = {**STORED, "margins": np.float64, "good": np.bool_}

    @property
    def kind(self) -> str:
        """See `Encoder`."""
        return self.rows_are

    @property
    def documents_of_row(self) -> int:
        """See `Encoder`."""
        return 2 if self.rows_are == "pairs" else 1

    def take(self, row: Row) -> Taken:
        """See `Encoder`; values are the margin and the label."""
        found = (to_pair if self.rows_are == "pairs" else to_labelled)(row, self.columns)
        return Taken(found.answers, {"margins": found.margin, "good": found.good})

    def shape_of(self, taken: Taken) -> str:
        """See `Encoder`."""
        shape = "conversations" if isinstance(taken.examples[0], Conversation) else "plain texts"
        return f"{shape}, {self.rows_are}"
