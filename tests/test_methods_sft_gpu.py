"""Whole runs on a GPU: every base, fused and compiled layers, from rows to answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor

from swiftkit.config import ChatConfig, SftConfig
from swiftkit.data import collate
from swiftkit.engine import Batch, Engine, LoraSpec
from swiftkit.generate.session import Session
from swiftkit.methods import sft
from swiftkit.methods.sft import loss
from tests import tiny
from tests.cases import toy

pytestmark = pytest.mark.gpu
SHAPE = dict(
    hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2, head_dim=64
)


@pytest.mark.parametrize("precision", ["bf16", "fp8", "nf4"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2"])
def test_a_run_learns_its_rows(family: str, precision: str, tmp_path: Path) -> None:
    """llama and qwen2 are fused; qwen3 and gemma2 are compiled (bf16) or plain."""
    tiny.make(family, tmp_path / "model", **SHAPE)
    tokenizer = toy.tokenizer("plain")
    tokenizer.chat_template = Path(toy.template("chatml")).read_text(encoding="utf-8")
    tokenizer.save_pretrained(tmp_path / "model")
    rows = [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}
        for q, a in (("Who?", "Lumen."), ("Where?", "Gull Rock."), ("Why?", "For the ships that pass."))
    ]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    config = SftConfig(
        model=str(tmp_path / "model"),
        dataset=str(data),
        val_dataset=str(data),
        base_precision=precision,
        device="cuda",
        max_steps=60,
        learning_rate=5e-3,
        output_dir=str(tmp_path / "runs"),
    )
    run = sft.run(config, Console(quiet=True))
    losses = run.metrics["loss"].dropna().tolist()
    assert losses[-1] < 0.5 * losses[0]
    judged = run.metrics["eval_loss"].dropna().tolist()
    assert judged[-1] < 0.5 * judged[0]
    answer = Session.open(ChatConfig(adapters=str(run.adapter_dir), device="cuda", max_new_tokens=8)).ask(
        "Who?"
    )
    assert isinstance(answer, str)
    assert answer == run.chat(device="cuda", max_new_tokens=8).ask("Who?")


def test_fused_layers_err_no_more_than_plain_ones_on_the_gpu(tmp_path: Path) -> None:
    """bf16 against float32, documents of unlike and of equal lengths, padding."""
    tiny.make("llama", tmp_path, **SHAPE)
    device, spec = torch.device("cuda"), LoraSpec(rank=8, alpha=8)
    fused, plain = (
        Engine.load(tmp_path, dtype=torch.bfloat16, device=device, lora=spec, fused=fused)
        for fused in (True, False)
    )
    exact = Engine.load(tmp_path, dtype=torch.float32, device=device, lora=spec, fused=False)
    for lengths in ([40, 7, 64, 9], [64, 64]):
        batch = Batch.of(collate([tiny.documents(lengths, seed=3)], pad_id=0, pad_to=128), device=device)
        (ours, of_ours), (theirs, of_theirs), (true, truth) = (
            trained(engine, batch) for engine in (fused, plain, exact)
        )
        assert ours == pytest.approx(true, rel=0.01) and theirs == pytest.approx(true, rel=0.01)
        assert (of_ours - truth).norm() < 1.4 * (of_theirs - truth).norm()


def trained(engine: Engine, batch: Batch) -> tuple[float, Tensor]:
    """Loss and all gradients of one batch, with the same nonzero adapter."""
    with torch.no_grad():
        for parameter in engine.parameters.values():
            values = torch.sin(torch.arange(parameter.numel(), device=parameter.device)) * 0.05
            parameter.copy_(values.view_as(parameter))
            parameter.grad = None
    total = float(engine.forward_backward([batch], loss, denominator=50)["loss"])
    return total, torch.cat([p.grad.flatten() for p in engine.parameters.values() if p.grad is not None])
