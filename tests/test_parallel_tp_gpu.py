"""Tensor parallelism over NCCL: two GPUs compute what one does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from swiftkit.engine import Batch, Engine, LoraSpec
from swiftkit.engine.fused.base import BaseKind
from swiftkit.methods.sft import loss
from tests import tiny
from tests.ranks import on_ranks

BASES: list[BaseKind] = ["plain", "fp8", "nf4"]
SIZES = dict(hidden_size=512, intermediate_size=1024, num_attention_heads=8, num_key_value_heads=4)


def step(folder: Path, parallel: bool) -> dict[str, tuple[float, float]]:
    """Loss and gradient norm over each base, on fused layers."""
    device = torch.device("cuda", dist.get_rank() if parallel else 0)
    torch.cuda.set_device(device)
    seen = {}
    for base in BASES:
        engine = Engine.load(
            folder, dtype=torch.bfloat16, device=device, lora=LoraSpec(rank=16), base=base, fused=True,
            tp=dist.group.WORLD if parallel else None,
        )  # fmt: skip
        drawn = {name: value.cpu().clone() for name, value in engine.whole_parameters().items()}
        tiny.randomise_adapter(drawn)
        engine.load_adapter({name: value * 0.1 for name, value in drawn.items()})
        batch = Batch.of(tiny.packed([64, 128, 64]), device=device)
        sums = engine.forward_backward([batch], loss, denominator=128)
        seen[base] = float(sums["loss"]), float(engine.gradient_norm())
    return seen


@pytest.mark.gpu
@pytest.mark.multigpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_equal_one(tmp_path: Path) -> None:
    tiny.make("llama", tmp_path / "model", head_dim=64, **SIZES)
    ranks = on_ranks(step, 2, tmp_path / "ranks", tmp_path / "model", True, backend="nccl")
    one = step(tmp_path / "model", False)
    assert ranks[0] == ranks[1]
    for base in BASES:
        assert ranks[0][base] == pytest.approx(one[base], rel=2e-2), base
