"""The chunked loss head against plain cross-entropy in float64, and what it holds in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from swiftkit.engine.families import LogitRule
from swiftkit.engine.head import Head

VOCABULARY, HIDDEN, POSITIONS = 131, 16, 23


def draw() -> tuple[Tensor, Tensor, Tensor]:
    weight = torch.randn(VOCABULARY, HIDDEN) * 0.5
    return weight, torch.randn(POSITIONS, HIDDEN), torch.randint(0, VOCABULARY, (POSITIONS,))


@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.parametrize(
    "rule", [LogitRule(), LogitRule(scale=0.3), LogitRule(softcap=1.5), LogitRule(0.3, 1.5)]
)
def test_loss_and_gradient_equal_plain_cross_entropy(seed: int, rule: LogitRule, chunk: int) -> None:
    weight, hidden, targets = draw()
    ours = hidden.clone().requires_grad_()
    total = Head(weight, rule, chunk=chunk).cross_entropy(ours, targets)
    (total / 7).backward()

    wide = hidden.double().requires_grad_()
    logits = F.linear(wide, weight.double()) * rule.scale
    if rule.softcap is not None:
        logits = rule.softcap * torch.tanh(logits / rule.softcap)
    plain = F.cross_entropy(logits, targets, reduction="sum")
    (plain / 7).backward()
    torch.testing.assert_close(total.double(), plain, rtol=1e-6, atol=0)
    assert ours.grad is not None and wide.grad is not None
    torch.testing.assert_close(ours.grad.double(), wide.grad, rtol=1e-5, atol=1e-6)


def test_without_targets_the_loss_is_zero_and_differentiable() -> None:
    weight, hidden, _ = draw()
    hidden.requires_grad_()
    none = torch.zeros(0, dtype=torch.int64)
    total = Head(weight, LogitRule()).cross_entropy(hidden[none], none)
    total.backward()
    assert total == 0 and hidden.grad is not None and not hidden.grad.any()


def test_without_gradients_the_loss_is_the_same(seed: int) -> None:
    weight, hidden, targets = draw()
    head = Head(weight, LogitRule(softcap=2.0), chunk=5)
    with torch.no_grad():
        quiet = head.cross_entropy(hidden.requires_grad_(), targets)
    assert not quiet.requires_grad and quiet == head.cross_entropy(hidden, targets)


def test_bf16_stays_close_to_float64(seed: int) -> None:
    weight, hidden, targets = draw()
    ours = hidden.bfloat16().requires_grad_()
    Head(weight.bfloat16(), LogitRule(), chunk=6).cross_entropy(ours, targets).backward()
    wide = hidden.bfloat16().double().requires_grad_()
    F.cross_entropy(F.linear(wide, weight.bfloat16().double()), targets, reduction="sum").backward()
    assert ours.grad is not None and wide.grad is not None and ours.grad.dtype == torch.bfloat16
    assert (ours.grad - wide.grad).norm() / wide.grad.norm() < 0.02


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation made."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else [made]:
            # The weight itself passes through as its transpose.
            if isinstance(tensor, Tensor) and sorted(tensor.shape) != [HIDDEN, VOCABULARY]:
                self.numel = max(self.numel, tensor.numel())
        return made


@pytest.mark.parametrize("chunk", [1, 6])
def test_no_tensor_is_larger_than_a_chunk_of_logits(seed: int, chunk: int) -> None:
    weight, hidden, targets = draw()
    hidden.requires_grad_()
    bound = max(chunk * VOCABULARY, POSITIONS * HIDDEN)
    with Largest() as seen:
        Head(weight, LogitRule(0.5, 2.0), chunk=chunk).cross_entropy(hidden, targets).backward()
    assert 0 < seen.numel <= bound < POSITIONS * VOCABULARY


def test_the_chunk_is_bounded_by_bytes() -> None:
    assert Head(torch.empty(128_256, 1, device="meta"), LogitRule()).chunk == 523
    assert Head(torch.empty(10**9, 1, device="meta"), LogitRule()).chunk == 16
