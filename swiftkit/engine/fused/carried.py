"""Which input channels an FP8 product carries: those that were largest in a few rows that it saw."""

from __future__ import annotations

import torch
from torch import Tensor

from swiftkit.engine.kernels.outliers import largest
from swiftkit.engine.kernels.rows import Rows


class Carried:
    """The choice, and what it is made from.

    Attributes:
        channels: [channels] int32, or None before the choice, and where nothing is carried.
    """

    def __init__(self) -> None:
        self.channels: Tensor | None = None
        self._squares: Tensor | None = None
        self._observes = False

    @property
    def room(self) -> int:
        """Columns that stand behind a row."""
        return 0 if self.channels is None else 2 * self.channels.shape[0]

    def observe(self) -> None:
        """From now on the rows that go through count."""
        self._observes, self._squares = True, None

    def see(self, x: Rows) -> None:
        """Take in the rows of a product, where that was asked for."""
        if self._observes:
            squares = x.dense().square().sum(0)
            self._squares = squares if self._squares is None else self._squares + squares

    def choose(self, weight: Tensor) -> Tensor:
        """Settle the channels for a weight [out, in], and stop looking.

        Where no row went through (an expert that no token chose) the weight decides alone.
        """
        squares = weight.new_ones(weight.shape[1]) if self._squares is None else self._squares
        self.channels = largest(squares, weight)
        self._observes, self._squares = False, None
        return self.channels

    def move(self, device: torch.device) -> None:
        """Follow the weight to another device."""
        self.channels = None if self.channels is None else self.channels.to(device)
