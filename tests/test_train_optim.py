"""Learning rate, gradient norm, and AdamW."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from swiftkit.config import TrainKnobs
from swiftkit.train.optim import adamw, clip_gradients, learning_rate

STEPS = 200


def rates(steps: int = STEPS, **knobs: Any) -> list[float]:
    checked = TrainKnobs(learning_rate=1e-3, **knobs)
    return [learning_rate(step, steps, checked) for step in range(steps)]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_ends_and_turning_points(schedule: str) -> None:
    found = rates(lr_scheduler_type=schedule, warmup_ratio=0.05)
    assert found[:10] == pytest.approx([1e-3 * k / 11 for k in range(1, 11)])
    assert found[10] == max(found) == 1e-3, "the peak follows the warm-up"
    assert all(rate > 0 for rate in found), "every step moves"
    if schedule == "constant":
        assert set(found[10:]) == {1e-3}
    else:
        assert found[10:] == sorted(found[10:], reverse=True)
        assert found[10 + 95] == pytest.approx(0.5e-3), "half of the peak in the middle"
    last = {"cosine": 0.5e-3 * (1 + math.cos(math.pi * 189 / 190)), "linear": 1e-3 / 190, "constant": 1e-3}
    assert found[-1] == pytest.approx(last[schedule])


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_without_warm_up_it_is_the_schedule_of_transformers(schedule: str) -> None:
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1e-3)
    scheduler = get_scheduler(schedule, optimizer, num_warmup_steps=0, num_training_steps=STEPS)
    theirs = []
    for _ in range(STEPS):
        theirs.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert rates(lr_scheduler_type=schedule, warmup_ratio=0) == pytest.approx(theirs, rel=1e-9)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
@pytest.mark.parametrize("warmup_ratio", [0, 0.03, 0.5, 1])
def test_the_shortest_runs_move_at_every_step(schedule: str, warmup_ratio: float) -> None:
    for steps in (1, 2, 3):
        found = rates(steps, lr_scheduler_type=schedule, warmup_ratio=warmup_ratio)
        assert all(0 < rate <= 1e-3 for rate in found)


@pytest.mark.parametrize("max_norm", [0.0, 0.1, 1e9])
def test_clipping_equals_torch_s(seed: int, max_norm: float) -> None:
    shapes = [(4, 8), (8, 4), (3,), (1, 100)]
    ours = [torch.zeros(shape, requires_grad=True) for shape in shapes]
    for parameter in ours:
        parameter.grad = torch.randn(parameter.shape)
    theirs = [p.detach().clone().requires_grad_() for p in ours]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.grad is not None
        other.grad = mine.grad.clone()
    without_gradient = torch.zeros(3, requires_grad=True)
    norm = clip_gradients([*ours, without_gradient], max_norm)
    other_norm = torch.nn.utils.clip_grad_norm_(theirs, max_norm if max_norm > 0 else math.inf)
    torch.testing.assert_close(norm, other_norm, rtol=1e-6, atol=0)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-6, atol=0)


def test_adamw_takes_the_knobs() -> None:
    knobs = TrainKnobs(learning_rate=2e-4, adam_beta1=0.8, adam_beta2=0.95, weight_decay=0.1)
    (group,) = adamw([torch.zeros(2, requires_grad=True)], knobs).param_groups
    assert (group["lr"], group["betas"], group["weight_decay"], group["eps"]) == (
        2e-4,
        (0.8, 0.95),
        0.1,
        1e-8,
    )
