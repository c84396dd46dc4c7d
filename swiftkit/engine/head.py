"""The loss head: only trained positions are projected, in chunks; the logits never stand whole in memory."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swiftkit.engine.families import LogitRule
from swiftkit.engine.kernels.cross_entropy import Fp8Head, cross_entropy, loss_and_gradient_
from swiftkit.engine.vocabulary import ShardedCrossEntropy, Vocabulary, loss_and_slope

CHUNK_BYTES = {"cuda": 1 << 30}  # of logits at once; products of fewer rows leave a GPU half idle
SMALL_CHUNK_BYTES = 1 << 28


class Head:
    """The output projection with its family's logit rule.

    Args:
        weight: [vocabulary, hidden]; where it requires a gradient it gets one. A module's weight is taken
            anew each time: it may lie in parts on several ranks while nothing is computed.
        rule: scale and soft cap.
        chunk: positions projected at once; None fills CHUNK_BYTES.
        fp8: keep an FP8 copy, which makes the gradient's product twice as fast; the logits stay exact.
        vocabulary: where `weight` is one rank's part of its rows; what comes out is the same on all ranks.
    """

    def __init__(
        self,
        weight: Tensor | nn.Module,
        rule: LogitRule,
        *,
        chunk: int | None = None,
        fp8: bool = False,
        vocabulary: Vocabulary | None = None,
    ):
        self._weight = weight
        self.rule = rule
        self.vocabulary = vocabulary
        weight = self.weight
        room = CHUNK_BYTES.get(weight.device.type, SMALL_CHUNK_BYTES)
        # Ranks go through the same chunks, whoever has a few rows more.
        rows = weight.shape[0] if vocabulary is None else vocabulary.shard.whole // vocabulary.ranks.size
        self.chunk = chunk or max(16, room // (weight.element_size() * rows))
        shape = weight.shape if vocabulary is None else vocabulary.shard.whole_shape(weight.shape)
        self._takes_fp8 = fp8 and all(size % 16 == 0 for size in shape)  # else there is no kernel

    @property
    def weight(self) -> Tensor:
        """[vocabulary, hidden], or this rank's part of its rows."""
        return self._weight if isinstance(self._weight, Tensor) else self._weight.weight  # type: ignore[return-value]

    @property
    def _fp8(self) -> Fp8Head | None:
        """Kept where the weight stays; made anew where it comes and goes."""
        if not self._takes_fp8:
            return None
        return self._kept_fp8 if isinstance(self._weight, Tensor) else self._made_fp8()

    @cached_property
    def _kept_fp8(self) -> Fp8Head:
        """Made when the first gradient is: a model that only answers needs no copy."""
        return self._made_fp8()

    def _made_fp8(self) -> Fp8Head:
        copy = Fp8Head.of(self.weight.detach())
        if self.vocabulary is None:
            return copy
        return copy._replace(largest=self.vocabulary.ranks.max(copy.largest))

    def logits(self, hidden: Tensor) -> Tensor:
        """[positions, hidden] to float32 [positions, vocabulary]."""
        scores = F.linear(hidden, self.weight).float() * self.rule.scale
        if self.vocabulary is not None:
            scores = self.vocabulary.ranks.gather(scores, self.vocabulary.shard.along(1))
        cap = self.rule.softcap
        return scores if cap is None else cap * torch.tanh(scores / cap)

    def cross_entropy(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Sum of -log p(target) over positions, in float32; differentiable in `hidden` and a trained weight.

        Args:
            hidden: [positions, hidden], the trained positions only.
            targets: int64 [positions].
        """
        if self.vocabulary is not None:
            wants_gradient = torch.is_grad_enabled() and (hidden.requires_grad or self.weight.requires_grad)
            sharded: Tensor = ShardedCrossEntropy.apply(
                hidden, self.weight, targets, self.rule, self.chunk, self.vocabulary,
                self._fp8 if wants_gradient else None, wants_gradient,
            )  # fmt: skip
            return sharded
        if self.weight.requires_grad and torch.is_grad_enabled():
            total: Tensor = _TrainedCrossEntropy.apply(hidden, self.weight, targets, self.rule, self.chunk)
            return total
        return cross_entropy(
            hidden,
            self.weight,
            targets,
            scale=self.rule.scale,
            softcap=self.rule.softcap,
            chunk=self.chunk,
            fp8=self._fp8 if hidden.requires_grad else None,
        )

    def logprobs(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """log p(target) of each position, [positions] in float32; differentiable as `cross_entropy`.

        Args:
            hidden: [positions, hidden], the positions of answers only.
            targets: int64 [positions].
        """
        wants = torch.is_grad_enabled() and (hidden.requires_grad or self.weight.requires_grad)
        found: Tensor = _Logprobs.apply(
            hidden, self.weight, targets, self.rule, self.chunk, self.vocabulary, wants
        )
        return found


class _Logprobs(torch.autograd.Function):
    """log p of each target, and what its gradient is per unit, in one pass over chunks of positions.

    Where the weight is trained, its gradient is made in the backward from logits that are computed again: how
    much each position counts is not known before. Ranks that share the vocabulary add up what they know of a
    position once, in the forward.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, rule: LogitRule, chunk: int,
        vocabulary: Vocabulary | None, wants: bool,
    ) -> Tensor:  # fmt: skip
        found = hidden.new_empty(hidden.shape[0], dtype=torch.float32)
        slopes = torch.empty_like(hidden) if wants else None
        for start in range(0, hidden.shape[0], chunk):
            piece = slice(start, start + chunk)
            losses, slope = _losses_and_slope(hidden[piece], weight, targets[piece], rule, vocabulary, wants)
            found[piece] = -losses
            if slopes is not None and slope is not None:
                torch.mm(slope, weight, out=slopes[piece])
        ctx.rule, ctx.chunk, ctx.vocabulary = rule, chunk, vocabulary
        if slopes is not None:
            slopes = slopes if vocabulary is None else vocabulary.ranks.sum(slopes)
            ctx.save_for_backward(slopes, hidden, weight, targets)
        return found

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        slopes, hidden, weight, targets = ctx.saved_tensors
        counts = -upstream[0][:, None]  # slopes are of -log p
        of_hidden = slopes * counts.to(slopes.dtype)
        if not ctx.needs_input_grad[1]:
            return of_hidden, None, None, None, None, None, None
        of_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for start in range(0, hidden.shape[0], ctx.chunk):
            piece = slice(start, start + ctx.chunk)
            _, slope = _losses_and_slope(
                hidden[piece], weight, targets[piece], ctx.rule, ctx.vocabulary, True
            )
            assert slope is not None
            of_weight += (slope.float() * counts[piece]).T @ hidden[piece].float()
        return of_hidden, of_weight.to(weight.dtype), None, None, None, None, None


def _losses_and_slope(
    hidden: Tensor, weight: Tensor, targets: Tensor, rule: LogitRule, vocabulary: Vocabulary | None,
    wants: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """-log p of each target [positions], and its slope over the logits of the rows of `weight`."""
    logits = hidden @ weight.T
    if vocabulary is None:
        losses, gradient = loss_and_gradient_(
            logits, targets, scale=rule.scale, softcap=rule.softcap, wants_gradient=wants
        )
        return losses, None if gradient is None else gradient.data
    losses, slope, _ = loss_and_slope(logits, targets, rule, vocabulary, wants)
    return losses, None if slope is None else slope.to(weight.dtype)


class _TrainedCrossEntropy(torch.autograd.Function):
    """Loss with the gradients of hidden states and weight, in one pass over chunks of positions."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, rule: LogitRule, chunk: int
    ) -> Tensor:
        total = hidden.new_zeros((), dtype=torch.float32)
        of_hidden = torch.empty_like(hidden)
        of_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for start in range(0, hidden.shape[0], chunk):
            piece = slice(start, start + chunk)
            logits = hidden[piece] @ weight.T
            losses, slope = loss_and_gradient_(
                logits, targets[piece], scale=rule.scale, softcap=rule.softcap, wants_gradient=True
            )
            assert slope is not None
            total += losses.sum()
            torch.mm(slope.data, weight, out=of_hidden[piece])
            of_weight += slope.data.T @ hidden[piece]
            del logits, slope
        ctx.save_for_backward(of_hidden, of_weight.to(weight.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        of_hidden, of_weight = ctx.saved_tensors
        factor = upstream[0].to(of_hidden.dtype)
        return of_hidden * factor, of_weight * factor, None, None, None
