"""Learning rate, gradient norm, and AdamW."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
import torch

from swiftkit.config import SftConfig, TrainKnobs
from swiftkit.engine.engine import gradient_norm
from swiftkit.train.optim import (
    MasterAdamW,
    adamw,
    clip_gradients,
    learning_rate,
    peak_rate,
    set_rate,
    state_bytes,
)

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
    norm = gradient_norm([*ours, without_gradient])
    clip_gradients([*ours, without_gradient], norm, max_norm)
    other_norm = torch.nn.utils.clip_grad_norm_(theirs, max_norm if max_norm > 0 else math.inf)
    torch.testing.assert_close(norm, other_norm, rtol=1e-6, atol=0)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-6, atol=0)


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_8bit"])
def test_adamw_takes_the_knobs(optim: str) -> None:
    if optim == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    knobs = TrainKnobs(learning_rate=2e-4, adam_beta1=0.8, adam_beta2=0.95, weight_decay=0.1, optim=optim)
    (group,) = adamw({"w": torch.zeros(2, 2, requires_grad=True)}, knobs).param_groups
    assert (group["lr"], group["betas"], group["weight_decay"], group["eps"]) == (
        2e-4,
        (0.8, 0.95),
        0.1,
        1e-8,
    )


def test_norms_and_biases_are_not_decayed() -> None:
    parameters = {
        name: torch.ones(shape, requires_grad=True) for name, shape in (("w", (2, 2)), ("norm", (2,)))
    }
    optimizer = adamw(parameters, TrainKnobs(weight_decay=0.1, learning_rate=0.1))
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert (parameters["w"] < 1).all() and (parameters["norm"] == 1).all()


def test_the_rate_that_auto_is() -> None:
    config = SftConfig(model="m", dataset=["d"])
    assert peak_rate(config) == peak_rate(TrainKnobs()) == 1e-4
    assert peak_rate(config.with_changes(tuner_type="full")) == 1e-5
    assert peak_rate(config.with_changes(tuner_type="full", learning_rate=3e-4)) == 3e-4


def test_lora_plus_is_peft_s() -> None:
    """Parameters after some steps equal those of PEFT's optimizer, DoRA's lengths among them."""
    peft = pytest.importorskip("peft")
    from peft.optimizers import create_loraplus_optimizer

    torch.manual_seed(0)
    model = torch.nn.Sequential()
    model.add_module("first", torch.nn.Linear(8, 6))
    model.add_module("second", torch.nn.Linear(6, 4))
    wrapped = peft.get_peft_model(
        model, peft.LoraConfig(r=2, target_modules=["first", "second"], use_dora=True)
    )
    trained = {n.replace(".default.weight", ""): p for n, p in wrapped.named_parameters() if p.requires_grad}
    own = {name: p.detach().clone().requires_grad_() for name, p in trained.items()}
    options = dict(betas=(0.9, 0.999), eps=1e-8, loraplus_weight_decay=0.0)
    theirs = create_loraplus_optimizer(wrapped, torch.optim.AdamW, lr=1e-3, loraplus_lr_ratio=16.0, **options)
    knobs = SftConfig(model="m", dataset=["d"], loraplus_lr_ratio=16.0)
    optimizer = adamw(own, knobs)
    for step in range(4):
        for name, p in trained.items():
            p.grad = torch.randn(p.shape)
            own[name].grad = p.grad.clone()
        for group in theirs.param_groups:
            group["lr"] *= 0.5 if step else 1.0
        set_rate(optimizer, 1e-3 * 0.5**step)
        theirs.step()
        optimizer.step()
    for name, p in trained.items():
        torch.testing.assert_close(own[name], p, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_8bit"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_goes_on_from_where_it_was(seed: int, optim: str, dtype: torch.dtype) -> None:
    """Through a file, as a resumed run does; with float32 values, and tensors of both kinds together."""
    if optim == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    knobs = TrainKnobs(optim=optim, weight_decay=0.1)
    shapes = {"a": (96, 64), "model.embed_tokens.weight": (80, 64), "c.lora_B": (5,)}

    def fresh() -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        made = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        kinds = {name: torch.float32 if "lora" in name else dtype for name in made}
        return {name: t.to(kinds[name]).requires_grad_() for name, t in made.items()}

    gradients = [[torch.randn(shape) for shape in shapes.values()] for _ in range(6)]

    def go(parameters: dict[str, torch.Tensor], optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            for p, gradient in zip(parameters.values(), gradients[step], strict=True):
                p.grad = gradient.to(p.dtype)
            optimizer.step()
            optimizer.zero_grad()

    whole = fresh()
    go(whole, adamw(whole, knobs), range(6))
    first = fresh()
    before = adamw(first, knobs)
    go(first, before, range(3))
    buffer = io.BytesIO()
    torch.save({"parameters": first, "state": before.state_dict()}, buffer)
    buffer.seek(0)
    kept = torch.load(buffer, weights_only=True)
    then = fresh()
    after = adamw(then, knobs)
    with torch.no_grad():
        for name, p in then.items():
            p.copy_(kept["parameters"][name])
    after.load_state_dict(kept["state"])
    go(then, after, range(3, 6))
    for name, p in whole.items():
        assert torch.equal(then[name], p), name


def test_moments_of_8_bits_stay_near_those_of_32(seed: int) -> None:
    pytest.importorskip("bitsandbytes")
    first = torch.randn(64, 96)
    runs = {}
    for optim in ("adamw_torch", "adamw_8bit"):
        generator = torch.Generator().manual_seed(seed)
        p = first.clone().requires_grad_()
        optimizer = adamw({"w": p}, TrainKnobs(optim=optim, learning_rate=1e-3))
        for _ in range(30):
            p.grad = torch.randn(p.shape, generator=generator)
            optimizer.step()
        runs[optim] = p.detach() - first
    error = (runs["adamw_8bit"] - runs["adamw_torch"]).norm() / runs["adamw_torch"].norm()
    print(f"relative distance after 30 steps: {error:.3f}")
    assert 1e-3 < error < 0.1


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_8bit"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_state_is_as_large_as_reckoned(optim: str, dtype: torch.dtype) -> None:
    """It is reckoned before the first step, for the room on the disk."""
    if optim == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    shapes = {"model.embed_tokens.weight": (80, 64), "w": (96, 64), "norm": (64,)}
    parameters = {name: torch.ones(s, dtype=dtype, requires_grad=True) for name, s in shapes.items()}
    optimizer = adamw(parameters, TrainKnobs(optim=optim))
    reckoned = state_bytes(optimizer, parameters)
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    states = [optimizer.state[p] for p in parameters.values()]
    found = sum(t.nbytes for s in states for k, t in s.items() if k != "step")
    assert found == reckoned


def test_embeddings_keep_moments_of_32_bits() -> None:
    pytest.importorskip("bitsandbytes")
    names = ("model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight")
    parameters = {name: torch.randn(64, 96, requires_grad=True) for name in names}
    optimizer = adamw(parameters, TrainKnobs(optim="adamw_8bit"))
    for p in parameters.values():
        p.grad = torch.ones_like(p)
    optimizer.step()
    kinds = [optimizer.state[p]["state1"].dtype for p in parameters.values()]
    assert kinds == [torch.float32, torch.uint8]


def test_a_step_that_is_held_changes_nothing() -> None:
    """The flag that the guards set is read by AdamW over float32 values as by torch's own."""
    p = torch.randn(8).bfloat16().requires_grad_()
    optimizer = MasterAdamW([{"params": [p], "ratio": 1.0}], lr=1.0, fused=True)
    before = p.detach().clone()
    p.grad = torch.full_like(p, math.nan)
    optimizer.found_inf = torch.ones(())  # type: ignore[attr-defined]
    optimizer.step()
    assert torch.equal(p, before) and int(optimizer.state[p]["step"]) == 0
    p.grad = torch.ones_like(p)
    optimizer.found_inf = torch.zeros(())  # type: ignore[attr-defined]
    optimizer.step()
    assert not torch.equal(p, before) and int(optimizer.state[p]["step"]) == 1
