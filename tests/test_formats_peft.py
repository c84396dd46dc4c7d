"""Adapters on disk are PEFT's: what we write PEFT reads with equal logits, and the other way round."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from swiftkit.engine import Batch, Engine, LoraSpec
from swiftkit.engine.build import build_model
from swiftkit.errors import UserError
from swiftkit.formats.peft import CONFIG, REFUSED, WEIGHTS, load_adapter, save_adapter
from tests import tiny

peft = pytest.importorskip("peft")
CPU = torch.device("cpu")
BOUNDS = dict(rtol=1e-5, atol=2e-5)


def engine_of(folder: Path, spec: LoraSpec | None) -> Engine:
    return Engine(build_model(folder, dtype=torch.float32, device=CPU, lora=spec))


def logits(engine: Engine, batch: Batch) -> torch.Tensor:
    engine.model.eval()
    with torch.no_grad():
        return engine.head.logits(engine.hidden(batch))


def write(engine: Engine, folder: Path, spec: LoraSpec, base: Path) -> dict[str, Any]:
    folder.mkdir()
    save_adapter(folder, engine.parameters, spec=spec, base_model=str(base), linear_names=engine.linear_names)
    return json.loads((folder / CONFIG).read_text())


FIRST_Q = "model.layers.0.self_attn.q_proj"
TARGETS = {
    ("all-linear",): None,
    ("q_proj", "v_proj"): ["q_proj", "v_proj"],
    (FIRST_Q,): [FIRST_Q],
    (FIRST_Q, "v_proj"): [FIRST_Q, *(f"model.layers.{i}.self_attn.v_proj" for i in range(3))],
}


@pytest.mark.compat
@pytest.mark.parametrize(
    ("family", "targets"),
    [
        *(("llama", targets) for targets in TARGETS),
        ("qwen2", ("all-linear",)),
        ("gemma2", (FIRST_Q, "v_proj")),
        ("phi3", ("all-linear",)),
    ],
)
def test_what_we_write_peft_reads(family: str, targets: tuple[str, ...], tmp_path: Path) -> None:
    """Equal logits; and PEFT adapts the layers that we trained, no others."""
    base = tmp_path / "base"
    tiny.make(family, base)
    spec = LoraSpec(rank=4, alpha=6.5, dropout=0.1, target_modules=targets)
    engine = engine_of(base, spec)
    tiny.randomise_adapter(engine.parameters)
    config = write(engine, tmp_path / "adapter", spec, base)
    if TARGETS[targets] is not None and family == "llama":
        assert config["target_modules"] == sorted(TARGETS[targets])

    theirs = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager"), tmp_path / "adapter"
    ).eval()
    adapted = {
        name.partition(".lora_")[0].removeprefix("base_model.model.")
        for name, _ in theirs.named_parameters()
        if "lora_" in name
    }
    assert adapted == {name.rpartition(".")[0] for name in engine.parameters}
    batch = Batch.of(tiny.packed([19]), device=CPU)
    with torch.no_grad():
        expected = theirs(input_ids=batch.input_ids[None], use_cache=False).logits[0]
        bare = theirs.get_base_model()
        with theirs.disable_adapter():
            untouched = bare(input_ids=batch.input_ids[None], use_cache=False).logits[0]
    torch.testing.assert_close(logits(engine, batch), expected, **BOUNDS)
    assert (expected - untouched).abs().max() > 1e-2, "the adapter does something"


@pytest.mark.compat
@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("start", [True, "gaussian"])
def test_what_peft_writes_we_read(rslora: bool, start: Any, tmp_path: Path) -> None:
    reference = tiny.make("qwen2", tmp_path / "base")
    config = peft.LoraConfig(
        r=3,
        lora_alpha=5,
        lora_dropout=0.2,
        target_modules=["q_proj", "down_proj"],
        layers_to_transform=[0, 2],
        use_rslora=rslora,
        init_lora_weights=start,
        task_type="CAUSAL_LM",
    )
    theirs = peft.get_peft_model(reference, config).eval()
    trained = {name: p for name, p in theirs.named_parameters() if p.requires_grad}
    tiny.randomise_adapter(trained)
    theirs.save_pretrained(tmp_path / "adapter")

    spec, tensors = load_adapter(tmp_path / "adapter")
    assert spec.rank == 3 and spec.dropout == 0.2 and len(tensors) == 2 * 4
    engine = engine_of(tmp_path / "base", spec)
    engine.load_adapter(tensors)
    batch = Batch.of(tiny.packed([19]), device=CPU)
    with torch.no_grad():
        expected = theirs(input_ids=batch.input_ids[None], use_cache=False).logits[0]
    torch.testing.assert_close(logits(engine, batch), expected, **BOUNDS)


def test_written_and_read_is_the_same(tmp_path: Path) -> None:
    tiny.make("llama", tmp_path / "base")
    spec = LoraSpec(rank=4, alpha=8, dropout=0.05)
    engine = engine_of(tmp_path / "base", spec)
    tiny.randomise_adapter(engine.parameters)
    config = write(engine, tmp_path / "adapter", spec, tmp_path / "base")
    assert (config["lora_alpha"], config["r"], config["lora_dropout"]) == (8, 4, 0.05)
    assert config["base_model_name_or_path"] == str(tmp_path / "base")
    again, tensors = load_adapter(tmp_path / "adapter")
    assert (again.rank, again.alpha, again.dropout) == (4, 8.0, 0.05)
    assert set(again.target_modules) == {name.rpartition(".")[0] for name in engine.parameters}
    assert all(torch.equal(tensors[name], p) for name, p in engine.parameters.items())


# ---- what is refused -------------------------------------------------------------------------------------


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    tiny.make("llama", tmp_path / "base")
    spec = LoraSpec(rank=2, target_modules=("q_proj",))
    write(engine_of(tmp_path / "base", spec), tmp_path / "adapter", spec, tmp_path / "base")
    return tmp_path / "adapter"


def change(adapter: Path, **values: Any) -> None:
    config = json.loads((adapter / CONFIG).read_text())
    (adapter / CONFIG).write_text(json.dumps({**config, **values}))


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"use_qalora": True}, "use_qalora"),
        ({"rank_pattern": {"q_proj": 8}, "alpha_pattern": {"q_proj": 1}}, "alpha_pattern, rank_pattern"),
        ({"lora_bias": True}, "lora_bias"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "target_parameters"),
        ({"bias": "all"}, "bias all"),
        ({"peft_type": "IA3"}, "peft_type IA3"),
        ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights pissa_niter_16"),
    ],
)
def test_what_we_do_not_have_is_refused_by_name(adapter: Path, changes: dict[str, Any], rule: str) -> None:
    change(adapter, **changes)
    with pytest.raises(UserError, match=rf"{CONFIG}: adapters with {rule} are not served"):
        load_adapter(adapter)


def test_every_part_of_peft_s_lora_is_known() -> None:
    """A release of PEFT with a new kind of adapter fails here, before one is read as a plain adapter."""
    harmless = {
        "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision",
        "inference_mode", "r", "target_modules", "exclude_modules", "lora_alpha", "lora_dropout", "bias",
        "use_rslora", "init_lora_weights", "layers_to_transform", "layers_pattern", "megatron_config",
        "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size",
        "runtime_config", "ensure_weight_tying", "use_dora", "modules_to_save",
    }  # fmt: skip
    assert {field.name for field in dataclasses.fields(peft.LoraConfig)} == harmless | set(REFUSED)


def test_other_tensors_in_the_file_are_refused_by_name(adapter: Path) -> None:
    from safetensors.torch import load_file, save_file

    more = {"base_model.model.lm_head.weight": torch.zeros(2, 2)}
    save_file({**load_file(adapter / WEIGHTS), **more}, adapter / WEIGHTS)
    with pytest.raises(UserError, match=rf"{WEIGHTS}: adapters with lm_head are not served"):
        load_adapter(adapter)


def test_damaged_files_are_named(adapter: Path) -> None:
    whole = (adapter / WEIGHTS).read_bytes()
    (adapter / WEIGHTS).write_bytes(whole[:-1])
    with pytest.raises(UserError, match=rf"{WEIGHTS} is cut or damaged \(.*\); take another checkpoint"):
        load_adapter(adapter)
    (adapter / CONFIG).write_text("{")
    with pytest.raises(UserError, match=rf"{CONFIG} is not JSON"):
        load_adapter(adapter)
    (adapter / WEIGHTS).unlink()
    with pytest.raises(UserError, match=rf"has no {WEIGHTS}: it is not an adapter"):
        load_adapter(adapter)
