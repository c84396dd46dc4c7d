"""Collectives that gradients go through, for tensor parallelism over plain local tensors.

They are functional collectives inside autograd functions, so `torch.compile` traces them without a break.
The conjugate pairs f and g: Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from swiftkit.parallel.shards import Shard


@dataclass(frozen=True)
class Ranks:
    """The processes that share a tensor, as one of them sees it.

    Args:
        name: the group's, by which functional collectives find it.
        rank: this process's place in the group.
        size: how many there are.
    """

    name: str
    rank: int
    size: int

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Ranks:
        """Those of a process group."""
        return cls(group.group_name, group.rank(), group.size())

    def sum(self, x: Tensor) -> Tensor:
        """The sum over the ranks, the same on each; without a gradient."""
        return _reduce(x, "sum", self.name)

    def max(self, x: Tensor) -> Tensor:
        """The largest over the ranks; without a gradient."""
        return _reduce(x, "max", self.name)

    def gather(self, own: Tensor, shard: Shard) -> Tensor:
        """The whole tensor, on every rank; exact, since each number comes from one rank alone."""
        return self.sum(shard.put(shard.counted(own)))

    def enter(self, x: Tensor) -> Tensor:
        """Into a sub-block whose ranks each see a part of the gradient: backward is the sum."""
        entered: Tensor = _Enter.apply(x, self.name)
        return entered

    def leave(self, x: Tensor) -> Tensor:
        """Out of a sub-block whose ranks each have a part of the value: forward is the sum."""
        left: Tensor = _Leave.apply(x, self.name)
        return left

    def share(self, x: Tensor) -> Tensor:
        """A sum that every rank goes on with in its own way: forward and backward are sums."""
        shared: Tensor = _Share.apply(x, self.name)
        return shared


@dataclass(frozen=True)
class Sharding:
    """How a linear layer is cut.

    Args:
        row: whether its inputs are cut (its outputs are partial sums then), instead of its outputs.
        shard: of its weight [out, in].
        ranks: that have the other shards.
    """

    row: bool
    shard: Shard
    ranks: Ranks


def _reduce(x: Tensor, how: str, group: str) -> Tensor:
    operations = torch.ops._c10d_functional
    reduced: Tensor = operations.wait_tensor(operations.all_reduce(x.contiguous(), how, group))
    return reduced


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        return _reduce(upstream[0], "sum", ctx.group), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        return _reduce(x, "sum", group)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        return upstream[0], None


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return _reduce(x, "sum", group)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        return _reduce(upstream[0], "sum", ctx.group), None


@torch.no_grad()
def sum_in_one(gradients: Sequence[tuple[Tensor, Shard | None]], ranks: Ranks) -> None:
    """Sum gradients over the ranks in place, in one float32 bucket.

    Args:
        gradients: of tensors that every rank holds (None), or that several ranks hold (their shard).
        ranks: all of them.
    """
    if not gradients:
        return
    whole = [gradient if shard is None else shard.put(gradient) for gradient, shard in gradients]
    bucket = ranks.sum(torch.cat([tensor.float().reshape(-1) for tensor in whole]))
    pieces = bucket.split([tensor.numel() for tensor in whole])
    for (gradient, shard), tensor, piece in zip(gradients, whole, pieces, strict=True):
        summed = piece.view(tensor.shape)
        gradient.copy_(summed if shard is None else shard.take(summed))
