"""What a row becomes: token ids, which of them are trained, and where the row came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from swiftkit.errors import UserError

TokenIds: TypeAlias = NDArray[np.int32]
Mask: TypeAlias = NDArray[np.bool_]


class RowError(UserError):
    """One row is at fault: `--skip_bad_rows` counts it and goes on, where any other error ends the run."""

    def __init__(self, origin: Origin, reason: str) -> None:
        super().__init__(f"{origin}: {reason}")
        self.origin = origin
        self.reason = reason

    def __reduce__(self) -> tuple[type[RowError], tuple[Origin, str]]:
        return RowError, (self.origin, self.reason)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a row stands: the file as the user named it, and its line (from 1, blank lines counted).

    Files without lines (parquet, a hub's data set) count rows, from 1.
    """

    file: str
    line: int
    unit: Literal["line", "row"] = "line"

    def __str__(self) -> str:
        return f"{self.file}:{'row ' if self.unit == 'row' else ''}{self.line}"

    def error(self, reason: str) -> RowError:
        """The error that refuses this row; it begins with `file:line: `."""
        return RowError(self, reason)


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
