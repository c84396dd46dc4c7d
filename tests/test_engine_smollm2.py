"""The real SmolLM2 on real text: our engine against transformers, packed against unpacked."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from swiftkit.data import Document, Origin
from swiftkit.data.tokenizer import load_tokenizer, prompt_ids, stop_ids
from swiftkit.engine import Engine, LoraSpec
from swiftkit.engine.build import build_model
from swiftkit.generate.session import answer_all
from swiftkit.methods.sft import loss
from tests import tiny

pytestmark = [pytest.mark.slow, pytest.mark.compat]
SPEC = LoraSpec(rank=8, alpha=16)
PROSE = [
    "The river had been rising since the morning, and by noon the lower road was under water. Nobody in the "
    "village was much surprised; it came every spring, stayed for a week, and left the fields darker and "
    "better than it had found them.",
    "A compiler reads a program in one language and writes it in another. Most of its work is to prove that "
    "a change which makes the program faster does not change what the program means.",
    "Bread needs four things: flour, water, salt, and time. The last is the one that people leave out.",
]


@pytest.fixture(scope="module")
def engine(smollm2: Path) -> Engine:
    made = Engine(build_model(smollm2, dtype=torch.float32, device=torch.device("cpu"), lora=SPEC))
    made.model.eval()
    return made


@pytest.fixture(scope="module")
def texts(smollm2: Path) -> list[Document]:
    tokenizer = load_tokenizer(smollm2)
    ids = [np.array(tokenizer(text)["input_ids"], np.int32) for text in PROSE]
    return [Document(i, np.ones(len(i), bool), Origin("prose", line)) for line, i in enumerate(ids, 1)]


def test_logits_equal_transformers(smollm2: Path, engine: Engine, texts: list[Document]) -> None:
    reference = AutoModelForCausalLM.from_pretrained(
        smollm2, dtype=torch.float32, attn_implementation="eager"
    )
    for document in texts:
        batch = tiny.row([document])
        with torch.no_grad():
            ours = engine.head.logits(engine.hidden(batch))
            theirs = reference(input_ids=batch.input_ids[None], use_cache=False).logits[0]
        error = (ours - theirs).abs().max()
        print(
            f"{len(document)} tokens: largest difference {error:.1e} of logits up to {theirs.abs().max():.0f}"
        )
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-4)


def test_packed_equals_unpacked(engine: Engine, texts: list[Document]) -> None:
    tiny.randomise_adapter(engine.parameters)
    targets = sum(document.targets for document in texts)
    losses, gradients = [], []
    for batches in ([tiny.row(texts)], [tiny.row([document]) for document in texts]):
        losses.append(engine.forward_backward(batches, loss, denominator=targets)["loss"])
        gradients.append({name: p.grad for name, p in engine.parameters.items()})
        for parameter in engine.parameters.values():
            parameter.grad = None
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=0)
    worst = max(
        float((gradients[0][name] - other).norm() / other.norm()) for name, other in gradients[1].items()
    )
    print(f"worst relative difference of an adapter's gradient: {worst:.1e}")
    assert worst < 1e-3
    with torch.no_grad():
        for name, parameter in engine.parameters.items():
            if name.endswith("lora_B"):
                parameter.zero_()


def test_perplexity_of_english_prose(smollm2: Path, engine: Engine, shared_data: Path) -> None:
    """The weights are the right ones, and in place: it was 17.5 on these tokens."""
    text = (shared_data / "wikitext2" / "test.txt").read_text(encoding="utf-8")[:20_000]
    ids = np.array(load_tokenizer(smollm2)(text)["input_ids"][:4096], np.int32).reshape(2, 2048)
    batches = [tiny.row([Document(row, np.ones(2048, bool), Origin("prose", 1))]) for row in ids]
    mean = engine.evaluate(batches, loss)["loss"] / (2 * 2047)
    engine.model.eval()
    print(f"perplexity {float(mean.exp()):.2f}")
    assert 16.5 < mean.exp() < 18.5


def test_it_knows_the_capital_of_france_and_stops(smollm2: Path, engine: Engine) -> None:
    tokenizer = load_tokenizer(smollm2)
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    assert tokenizer.decode(prompt_ids(tokenizer, asked)).endswith("<|im_start|>assistant\n")
    stops = stop_ids(tokenizer, smollm2)
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in stops
    (answer,) = answer_all(engine, tokenizer, [asked], max_new_tokens=40, stops=stops)
    assert "Paris" in answer and len(tokenizer(answer)["input_ids"]) < 40
