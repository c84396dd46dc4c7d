"""The loop on a GPU: nothing waits for the device, a held step changes nothing, copies are of their step."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from swiftkit.config import TrainKnobs
from swiftkit.engine import Batch, Engine, Head, LoraSpec, Sums
from swiftkit.methods.sft import loss
from swiftkit.train.checkpoint import read_snapshot
from swiftkit.train.guards import StepGuard
from swiftkit.train.loop import step
from swiftkit.train.optim import adamw
from swiftkit.train.steps import microbatches_of_step
from tests import tiny, training
from tests.training import keeper_of, losses, persona, saved, train

pytestmark = pytest.mark.gpu
SHAPE = dict(
    hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2, head_dim=64
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    tiny.make("llama", made, **SHAPE)
    return made


def engine_of(folder: Path, **spec: Any) -> Engine:
    lora = LoraSpec(**{"rank": 4, "alpha": 8, **spec})
    return Engine.load(folder, dtype=torch.bfloat16, device=torch.device("cuda"), lora=lora, tokens=1024)


def test_a_step_waits_for_nothing(folder: Path) -> None:
    """Forward, backward, guard and update are only queued."""
    engine, data = engine_of(folder), persona()
    knobs = TrainKnobs(global_batch_size=2, per_device_train_batch_size=1)
    optimizer, plan = adamw(engine.parameters, knobs), training.plan_of(data, knobs)
    guard = StepGuard(optimizer, device=engine.device, spike_factor=3.0)
    for index in range(14):
        packed = microbatches_of_step(data, plan, step=index, seed=1, pad_id=0)
        batches = [Batch.of(p, device=engine.device) for p in packed]
        trained = sum(p.trained_tokens for p in packed)
        torch.cuda.synchronize()
        guard.looking = index < 2
        torch.cuda.set_sync_debug_mode("error" if index > 1 else "default")  # kernels are built in the first
        try:
            step(engine, batches, loss, optimizer, denominator=trained, rate=1e-3, max_norm=1.0, guard=guard)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        if guard.looking:
            guard.check(step=index + 1)
        assert not bool(guard.held)


def test_a_held_step_changes_nothing(folder: Path, tmp_path: Path) -> None:
    engine, run = engine_of(folder), tmp_path / "run"
    calls = iter(range(1, 99))

    def spoilt(head: Head, hidden: torch.Tensor, batch: Batch) -> Sums:
        factor = math.nan if next(calls) in (2, 3) else 1.0
        return {name: value * factor for name, value in loss(head, hidden, batch).items()}

    keeper = keeper_of(run, engine)
    train(
        engine, persona(), run, loss=spoilt, global_batch_size=1, max_steps=4, save_steps=1, logging_steps=4,
        on_bad_loss="skip", keeper=keeper,
    )  # fmt: skip
    one, two, three, four = (read_snapshot(run / f"checkpoint-{n}") for n in (1, 2, 3, 4))
    for other in (two, three):
        moments = [name for name in one.tensors if name.startswith("optimizer/")]
        assert all(torch.equal(one.tensors[name], other.tensors[name]) for name in moments)
        assert all(torch.equal(one.model[name], other.model[name]) for name in one.model)
    assert not all(torch.equal(one.model[name], four.model[name]) for name in one.model)


def test_copies_are_of_their_own_step_and_a_resume_goes_on(folder: Path, tmp_path: Path) -> None:
    """Each checkpoint is queued behind its step and in front of the next; dropout goes on where it was."""
    data = persona()
    knobs: dict[str, Any] = dict(global_batch_size=1, max_steps=8, save_steps=1)
    engine, run = engine_of(folder, dropout=0.1), tmp_path / "run"
    whole = losses(train(engine, data, run, keeper=keeper_of(run, engine), **knobs))
    assert saved(run) == list(range(1, 9))
    last = read_snapshot(run / "checkpoint-8")
    assert all(torch.equal(last.model[name], p.detach().cpu()) for name, p in engine.parameters.items())
    for number in (6, 7, 8):
        for path in (run / f"checkpoint-{number}").iterdir():
            path.unlink()
        (run / f"checkpoint-{number}").rmdir()
    again = engine_of(folder, dropout=0.1)
    keeper = keeper_of(run, again, resumed=run / "checkpoint-5")
    found = losses(train(again, data, run, keeper=keeper, **knobs))
    apart = max(abs(one - other) for one, other in zip(whole, found, strict=True))
    print(f"greatest difference of a loss after the resume: {apart:.1e}")
    assert found == pytest.approx(whole, rel=1e-3)
