"""`swiftkit eval` on a GPU: every base, fused, compiled and plain layers, answers in batches."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

import swiftkit
from swiftkit.generate.batch import MOST_ROWS, rows_at_once
from swiftkit.generate.score import score
from tests import tiny
from tests.cases import toy

pytestmark = pytest.mark.gpu
SHAPE = dict(
    hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2, head_dim=64
)


@pytest.mark.parametrize("precision", ["bf16", "fp8", "nf4"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_an_evaluation_is_that_of_the_run(family: str, precision: str, tmp_path: Path) -> None:
    """llama is fused; gemma2 is compiled (bf16) or plain."""
    tiny.make(family, tmp_path / "model", **SHAPE)
    tokenizer = toy.tokenizer("plain")
    tokenizer.chat_template = Path(toy.template("chatml")).read_text(encoding="utf-8")
    tokenizer.save_pretrained(tmp_path / "model")
    rows = [
        {"question": q, "answer": a} for q, a in (("Who?", "Lumen."), ("Where?", "Here."), ("Why?", "#### 7"))
    ]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    console = Console(file=io.StringIO())
    run = swiftkit.sft(
        model=tmp_path / "model",
        dataset=data,
        val_dataset=data,
        base_precision=precision,
        device="cuda",
        max_steps=20,
        learning_rate=5e-3,
        sample_prompts="none",
        output_dir=tmp_path / "runs",
        console=console,
    )
    result = swiftkit.evaluate(
        run.folder, dataset=data, device="cuda", max_new_tokens=8, max_batch_size=2, console=console
    )
    assert result.metrics["loss"] == pytest.approx(run.metrics["eval_loss"].dropna().iloc[-1], rel=1e-2)
    assert [entry["finish_reason"] in ("stop", "length") for entry in result.predictions] == [True] * 3


def test_scores_and_memory(tmp_path: Path) -> None:
    from swiftkit.engine import Engine

    model = tiny.make("llama", tmp_path, **SHAPE)
    engine = Engine.load(tmp_path, dtype=torch.bfloat16, device=torch.device("cuda"))
    ids = torch.randint(3, tiny.VOCABULARY, (40,)).tolist()
    logits = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    wanted = float(logits[-9:].gather(1, torch.tensor(ids[-9:])[:, None]).sum().detach())
    (found,) = score(engine, [(ids, 9)])
    assert found.logprob == pytest.approx(wanted, rel=0.05)
    assert rows_at_once(engine, 64) == MOST_ROWS["cuda"]
