"""What the training loop asks of data, whichever method they are for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from swiftkit.data.answers import AnswerBatch
from swiftkit.data.batch import PackedBatch
from swiftkit.data.conversation import Message
from swiftkit.data.document import Document
from swiftkit.data.report import DataReport

HostBatch: TypeAlias = PackedBatch | AnswerBatch


class Trainable(Protocol):
    """Windows of documents; see `Prepared` for what the attributes are."""

    @property
    def documents(self) -> Sequence[Document]: ...
    @property
    def num_windows(self) -> int: ...
    @property
    def max_length(self) -> int: ...
    @property
    def report(self) -> DataReport: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def prompts(self) -> list[list[Message]]: ...
    @property
    def largest_id(self) -> int: ...
    @property
    def window_lengths(self) -> NDArray[np.int64]: ...

    def window(self, index: int) -> list[Document]:
        """The documents of a window, for people."""

    def tokens_of(self, indices: Sequence[int]) -> int:
        """Tokens that these windows put through the model."""

    def collate(self, indices: Sequence[int], *, pad_id: int, pad_to: int | None = None) -> HostBatch:
        """Some windows as one batch."""
