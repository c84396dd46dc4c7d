"""Embedding and loss over a vocabulary that lies on several ranks: each has some of its rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from swiftkit.engine.families import LogitRule
from swiftkit.engine.kernels.cross_entropy import Fp8Head
from swiftkit.engine.kernels.rows import FP8, FP8_MAX, Rows, fp8_product, power_of_two_scale, widen
from swiftkit.parallel.collectives import Ranks
from swiftkit.parallel.shards import Shard


class Vocabulary(NamedTuple):
    """The rows of the vocabulary that are here, and the ranks that have the others."""

    shard: Shard
    ranks: Ranks

    def local(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Which ids are here, and their rows (0 where they are not)."""
        ((start, stop),) = self.shard.ranges
        here = (ids >= start) & (ids < stop)
        return here, torch.where(here, ids - start, torch.zeros_like(ids))


def shard_embedding(embedding: nn.Embedding, weight: nn.Parameter, shard: Shard, ranks: Ranks) -> None:
    """Make an embedding one rank's part of it: ids that are not here give zero, then the ranks add up.

    Args:
        embedding: of a family's own class, which may scale its result.
        weight: its part, on the meta device.
        shard, ranks: of the vocabulary.
    """
    vocabulary = Vocabulary(shard, ranks)
    ((start, stop),) = shard.ranges
    padding = embedding.padding_idx
    embedding.padding_idx = padding - start if padding is not None and start <= padding < stop else None
    embedding.num_embeddings = shard.size
    embedding.weight = weight
    outside: list[Tensor] = []  # of the call that is under way

    def enter(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        here, rows = vocabulary.local(args[0])
        outside.append(~here)
        return (rows,)

    def leave(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return ranks.leave(output.masked_fill(outside.pop()[..., None], 0))

    embedding.register_forward_pre_hook(enter)
    embedding.register_forward_hook(leave)


class ShardedCrossEntropy(torch.autograd.Function):
    """Loss and gradients in one pass over chunks of positions, as over a whole vocabulary.

    Two small collectives a chunk: the largest logits, then sums of exponentials with the targets' logits.
    The gradient of the hidden states is summed once, at the end.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, rule: LogitRule, chunk: int,
        vocabulary: Vocabulary, fp8: Fp8Head | None, wants_gradient: bool,
    ) -> Tensor:  # fmt: skip
        """Sum over positions of -log p(target), [] float32."""
        total = hidden.new_zeros((), dtype=torch.float32)
        trains = weight.requires_grad and wants_gradient
        of_hidden = torch.empty_like(hidden) if wants_gradient else None
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if trains else None
        for start in range(0, hidden.shape[0], chunk):
            piece = slice(start, start + chunk)
            logits = hidden[piece] @ weight.T
            losses, slope, lack = loss_and_slope(logits, targets[piece], rule, vocabulary, wants_gradient)
            total += losses.sum()
            if of_hidden is None or slope is None:
                continue
            if of_weight is not None:
                of_weight += slope.to(weight.dtype).T @ hidden[piece]
            if fp8 is None:
                torch.mm(slope.to(weight.dtype), weight, out=of_hidden[piece])
            else:
                of_hidden[piece] = _fp8_gradient(slope, lack * rule.scale, fp8, of_hidden.dtype)
        if of_hidden is not None:
            of_hidden = vocabulary.ranks.sum(of_hidden)
            ctx.save_for_backward(of_hidden, None if of_weight is None else of_weight.to(weight.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the hidden states, and of a trained weight."""
        of_hidden, of_weight = ctx.saved_tensors
        factor = upstream[0].to(of_hidden.dtype)
        scaled = None if of_weight is None else of_weight * factor
        return of_hidden * factor, scaled, None, None, None, None, None, None


def loss_and_slope(
    logits: Tensor, targets: Tensor, rule: LogitRule, vocabulary: Vocabulary, wants_gradient: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Losses [rows], d loss / d logits of the own vocabulary, and what each target lacks to probability 1."""
    ranks = vocabulary.ranks
    scores = widen(logits) * rule.scale
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    here, rows = vocabulary.local(targets)
    largest = ranks.max(scores.amax(-1))
    own = scores.gather(-1, rows[:, None])[:, 0] * here
    sums, target = ranks.sum(torch.stack([(scores - largest[:, None]).exp().sum(-1), own]))
    log_z = largest + sums.log()
    # A probability is known to about 2**-16 in fp32.
    lack = (1 - (target - log_z).exp()).clamp_min(2.0**-16)
    if not wants_gradient:
        return log_z - target, None, lack
    slope = (scores - log_z[:, None]).exp()
    slope.scatter_add_(-1, rows[:, None], -here.to(slope.dtype)[:, None])
    if rule.softcap is not None:
        slope *= 1 - (scores / rule.softcap).square()
    slope *= rule.scale
    return log_z - target, slope, lack


def _fp8_gradient(slope: Tensor, largest: Tensor, fp8: Fp8Head, dtype: torch.dtype) -> Tensor:
    """The product of `slope` with an FP8 copy of the head; scales as in `kernels.cross_entropy`.

    Args:
        slope: [rows, own vocabulary].
        largest: [rows], no entry of a row is larger.
        fp8: the copy of the own rows, with the largest scale of all ranks.
        dtype: of the result.
    """
    scale = power_of_two_scale(largest * fp8.largest)
    data = (slope * fp8.scale / scale[:, None]).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    ones = torch.ones(fp8.transposed.shape[0], device=slope.device)
    return fp8_product(Rows(data, scale), fp8.transposed, ones, dtype=dtype)
