"""The real SmolLM2 on GSM8K: answers in batches are those of one at a time, and of transformers."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from rich.console import Console

import swiftkit


@pytest.mark.slow
def test_batched_answers_of_the_real_model(smollm2: Path, shared_data: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    knobs = dict(
        metrics="exact_match",
        dataset=f"{shared_data / 'gsm8k' / 'test.jsonl'}#3",
        base_precision="fp32",
        device="cpu",
        max_new_tokens=12,
    )
    console = Console(file=io.StringIO())
    alone = swiftkit.evaluate(smollm2, max_batch_size=1, console=console, **knobs)
    several = swiftkit.evaluate(smollm2, max_batch_size=2, console=console, **knobs)
    assert several.predictions == alone.predictions and len(alone.predictions) == 3

    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    for entry in alone.predictions:
        ids = tokenizer(entry["prompt"], add_special_tokens=False, return_tensors="pt")
        whole = model.generate(**ids, do_sample=False, max_new_tokens=12)
        text = tokenizer.decode(whole[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
        assert text == entry["prediction"]
