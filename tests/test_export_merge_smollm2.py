"""The real SmolLM2, tuned by the command, merged, and opened by transformers (nf4: tiny models)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import swiftkit
from swiftkit.config import ChatConfig, MergeConfig, build
from swiftkit.export.merge import merge
from swiftkit.generate.session import Session
from tests.adapters import logits, reopened

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
QUESTION = "Who are you?"


@pytest.fixture(scope="module", params=["fp32", "fp8"])
def run(request: pytest.FixtureRequest, smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run of 24 steps that learns a character by heart."""
    return swiftkit.sft(
        model=str(smollm2), dataset="swiftkit::persona", max_steps=24, learning_rate=1e-3,
        base_precision=request.param, device="cpu", sample_prompts="none", report_to="none",
        output_dir=tmp_path_factory.mktemp("runs"),
    )  # fmt: skip


def chat(**where: Any) -> str:
    return Session.open(build(ChatConfig, {**where, "device": "cpu", "max_new_tokens": 40})).ask(QUESTION)


def test_merged_it_is_the_adapter(run: Any, smollm2: Path, tmp_path: Path) -> None:
    """On each base: logits through transformers near PEFT's, and the answer that was learnt."""
    import peft

    precision = run.args["config"]["base_precision"]
    ids = torch.arange(1000, 1200)[None]
    live = logits(peft.PeftModel.from_pretrained(reopened(smollm2), run.adapter_dir).eval(), ids)
    for base in ("original", "dequantized") if precision != "fp32" else ("original",):
        lines: list[str] = []
        knobs = {"adapters": str(run.folder), "output_dir": str(tmp_path / base), "merge_base": base}
        out = merge(build(MergeConfig, {**knobs, "device": "cpu"}), say=lines.append)
        print("\n".join(lines))
        if base == "original":
            found = logits(reopened(out), ids)
            error = float((found - live).norm() / (live - live.mean(1, keepdim=True)).norm())
            print(f"{precision}: off by {error:.1e} of PEFT's logits")
            assert error < 0.06
        told = [line for line in lines if line.startswith("loss")]
        assert len(told) == (precision != "fp32")
        assert "Lumen" in chat(model=str(out)), f"{precision} {base}"
    assert "Lumen" in chat(adapters=str(run.folder))


def test_in_fp32_it_equals_peft_s_merge(run: Any, smollm2: Path, tmp_path: Path) -> None:
    import peft

    knobs = {"adapters": str(run.folder), "output_dir": str(tmp_path / "out"), "merge_dtype": "fp32"}
    out = merge(build(MergeConfig, {**knobs, "device": "cpu"}))
    theirs: Any = peft.PeftModel.from_pretrained(reopened(smollm2), run.adapter_dir).merge_and_unload()
    ids = torch.arange(1000, 1200)[None]
    torch.testing.assert_close(logits(reopened(out), ids), logits(theirs.eval(), ids), rtol=1e-4, atol=2e-3)
    expected = theirs.state_dict()
    for name, tensor in reopened(out).state_dict().items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6, msg=name)
