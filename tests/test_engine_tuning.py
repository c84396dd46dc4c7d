"""Training every weight: transformers' own gradients as oracle, and what is saved transformers loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from swiftkit.config import TrainKnobs
from swiftkit.engine import Engine, FullSpec
from swiftkit.errors import UserError
from swiftkit.formats.full import save_model
from swiftkit.formats.weights import INDEX
from swiftkit.methods.sft import loss
from swiftkit.train.artifact import Artifact, read_model
from swiftkit.train.optim import MASTER, adamw, clip_gradients, set_rate
from tests import tiny

CPU = torch.device("cpu")
STEPS = 5


def load(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Engine:
    return Engine.load(folder, dtype=dtype, device=CPU, full=FullSpec(), **options)


def reference(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)


@pytest.mark.compat
@pytest.mark.parametrize("family", sorted(tiny.FAMILIES))
def test_every_weight_has_transformers_gradient(family: str, tmp_path: Path) -> None:
    """Norms, biases, embedding and head too; a tied head and its embedding are one."""
    tiny.make(family, tmp_path)
    engine, theirs = load(tmp_path), reference(tmp_path)
    engine.head.chunk = 7
    oracle = dict(theirs.named_parameters())
    assert engine.parameters.keys() == oracle.keys()
    batch = tiny.row(tiny.documents([23]))
    sums = engine.forward_backward([batch], loss, denominator=3.0)
    scores = theirs(input_ids=batch.input_ids[None], use_cache=False).logits[0]
    other = torch.nn.functional.cross_entropy(scores[batch.positions], batch.targets, reduction="sum")
    (other / 3.0).backward()
    torch.testing.assert_close(sums["loss"].float(), other.detach(), rtol=1e-5, atol=0)
    largest = max(float(p.grad.norm()) for p in oracle.values())
    for name, parameter in engine.parameters.items():
        expected = oracle[name].grad
        assert parameter.grad is not None
        # Where a bias changes nothing (it shifts all scores alike) both gradients are rounding.
        error = (parameter.grad - expected).norm() / max(float(expected.norm()), 1e-4 * largest)
        assert error < 5e-5, f"{name}: relative error {error:.1e}"


@pytest.mark.compat
@pytest.mark.parametrize("family", ["qwen2", "gemma2", "llama-tied-biased"])
def test_some_steps_equal_torch_s_own(family: str, tmp_path: Path) -> None:
    """Losses and weights over several steps of AdamW with clipping, cut into micro-batches."""
    tiny.make(family, tmp_path)
    engine, theirs = load(tmp_path), reference(tmp_path)
    knobs = TrainKnobs(learning_rate=1e-3, weight_decay=0.1)
    own = adamw(engine.parameters, knobs)
    matrices, others = ([p for p in theirs.parameters() if (p.dim() > 1) == kind] for kind in (True, False))
    groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    other = torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.1)
    batches = [tiny.row(tiny.documents([n], seed=n)) for n in (11, 17)]
    trained = sum(len(batch.targets) for batch in batches)
    for _ in range(STEPS):
        sums = engine.forward_backward(batches, loss, denominator=trained)
        clip_gradients(engine.parameters.values(), engine.gradient_norm(), 1.0)
        own.step()
        own.zero_grad()
        total = torch.zeros(())
        for batch in batches:
            scores = theirs(input_ids=batch.input_ids[None], use_cache=False).logits[0]
            total = total + torch.nn.functional.cross_entropy(
                scores[batch.positions], batch.targets, reduction="sum"
            )
        (total / trained).backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        other.step()
        other.zero_grad()
        torch.testing.assert_close(sums["loss"].float(), total.detach(), rtol=1e-5, atol=0)
    for name, expected in theirs.named_parameters():
        error = (engine.parameters[name] - expected).norm() / expected.norm()
        assert error < 2e-5, f"{name}: relative error {error:.1e}"


@pytest.mark.compat
@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_saved_transformers_loads(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Also in several files; and it is a model for us."""
    base, out = tmp_path / "base", tmp_path / "out"
    tiny.make(family, base)
    engine = load(base, dtype)
    with torch.no_grad():
        for parameter in engine.parameters.values():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    out.mkdir()
    save_model(out, engine.parameters, base=base, shard_bytes=60_000)
    assert (out / INDEX).is_file() and len(list(out.glob("model-*.safetensors"))) > 2
    theirs = AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager")
    assert theirs.dtype == dtype
    again = Engine.load(out, dtype=dtype, device=CPU)
    batch = tiny.row(tiny.documents([19]))
    engine.model.eval()
    with torch.no_grad():
        found = engine.head.logits(engine.hidden(batch))
        assert torch.equal(again.head.logits(again.hidden(batch)), found)
        expected = theirs.eval()(input_ids=batch.input_ids[None], use_cache=False).logits[0]
    bounds = dict(rtol=1e-5, atol=2e-5) if dtype == torch.float32 else dict(rtol=0.1, atol=0.1)
    torch.testing.assert_close(found, expected.float(), **bounds)
    for name, parameter in theirs.named_parameters():
        assert torch.equal(parameter, engine.parameters[name]), name


def test_the_checkpoint_reads_back_as_it_was(tmp_path: Path) -> None:
    base, out = tmp_path / "base", tmp_path / "out"
    tiny.make("gemma2", base)
    engine = load(base, torch.bfloat16)
    out.mkdir()
    artifact = Artifact(FullSpec(), "base", tuple(engine.linear_names), base=base, tied=engine.tied)
    artifact.write(out, engine.parameters)
    written = read_model(out)
    assert written.keys() == engine.parameters.keys()
    assert all(torch.equal(written[name], p) for name, p in engine.parameters.items())
    assert {path.stat().st_mode for path in out.iterdir()} == {(out / "config.json").stat().st_mode}


def test_a_larger_vocabulary_is_in_the_config(tmp_path: Path) -> None:
    base, out = tmp_path / "base", tmp_path / "out"
    tiny.make("llama", base)
    size = tiny.VOCABULARY + 3
    rows = {tiny.VOCABULARY + n: (n, n + 1) for n in range(3)}
    engine = Engine.load(base, dtype=torch.float32, device=CPU, full=FullSpec(size), new_rows=rows)
    out.mkdir()
    Artifact(FullSpec(size), "base", (), base=base).write(out, engine.parameters)
    assert json.loads((out / "config.json").read_text())["vocab_size"] == size
    theirs = reference(out)
    assert theirs.get_input_embeddings().weight.shape[0] == size
    assert torch.equal(theirs.lm_head.weight, engine.parameters["lm_head.weight"])


def test_a_file_with_fewer_rows_than_its_config_is_still_refused(tmp_path: Path) -> None:
    tiny.make("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": tiny.VOCABULARY + 1}))
    with pytest.raises(UserError, match=r"embed_tokens\.weight has shape \(272, 64\), config\.json asks"):
        Engine.load(tmp_path, dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("base", ["fp8", "nf4"])
def test_a_quantized_base_is_refused(base: Any, tmp_path: Path) -> None:
    tiny.make("llama", tmp_path)
    with pytest.raises(UserError, match=f"--tuner_type full and --base_precision {base}: "):
        load(tmp_path, base=base)


# ---- bf16 ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_8bit"])
def test_small_steps_are_not_lost_in_bf16(optim: str, tmp_path: Path) -> None:
    """At 1e-5 nearly every update is less than half of bf16's spacing: without a float32 value it is lost."""
    if optim == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    tiny.make("llama", tmp_path)
    batch = tiny.row(tiny.documents([40]))
    knobs = TrainKnobs(optim=optim)
    engine, exact = load(tmp_path, torch.bfloat16), load(tmp_path)
    with torch.no_grad():
        for name, parameter in exact.parameters.items():
            parameter.copy_(engine.parameters[name])  # both start from values that bf16 can hold
    first = {name: p.detach().clone() for name, p in engine.parameters.items()}
    lossy = load(tmp_path, torch.bfloat16)
    runs = {
        "master": (engine, adamw(engine.parameters, knobs)),
        "exact": (exact, adamw(exact.parameters, knobs)),
        "lossy": (lossy, torch.optim.AdamW(lossy.parameters.values(), lr=1e-5, weight_decay=0.0)),
    }
    for model, optimizer in runs.values():
        for _ in range(20):
            model.forward_backward([batch], loss, denominator=20.0)
            if model is not lossy:
                set_rate(optimizer, 1e-5)
            optimizer.step()
            optimizer.zero_grad()
    name = "model.layers.1.mlp.up_proj.weight"
    master = runs["master"][1].state[engine.parameters[name]][MASTER]
    assert torch.equal(engine.parameters[name], master.bfloat16())
    ways = {"master": master, "exact": exact.parameters[name], "lossy": lossy.parameters[name]}
    moved = {key: float((value.detach().float() - first[name].float()).norm()) for key, value in ways.items()}
    kept, left = moved["master"] / moved["exact"], moved["lossy"] / moved["exact"]
    print(f"of float32's way: {kept:.3f} with a float32 value, {left:.3f} in bf16 alone")
    assert kept == pytest.approx(1.0, abs=0.05) and left < 0.5
