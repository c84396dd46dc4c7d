"""Whole quantizations of tiny models: what is written is what was judged, in every format."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import swiftkit
from swiftkit.config import QuantizeConfig, build
from swiftkit.engine.build import describe
from swiftkit.errors import UserError
from swiftkit.export.merge import merge
from swiftkit.export.quantize import quantize
from swiftkit.export.weights import MergedWeights
from swiftkit.formats.older import with_older_rope
from swiftkit.formats.peft import LoraSpec
from swiftkit.formats.quantized import dequantized_copy
from swiftkit.formats.shards import StoredWeights
from swiftkit.formats.weights import Weights
from swiftkit.quantize.report import LinearError, Report, judge
from swiftkit.quantize.stream import StreamedModel
from swiftkit.quantize.texts import Texts, prepare_texts
from tests import tiny
from tests.adapters import make_base, make_checkpoint, reopened
from tests.cases import toy

WORDS = ["the", "harbour", "froze", "twice", "that", "winter", "boats", "were", "pulled", "up", "ropes"]
LENGTH = 64


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Some 3,000 tokens of bytes."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(len(WORDS), (600,), generator=generator).tolist()
    path = tmp_path / "text.txt"
    path.write_text(" ".join(WORDS[word] for word in drawn), encoding="utf-8")
    return path


def quantized(base: Path, out: Path, text: Path, lines: list[str], **knobs: Any) -> Path:
    given = {"checkpoint": str(base), "output_dir": str(out), "dataset": str(text), "group_size": 32,
             "max_length": LENGTH, "eval_windows": 4}  # fmt: skip
    return quantize(build(QuantizeConfig, {**given, **knobs}), say=lines.append)


def texts_of(text: Path, *, calibrates: bool = True) -> Texts:
    """As `quantized` draws them."""
    return prepare_texts(
        dataset=[str(text)], val_dataset=[], tokenizer=toy.tokenizer(), vocabulary=tiny.VOCABULARY,
        max_length=LENGTH, calibration_windows=256, eval_windows=4, calibrates=calibrates, seed=42,
        settings={"columns": {}, "system": None},
    )  # fmt: skip


@torch.no_grad()
def perplexity(model: Any, texts: Texts) -> float:
    """What transformers says of the judged windows."""
    total, tokens = 0.0, 0
    for batch in texts.judged:
        assert len(batch.cu_seqlens) == 2  # one document
        ids = torch.from_numpy(batch.input_ids)
        logits = model(input_ids=ids[None], use_cache=False).logits[0].float()
        total += float(F.cross_entropy(logits[:-1], ids[1:], reduction="sum"))
        tokens += len(ids) - 1
    return math.exp(total / tokens)


FORMS = [
    ("gptq", "gptq", 3), ("gptq", "gptq", 4), ("gptq", "gptq_v2", 4), ("gptq", "gptq", 8), ("gptq", "awq", 4),
    ("gptq", "compressed-tensors", 4), ("awq", "awq", 4), ("awq", "gptq", 4),
    ("awq", "compressed-tensors", 8), ("rtn", "compressed-tensors", 4), ("rtn", "gptq", 4),
]  # fmt: skip


@pytest.mark.parametrize(("method", "form", "bits"), FORMS)
def test_what_is_written_is_what_was_judged(
    method: str, form: str, bits: int, tmp_path: Path, text: Path, lines: list[str]
) -> None:
    make_base(tmp_path / "base", dtype=torch.bfloat16)
    base = reopened(tmp_path / "base")
    out = quantized(tmp_path / "base", tmp_path / "out", text, lines, method=method, format=form, bits=bits)
    report = json.loads((out / "quantize_report.json").read_text())
    dequantized_copy(out, tmp_path / "plain")
    texts = texts_of(text, calibrates=method != "rtn")
    quality = report["quality"]
    assert quality["perplexity_before"] == pytest.approx(perplexity(base, texts), rel=1e-4)
    plain = perplexity(reopened(tmp_path / "plain"), texts)
    assert quality["perplexity_after"] == pytest.approx(plain, rel=1e-4)
    assert quality["held_out"] and quality["tokens"] == sum(batch.tokens - 1 for batch in texts.judged)
    assert len(report["linears"]) == 21 and len(report["drift"]) == 3
    assert all(one["error"] <= one["rounding"] * (1 + 1e-4) for one in report["linears"] if method == "gptq")
    assert report["size"]["after"] == sum(t.nbytes for t in StoredWeights(out).tensors.values())
    written = json.loads((out / "config.json").read_text())["quantization_config"]
    assert written["quant_method"] == ("gptq" if form.startswith("gptq") else form)
    assert (out / "quantize_config.json").exists() == (form != "compressed-tensors")
    assert (out / "tokenizer.json").is_file() and (out / "generation_config.json").is_file()
    assert any(line.startswith("quality   perplexity") for line in lines)


def test_fp8_holds_weights_by_channel_and_judges_with_inputs_in_fp8(
    tmp_path: Path, text: Path, lines: list[str]
) -> None:
    base = make_base(tmp_path / "base", dtype=torch.bfloat16)
    out = quantized(tmp_path / "base", tmp_path / "out", text, lines, method="fp8")
    weights, name = Weights(out), "model.layers.0.mlp.down_proj.weight"
    data, scale = weights.read(name), weights.read(f"{name}_scale")
    assert data.dtype == torch.float8_e4m3fn and scale.dtype == torch.bfloat16 and scale.shape == (64, 1)
    whole = base.get_parameter(name)
    assert float((data.float() * scale.float() - whole).norm() / whole.norm()) < 0.04
    report = json.loads((out / "quantize_report.json").read_text())
    dequantized_copy(out, tmp_path / "plain")
    weights_alone = perplexity(reopened(tmp_path / "plain"), texts_of(text, calibrates=False))
    assert report["quality"]["perplexity_after"] != pytest.approx(weights_alone, rel=1e-7)  # inputs cost too
    assert report["quality"]["perplexity_after"] == pytest.approx(weights_alone, rel=0.05)


@pytest.mark.compat
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_layer_by_layer_equals_the_whole_model(family: str, tmp_path: Path, text: Path) -> None:
    make_base(tmp_path / "base", family)
    description, device = describe(tmp_path / "base"), torch.device("cpu")
    source = MergedWeights(
        StoredWeights(tmp_path / "base"), description=description, spec=LoraSpec(), tensors={}, device=device
    )
    stream = StreamedModel(source, description=description, device=device, dtype=torch.float32)
    texts = texts_of(text)
    samples = stream.begin(texts.judged)
    for index in range(len(stream.layers)):
        stream.load(index)
        stream.run(index, samples, keep=True)
        stream.free(index)
        assert all(parameter.is_meta for parameter in stream.layers[index].parameters())
    found = judge(stream, samples, samples)
    whole = perplexity(reopened(tmp_path / "base"), texts)
    assert found["perplexity_before"] == pytest.approx(whole, rel=1e-4)
    assert found["top1_agreement"] == 1.0


@pytest.mark.parametrize("family", ["gemma2", "phi3", "qwen2", "olmo2"])
@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_other_families(family: str, method: str, tmp_path: Path, text: Path, lines: list[str]) -> None:
    make_base(tmp_path / "base", family, dtype=torch.bfloat16)
    out = quantized(tmp_path / "base", tmp_path / "out", text, lines, method=method)
    dequantized_copy(out, tmp_path / "plain")
    after = json.loads((out / "quantize_report.json").read_text())["quality"]["perplexity_after"]
    assert after == pytest.approx(perplexity(reopened(tmp_path / "plain"), texts_of(text)), rel=1e-3)


def test_an_adapter_is_merged_on_the_way(tmp_path: Path, text: Path, lines: list[str]) -> None:
    pytest.importorskip("peft")
    make_base(tmp_path / "base")
    make_checkpoint(tmp_path / "checkpoint", tmp_path / "base", args={})
    from swiftkit.config import MergeConfig

    asked = {"adapters": str(tmp_path / "checkpoint"), "output_dir": str(tmp_path / "merged")}
    merge(build(MergeConfig, asked), say=lines.append)
    one = quantized(tmp_path / "checkpoint", tmp_path / "one", text, lines)
    two = quantized(tmp_path / "merged", tmp_path / "two", text, lines)
    assert (one / "model.safetensors").read_bytes() == (two / "model.safetensors").read_bytes()


@pytest.mark.parametrize("untie", [False, True])
def test_a_tied_head_stays_tied_or_is_stored(
    untie: bool, tmp_path: Path, text: Path, lines: list[str]
) -> None:
    make_base(tmp_path / "base", "llama-tied-biased")
    out = swiftkit.quantize_model(
        tmp_path / "base", tmp_path / "out", dataset=text, group_size=32, max_length=LENGTH, untie_head=untie,
        method="rtn", max_shard_size="60KB",
    )  # fmt: skip
    config, weights = json.loads((out / "config.json").read_text()), Weights(out)
    assert config["tie_word_embeddings"] is not untie
    assert ("lm_head.weight" in weights.names()) is untie
    if untie:
        assert torch.equal(weights.read("lm_head.weight"), weights.read("model.embed_tokens.weight"))
    assert len(weights.files()) > 1 and (out / "model.safetensors.index.json").is_file()


def test_older_readers_find_their_rotary_settings(tmp_path: Path, text: Path, lines: list[str]) -> None:
    base = make_base(tmp_path / "base", "llama3-rope")
    out = quantized(tmp_path / "base", tmp_path / "out", text, lines, method="rtn", format="gptq", bits=8)
    config = json.loads((out / "config.json").read_text())
    assert config["rope_theta"] == 10000.0 and config["rope_scaling"]["rope_type"] == "llama3"
    assert describe_plain(out).rope_parameters == base.config.rope_parameters
    gemma = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    made = with_older_rope({"rope_parameters": gemma})
    assert (made["rope_theta"], made["rope_local_base_freq"]) == (1e6, 1e4)
    assert with_older_rope({"rope_theta": 5.0}) == {"rope_theta": 5.0}


def describe_plain(folder: Path) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder)


def test_too_great_a_loss_is_an_error_that_keeps_the_report(
    tmp_path: Path, text: Path, lines: list[str]
) -> None:
    make_base(tmp_path / "base")
    words = r"more than --max_ppl_increase 0 allows; the worst layer is model\."
    knobs = dict(method="gptq", bits=3, max_ppl_increase=0.0)
    with pytest.raises(UserError, match=words) as raised:
        for seed in range(20):  # noise may lower the perplexity of a random model
            out = tmp_path / f"out{seed}"
            quantized(tmp_path / "base", out, text, lines, seed=seed, **knobs)
    kept = out.with_name(f"{out.name}.quantize_report.json")
    assert str(kept) in str(raised.value)
    assert json.loads(kept.read_text())["quality"]["perplexity_increase"] > 0
    assert not out.exists() and not list(tmp_path.glob(".*partial"))


def test_shapes_are_refused_before_the_texts_are_read(tmp_path: Path, lines: list[str]) -> None:
    make_base(tmp_path / "base", intermediate_size=80)
    with pytest.raises(UserError, match=r"down_proj \[64, 80\]: its 80 columns are no multiple of --group_"):
        quantized(tmp_path / "base", tmp_path / "out", tmp_path / "none.txt", lines)
    assert not lines and not (tmp_path / "out").exists()


def test_few_and_short_rows_are_said(tmp_path: Path, lines: list[str]) -> None:
    make_base(tmp_path / "base")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "a short row"}\n')
    out = quantized(tmp_path / "base", tmp_path / "out", rows, lines)
    report = json.loads((out / "quantize_report.json").read_text())
    assert any("(the same: one window cannot be divided)" in line for line in lines)
    assert any("fewer than the 128 inputs of" in line for line in lines)
    assert not report["quality"]["held_out"] and len(report["notes"]) == 1


def test_a_bad_layer_has_a_name() -> None:
    errors = [LinearError(f"model.layers.{n}.mlp.up_proj", 0.02, 0.03, 0.05, 0, 9, "gptq") for n in range(9)]
    odd = LinearError("model.layers.9.mlp.up_proj", 0.2, 0.3, 0.05, 0, 9, "gptq")
    lost = LinearError("model.layers.9.mlp.down_proj", float("nan"), 0.3, 0.05, 0, 9, "gptq")
    report = Report({}, linears=[*errors, odd, lost])
    assert {one.name for one in report.bad()} == {odd.name, lost.name}
