"""AdamW, its learning rate over the steps, and the gradient norm."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from swiftkit.config import TrainKnobs


def adamw(parameters: Iterable[Tensor], knobs: TrainKnobs) -> torch.optim.AdamW:
    """AdamW over the trained tensors; the rate is set anew each step by `learning_rate`."""
    parameters = list(parameters)
    return torch.optim.AdamW(
        parameters,
        lr=knobs.learning_rate,
        betas=(knobs.adam_beta1, knobs.adam_beta2),
        weight_decay=knobs.weight_decay,
        fused=parameters[0].is_cuda,
    )


def learning_rate(step: int, steps: int, knobs: TrainKnobs) -> float:
    """The rate of a step (counted from 0): a linear rise over the warm-up, then the schedule down to 0.

    The first step already moves, and the last one still does.
    """
    warmup = math.ceil(steps * knobs.warmup_ratio)
    if step < warmup:
        return knobs.learning_rate * (step + 1) / (warmup + 1)
    done = (step - warmup) / max(1, steps - warmup)
    if knobs.lr_scheduler_type == "cosine":
        return knobs.learning_rate * 0.5 * (1 + math.cos(math.pi * done))
    return knobs.learning_rate * (1 - done) if knobs.lr_scheduler_type == "linear" else knobs.learning_rate


def clip_gradients(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale gradients so that their common norm is at most `max_norm` (0: never); returns the norm before.

    Nothing is read back from the device.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    if max_norm > 0:
        torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm
