"""What a row becomes: token ids, which of them are trained, and where the row came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from swiftkit.errors import UserError

TokenIds: TypeAlias = NDArray[np.int32]
Mask: TypeAlias = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a row stands: the file as the user named it, and its line (from 1, blank lines counted)."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    def error(self, reason: str) -> UserError:
        """The error that refuses this row; it begins with `file:line: `."""
        return UserError(f"{self}: {reason}")


@dataclass(frozen=True, slots=True)
class Document:
    """One row as tokens. Documents that share a window never see each other.

    Attributes:
        ids: token ids, [tokens].
        trained: whether the model learns to produce this token, [tokens].
        origin: the row's file and line.
    """

    ids: TokenIds
    trained: Mask
    origin: Origin

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def targets(self) -> int:
        """Number of trained tokens; the first token follows nothing, so it is never a target."""
        return int(np.count_nonzero(self.trained[1:]))
