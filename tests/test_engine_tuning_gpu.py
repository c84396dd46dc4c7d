"""What is trained, on a GPU: bf16 with float32 values in the optimizer, compiled layers, 8-bit moments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from swiftkit.config import TrainKnobs
from swiftkit.engine import Batch, Engine, FullSpec, LoraSpec
from swiftkit.methods.sft import loss
from swiftkit.train.optim import MASTER, adamw, clip_gradients, set_rate
from tests import tiny

pytestmark = pytest.mark.gpu
SHAPE = dict(head_dim=32, intermediate_size=128)
STEPS = 12


def losses(engine: Engine, knobs: TrainKnobs, *, rate: float = 2e-3) -> list[float]:
    """Of some steps on one batch."""
    batch = Batch.of(tiny.packed([60, 68]), device=engine.device)
    optimizer = adamw(engine.parameters, knobs)
    found = []
    for _ in range(STEPS):
        sums = engine.forward_backward([batch], loss, denominator=len(batch.targets))
        clip_gradients(engine.parameters.values(), engine.gradient_norm(), 1.0)
        set_rate(optimizer, rate)
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(sums["loss"]) / len(batch.targets))
    for parameter in engine.parameters.values():
        master = optimizer.state[parameter].get(MASTER)
        assert (master is None) == (parameter.dtype == torch.float32)
        assert master is None or torch.equal(parameter, master.bfloat16())
    return found


def load(folder: Path, device: str, **options: Any) -> Engine:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    return Engine.load(folder, **{"dtype": dtype, "device": torch.device(device), **options})


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_8bit"])
def test_a_whole_model_learns_as_on_a_cpu(optim: str, tmp_path: Path) -> None:
    if optim == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    tiny.make("llama", tmp_path, **SHAPE)
    knobs = TrainKnobs(optim=optim)
    found = losses(load(tmp_path, "cuda", full=FullSpec()), knobs)
    expected = losses(load(tmp_path, "cpu", full=FullSpec()), TrainKnobs())
    print(f"{optim}: {found[0]:.4f} to {found[-1]:.4f} in bf16, to {expected[-1]:.4f} in float32")
    assert found == pytest.approx(expected, rel=0.02)
    assert found[-1] < 0.8 * found[0]


@pytest.mark.parametrize(
    "spec",
    [
        LoraSpec(rank=4, dora=True),
        LoraSpec(rank=4, pissa=True),
        LoraSpec(rank=4, rslora=True, modules_to_save=("embed_tokens", "lm_head")),
        LoraSpec(rank=4, modules_to_save=("norm",)),
    ],
    ids=["dora", "pissa", "rslora-ends", "norm"],
)
def test_adapters_learn_as_on_a_cpu(spec: LoraSpec, tmp_path: Path) -> None:
    tiny.make("llama", tmp_path, **SHAPE)
    found = losses(load(tmp_path, "cuda", lora=spec), TrainKnobs())
    expected = losses(load(tmp_path, "cpu", lora=spec), TrainKnobs())
    print(f"{found[0]:.4f} to {found[-1]:.4f} in bf16, to {expected[-1]:.4f} in float32")
    assert found == pytest.approx(expected, rel=0.02)
    assert found[-1] < found[0]


@pytest.mark.parametrize("base", ["fp8", "nf4"])
def test_embedding_and_head_are_trained_over_a_quantized_base(base: Any, tmp_path: Path) -> None:
    tiny.make("llama", tmp_path, **SHAPE)
    spec = LoraSpec(rank=4, modules_to_save=("embed_tokens", "lm_head"))
    engine = load(tmp_path, "cuda", lora=spec, base=base)
    assert engine.layers == "fused"
    found = losses(engine, TrainKnobs())
    assert found[-1] < 0.9 * found[0]
