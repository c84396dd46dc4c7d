"""The loss head: only trained positions are projected, in chunks; the logits never stand whole in memory."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from swiftkit.engine.families import LogitRule

CHUNK_BYTES = 1 << 28  # of float32 logits at once


class Head:
    """The frozen output projection with its family's logit rule.

    Args:
        weight: [vocabulary, hidden].
        rule: scale and soft cap.
        chunk: positions projected at once; None fills CHUNK_BYTES.
    """

    def __init__(self, weight: Tensor, rule: LogitRule, *, chunk: int | None = None):
        self.weight = weight
        self.rule = rule
        self.chunk = chunk or max(16, CHUNK_BYTES // (4 * weight.shape[0]))

    def logits(self, hidden: Tensor) -> Tensor:
        """[positions, hidden] to float32 [positions, vocabulary]."""
        scores = F.linear(hidden, self.weight).float() * self.rule.scale
        cap = self.rule.softcap
        return scores if cap is None else cap * torch.tanh(scores / cap)

    def cross_entropy(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Sum of -log p(target) over positions, in float32; differentiable in `hidden`.

        Args:
            hidden: [positions, hidden], the trained positions only.
            targets: int64 [positions].
        """
        wants_gradient = hidden.requires_grad and torch.is_grad_enabled()
        total: Tensor = _ChunkedCrossEntropy.apply(hidden, targets, self, wants_gradient)
        return total


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Loss and its gradient in one pass over chunks, so that no logits are kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, targets: Tensor, head: Head, wants_gradient: bool) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        gradient = torch.empty_like(hidden) if wants_gradient else None
        for start in range(0, hidden.shape[0], head.chunk):
            piece = slice(start, start + head.chunk)
            logits = head.logits(hidden[piece])  # [chunk, vocabulary]
            log_z = logits.logsumexp(-1)
            total += (log_z - logits.gather(-1, targets[piece, None])[:, 0]).sum()
            if gradient is not None:
                gradient[piece] = _gradient(logits, log_z, targets[piece], head).to(hidden.dtype)
        if gradient is not None:
            ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * upstream[0].to(gradient.dtype), None, None, None


def _gradient(logits: Tensor, log_z: Tensor, targets: Tensor, head: Head) -> Tensor:
    """d loss / d hidden of one chunk: (softmax - one-hot) through cap and scale, times the weight."""
    slope = (logits - log_z[:, None]).exp_()
    slope.scatter_add_(-1, targets[:, None], torch.full_like(log_z, -1.0)[:, None])
    if head.rule.softcap is not None:
        slope *= 1 - (logits / head.rule.softcap) ** 2
    return (slope * head.rule.scale).to(head.weight.dtype) @ head.weight
