"""A shard of a tensor is a list of ranges on one of its dimensions.

That one idea covers plain cuts, fused projections (a range of each part), uneven heads, key-value heads that
several ranks hold, and the slices of a file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

Range = tuple[int, int]


@dataclass(frozen=True)
class Shard:
    """What one rank holds of a tensor.

    Args:
        dim: the dimension that is cut.
        ranges: [start, stop) of the whole tensor, in the order in which they lie in the shard.
        whole: the whole tensor's size in that dimension.
        again: for each range, whether a rank before this one holds it too; empty where none does.
        shared: whether any rank holds what another one holds.
    """

    dim: int
    ranges: tuple[Range, ...]
    whole: int
    again: tuple[bool, ...] = ()
    shared: bool = False

    @property
    def size(self) -> int:
        """The shard's own size in that dimension."""
        return sum(stop - start for start, stop in self.ranges)

    def along(self, dim: int) -> Shard:
        """The same ranges on another dimension."""
        return replace(self, dim=dim)

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """Shape of the shard of a tensor of shape `whole`."""
        return *whole[: self.dim], self.size, *whole[self.dim + 1 :]

    def whole_shape(self, own: Sequence[int]) -> tuple[int, ...]:
        """Shape of the tensor whose shard has shape `own`."""
        return *own[: self.dim], self.whole, *own[self.dim + 1 :]

    def take(self, whole: Tensor) -> Tensor:
        """The shard of a whole tensor, with memory of its own."""
        import torch

        dim = self.dim % whole.dim()
        return torch.cat([whole.narrow(dim, start, stop - start) for start, stop in self.ranges], dim)

    def counted(self, own: Tensor) -> Tensor:
        """The shard, zero where a rank before this one has the same: a sum over ranks counts it once."""
        if not any(self.again):
            return own
        counted, at = own.clone(), 0
        for (start, stop), again in zip(self.ranges, self.again, strict=True):
            if again:
                counted.narrow(self.dim, at, stop - start).zero_()
            at += stop - start
        return counted

    def put(self, own: Tensor) -> Tensor:
        """A whole tensor that is zero outside of this shard."""
        whole = own.new_zeros(self.whole_shape(own.shape))
        at = 0
        for start, stop in self.ranges:
            whole.narrow(self.dim, start, stop - start).copy_(own.narrow(self.dim, at, stop - start))
            at += stop - start
        return whole


def fits(width: int, parts: int, block: int = 1) -> bool:
    """Whether a width divides into equal parts that are whole blocks.

    Args:
        width: summed side of a product (its input features).
        parts: ranks.
        block: values that share a scale along the width; 1 where a scale serves a whole row.
    """
    return width % (parts * block) == 0


def evenly(count: int, parts: int, part: int, *, unit: int = 1) -> Range:
    """Range of one of `parts` parts of `count` things that stay together in units; the first are larger.

    Args:
        count: a multiple of `unit`.
        parts: how many.
        part: which, from 0.
        unit: things that are not parted.
    """
    whole, more = divmod(count // unit, parts)
    start = part * whole + min(part, more)
    return start * unit, (start + whole + (part < more)) * unit
