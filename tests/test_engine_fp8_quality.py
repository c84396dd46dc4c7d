"""FP8 beside the unquantized base: real model, real text, equal steps."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from swiftkit.config import SftConfig
from swiftkit.methods import sft


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_evaluation_loss_after_equal_steps(smollm2: Path, shared_data: Path, tmp_path: Path) -> None:
    """Within 1.5 % on GSM8K, which is no more than today's rounding makes (docs/engine.md has the parts).

    The aim is 0.5 %. Eight steps amplify the order of a sum: 0.3 % and 0.7 % were seen for the same products.
    """
    gsm8k = shared_data / "gsm8k"
    losses = {}
    for precision in ("fp32", "fp8"):
        config = SftConfig(
            model=str(smollm2),
            dataset=[f"{gsm8k / 'train.jsonl'}#64"],
            val_dataset=[f"{gsm8k / 'test.jsonl'}#12"],
            base_precision=precision,
            device="cpu",
            max_length=512,
            max_steps=8,
            global_batch_size=2,
            learning_rate=5e-4,
            sample_prompts="none",
            output_dir=str(tmp_path / precision),
        )
        run = sft.run(config, Console(quiet=True))
        losses[precision] = run.metrics["eval_loss"].dropna().tolist()
    (first, last), (first_fp8, last_fp8) = losses["fp32"], losses["fp8"]
    print(f"fp32 {first:.4f} to {last:.4f}, fp8 {first_fp8:.4f} to {last_fp8:.4f}")
    assert last < 0.9 * first
    assert last_fp8 == pytest.approx(last, rel=0.015)
