"""Compiled blocks: equal to eager, and nothing is compiled again once every kind of step was seen."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from swiftkit.data import collate
from swiftkit.engine import Batch, Engine, LoraSpec
from swiftkit.engine.compiled import compile_layers
from swiftkit.generate.decode import stream
from swiftkit.generate.sampling import Sampler
from swiftkit.methods.sft import loss
from tests import tiny

CPU = torch.device("cpu")
DOCUMENTS = [[13, 4, 22], [9, 30], [5, 5, 5, 5, 20], [40], [3, 37]]


@pytest.mark.compat
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "phi3"])
def test_no_recompile_after_the_first_step(family: str, tmp_path: Path) -> None:
    tiny.make(family, tmp_path)
    eager, compiled = (
        Engine.load(tmp_path, dtype=torch.float32, device=CPU, lora=LoraSpec(rank=4, alpha=8))
        for _ in range(2)
    )
    torch._dynamo.reset()
    counters.clear()
    compile_layers(compiled.model, backend="aot_eager")
    graphs = []
    for seed, lengths in enumerate(DOCUMENTS):
        packed = collate([tiny.documents(lengths, seed=seed)], pad_id=0, pad_to=48)
        batch = Batch.of(packed, device=CPU)
        sums = [engine.forward_backward([batch], loss, denominator=1) for engine in (eager, compiled)]
        torch.testing.assert_close(sums[1]["loss"], sums[0]["loss"], rtol=1e-6, atol=0)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] > 0
    assert set(graphs) == {graphs[0]}, f"graphs after each step: {graphs}"
    for name, parameter in eager.parameters.items():
        torch.testing.assert_close(compiled.parameters[name].grad, parameter.grad, rtol=1e-4, atol=1e-5)


def test_decoding_stays_eager(tmp_path: Path) -> None:
    """Rows of every length come by; compiled, each would cost a compilation."""
    tiny.make("qwen3", tmp_path)
    engine = Engine.load(tmp_path, dtype=torch.float32, device=CPU)
    torch._dynamo.reset()
    counters.clear()
    compile_layers(engine.model, backend="aot_eager")
    steps = stream(engine, [[11, 12, 13], [14]], max_new_tokens=4, stop_ids=(), sampler=Sampler())
    assert len(list(steps)) == 4
    assert counters["stats"]["unique_graphs"] == 0
