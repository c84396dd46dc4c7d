"""Cross-entropy over a frozen head, in chunks: logits become their own gradient in place, in one kernel."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from swiftkit.engine.kernels.rows import (
    FP8,
    FP8_MAX,
    Rows,
    cast_weight,
    fp8_product,
    power_of_two_scale,
    runs_triton,
    widen,
)


class Fp8Head(NamedTuple):
    """A second, FP8 copy of the head for the gradient's product, which then takes half the time.

    The logits themselves stay in the head's own precision: an error in them would bias the loss, while one in
    the gradient is noise like that of every other FP8 product.

    Attributes:
        transposed: [width, vocabulary] uint8, e4m3 with one power-of-two scale per vocabulary entry.
        scale: [vocabulary] fp32.
        largest: [] fp32, the largest scale.
    """

    transposed: Tensor
    scale: Tensor
    largest: Tensor

    @classmethod
    def of(cls, weight: Tensor) -> Fp8Head:
        """The copy of a head [vocabulary, width]; both must be multiples of 16."""
        data, scale = cast_weight(weight)
        return cls(data.T.contiguous(), scale, scale.max())


def cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    chunk: int,
    fp8: Fp8Head | None = None,
) -> Tensor:
    """Sum over positions of -log softmax(cap(hidden @ weight^T * scale))[target]; differentiable in hidden.

    Args:
        hidden: [positions, width], trained positions only.
        weight: [vocabulary, width], frozen.
        targets: int64 [positions].
        scale: factor on the logits.
        softcap: logits become softcap * tanh(logits / softcap) after the scale.
        chunk: positions projected at once.
        fp8: makes the gradient's product in FP8; None makes it with `weight`.

    Returns:
        [] fp32.
    """
    wants_gradient = hidden.requires_grad and torch.is_grad_enabled()
    total: Tensor = _CrossEntropy.apply(hidden, weight, targets, scale, softcap, chunk, fp8, wants_gradient)
    return total


def loss_and_gradient_(
    logits: Tensor,
    targets: Tensor,
    *,
    scale: float,
    softcap: float | None,
    wants_gradient: bool,
    fp8: Fp8Head | None = None,
) -> tuple[Tensor, Rows | None]:
    """Each row's loss, and d loss / d logits.

    Args:
        logits: [rows, vocabulary], as the product gave them; contiguous; overwritten with the gradient where
            one is wanted and `fp8` is None.
        targets: int64 [rows].
        scale, softcap: see `cross_entropy`.
        wants_gradient: whether the gradient is made.
        fp8: the gradient is multiplied by its scales and cast.

    Returns:
        losses: [rows] fp32.
        gradient: [rows, vocabulary], or None.
    """
    if runs_triton(logits):
        from swiftkit.engine.kernels import cross_entropy_triton

        return cross_entropy_triton.loss_and_gradient_(logits, targets, scale, softcap, wants_gradient, fp8)
    return loss_and_gradient_reference(logits, targets, scale, softcap, wants_gradient, fp8)


def loss_and_gradient_reference(
    logits: Tensor, targets: Tensor, scale: float, softcap: float | None, wants_gradient: bool,
    fp8: Fp8Head | None,
) -> tuple[Tensor, Rows | None]:  # fmt: skip
    """See `loss_and_gradient_`."""
    scores = widen(logits) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    log_z = scores.logsumexp(-1)
    own = scores.gather(-1, targets[:, None])[:, 0]
    if not wants_gradient:
        return log_z - own, None
    slope = (scores - log_z[:, None]).exp()
    slope.scatter_add_(-1, targets[:, None], -torch.ones_like(log_z)[:, None])
    if softcap is not None:
        slope *= 1 - (scores / softcap).square()
    slope *= scale
    if fp8 is None:
        logits.copy_(slope)
        return log_z - own, Rows(logits, None)
    # No entry's probability is larger than what the target lacks to 1 (known to about 2**-16 in fp32).
    lack = (1 - (own - log_z).exp()).clamp_min(2.0**-16)
    row_scale = power_of_two_scale(lack * scale * fp8.largest)
    data = (slope * fp8.scale / row_scale[:, None]).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    return log_z - own, Rows(data, row_scale)


class _CrossEntropy(torch.autograd.Function):
    """Loss and its gradient in one pass over chunks, so that no logits are kept for the backward."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, scale: float, softcap: float | None,
        chunk: int, fp8: Fp8Head | None, wants_gradient: bool,
    ) -> Tensor:  # fmt: skip
        losses = []
        gradient = torch.empty_like(hidden) if wants_gradient else None
        for start in range(0, hidden.shape[0], chunk):
            piece = slice(start, start + chunk)
            logits = hidden[piece] @ weight.T
            loss, slope = loss_and_gradient_(
                logits, targets[piece], scale=scale, softcap=softcap, wants_gradient=wants_gradient, fp8=fp8
            )
            losses.append(loss)
            del logits
            if gradient is not None and slope is not None:
                _into(gradient[piece], slope, weight, fp8)
        if gradient is not None:
            ctx.save_for_backward(gradient)
        if not losses:
            return hidden.new_zeros((), dtype=torch.float32)
        return torch.cat(losses).sum()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * upstream[0].to(gradient.dtype), None, None, None, None, None, None, None


def _into(out: Tensor, slope: Rows, weight: Tensor, fp8: Fp8Head | None) -> None:
    """Write the gradient of `hidden`."""
    if fp8 is None:
        torch.mm(slope.data, weight, out=out)
        return
    ones = torch.ones(out.shape[1], device=out.device)
    out.copy_(fp8_product(slope, fp8.transposed, ones, dtype=out.dtype))
