"""Which input channels an FP8 product carries: those that were largest in a few rows that it saw."""

from __future__ import annotations

import torch
from torch import Tensor

from swiftkit.engine.kernels.outliers import how_many, largest
from swiftkit.engine.kernels.rows import Rows
from swiftkit.parallel.collectives import Sharding

UNIT = 8  # channels: FP8 products sum over multiples of 16 columns, and each channel has two


class Carried:
    """The choice, and what it is made from.

    Args:
        sharding: of the linear layer, where it is cut; all ranks then choose as one process would.

    Attributes:
        channels: [channels] int32, or None before the choice, and where nothing is carried.
        padding: how many of them, at the end, only fill up: their columns of the weight are zero.
    """

    def __init__(self, sharding: Sharding | None = None) -> None:
        self.channels: Tensor | None = None
        self.padding = 0
        self._sharding = sharding
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

    def choose(self, weight: Tensor) -> Tensor | None:
        """Settle the channels for a weight [out, in], and stop looking; None where no channel is.

        Where no row went through (an expert that no token chose) the weight decides alone.
        """
        squares = weight.new_ones(weight.shape[1]) if self._squares is None else self._squares
        if self._sharding is None:
            self.channels = largest(squares, weight)
        elif self._sharding.row:
            self._choose_own(squares, weight, self._sharding)
        else:
            self.channels = _largest_together(squares, weight, self._sharding)
        self._observes, self._squares = False, None
        return self.channels

    def columns(self, high: Tensor, low: Tensor) -> Tensor:
        """What stands behind the weight, [out, 2 * channels], of the chosen channels' high and low parts."""
        behind = torch.cat([high, low], 1)
        if self.padding:
            behind.unflatten(1, (2, -1))[:, :, -self.padding :] = 0
        return behind

    def _choose_own(self, squares: Tensor, weight: Tensor, sharding: Sharding) -> None:
        """Of the whole layer's largest input channels, those that this rank has."""
        shard = sharding.shard.along(0)
        contribution = sharding.ranks.gather(squares.float().sqrt() * weight.float().norm(dim=0), shard)
        chosen = torch.zeros_like(contribution, dtype=torch.bool)
        chosen[contribution.topk(how_many(shard.whole)).indices] = True
        own = shard.take(chosen).nonzero()[:, 0].int()
        self.padding = -own.shape[0] % UNIT
        self.channels = torch.cat([own, own.new_zeros(self.padding)]) if own.shape[0] else None

    def move(self, device: torch.device) -> None:
        """Follow the weight to another device."""
        self.channels = None if self.channels is None else self.channels.to(device)


def _largest_together(squares: Tensor, weight: Tensor, sharding: Sharding) -> Tensor:
    """As `largest`, of a weight whose rows lie on several ranks; the inputs are the same on all."""
    lengths = sharding.ranks.sum(sharding.shard.counted(weight.float()).square().sum(0)).sqrt()
    contribution = squares.float().sqrt() * lengths
    return contribution.topk(how_many(weight.shape[1])).indices.sort().values.int()
