"""From a folder to a model: what is refused, what stands afterwards, and the adapter's first values."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from swiftkit.engine import Engine, LoraLinear, LoraSpec
from swiftkit.engine.build import build_model, describe, skeleton
from swiftkit.engine.exchange import exchange, select_targets
from swiftkit.errors import UserError
from tests import tiny
from tests.cases.toy import case, expected

CPU = torch.device("cpu")
SPEC = LoraSpec(rank=4, alpha=8)
WEIGHTS = "model.safetensors"


def build(folder: Path, lora: LoraSpec | None = SPEC, **options: Any) -> nn.Module:
    return build_model(folder, **{"dtype": torch.float32, "device": CPU, "lora": lora, **options})


# ---- files that do not fit -------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny.make("llama", tmp_path)
    return tmp_path


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    tensors = {**load_file(folder / WEIGHTS), **changes}
    save_file({k: t for k, t in tensors.items() if t is not None}, folder / WEIGHTS, {"format": "pt"})


def test_missing_tensors_are_counted_and_the_first_is_named(folder: Path) -> None:
    rewrite(
        folder,
        **{"model.layers.1.mlp.up_proj.weight": None, "model.layers.2.self_attn.q_proj.weight": None},
    )
    with pytest.raises(UserError, match=r"lacks 2 tensors of the model, the first is model\.layers\.1\.mlp"):
        build(folder)


def test_a_wrong_shape_is_named_with_both_shapes(folder: Path) -> None:
    rewrite(folder, **{"model.layers.0.self_attn.k_proj.weight": torch.zeros(64, 64)})
    rule = r"k_proj\.weight has shape \(64, 64\), config\.json asks for \(32, 64\)"
    with pytest.raises(UserError, match=rule):
        build(folder)


def test_a_folder_without_config_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no config\.json: it is not a model folder"):
        build(tmp_path)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("{", r"config\.json"),
        ("{}", r"config\.json"),
        ('{"model_type": "nobody-knows"}', r"config\.json: .*nobody-knows"),
        ('{"model_type": "llama", "hidden_size": "wide"}', r"config\.json: .*hidden_size"),
    ],
)
def test_a_config_that_cannot_be_read_is_named(tmp_path: Path, text: str, rule: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=rule) as error:
        build(tmp_path)
    assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)


def test_quantized_weights_are_refused_before_they_are_read_as_plain_ones(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"config\.json: .*quantized \(fp8\)"):
        build(folder)


# ---- what stands after the build -------------------------------------------------------------------------


@pytest.mark.compat
@pytest.mark.parametrize("family", sorted(tiny.FAMILIES))
def test_nothing_stays_on_meta_and_buffers_are_transformers(family: str, tmp_path: Path) -> None:
    tiny.make(family, tmp_path)
    model = build(tmp_path)
    assert not [name for name, t in model.state_dict(keep_vars=True).items() if t.is_meta]
    assert not [name for name, buffer in model.named_buffers() if buffer.is_meta]
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained and all(name.endswith(("lora_A", "lora_B")) for name in trained)

    reference = AutoModelForCausalLM.from_pretrained(tmp_path)
    ours, theirs = dict(model.named_buffers()), dict(reference.named_buffers())
    assert ours.keys() == theirs.keys()
    for name, buffer in theirs.items():
        torch.testing.assert_close(ours[name], buffer, rtol=0, atol=0, msg=name)
    base = {name: p for name, p in model.named_parameters() if name not in trained}
    for name, parameter in reference.named_parameters():
        assert torch.equal(base[name], parameter), name


def test_base_is_cast_and_the_adapter_is_not(folder: Path) -> None:
    model = build(folder, dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (torch.float32 if "lora_" in name else torch.bfloat16), name
    assert all(buffer.dtype == torch.float32 for buffer in model.buffers())


# ---- which layers are adapted ----------------------------------------------------------------------------


def test_case_07_all_linear_leaves_head_and_routers() -> None:
    known = expected("07-all-linear")
    root = nn.Module()
    for name, (kind, shape) in json.loads(Path(case(known["modules"])).read_text()).items():
        *parents, leaf = name.split(".")
        parent = root
        for part in parents:
            if part not in parent._modules:
                parent.add_module(part, nn.Module())
            parent = parent.get_submodule(part)
        with torch.device("meta"):
            parent.add_module(
                leaf, nn.Linear(*reversed(shape), bias=False) if kind == "Linear" else nn.Module()
            )
    root.get_output_embeddings = lambda: root.lm_head
    assert select_targets(root, ("all-linear",)) == set(known["must_target"])
    assert len(known["must_target"]) == known["count"]
    for name in ("gate", "router", "shared_expert_gate"):
        assert select_targets(root, (name,)) <= {n for n in known["must_not_target"] if n.endswith(name)}


def test_targets_by_last_part_and_by_whole_name(folder: Path) -> None:
    model = skeleton(describe(folder))
    assert select_targets(model, ("q_proj",)) == {f"model.layers.{i}.self_attn.q_proj" for i in range(3)}
    one = "model.layers.0.self_attn.q_proj"
    assert select_targets(model, (one, "v_proj")) == {one} | select_targets(model, ("v_proj",))
    with pytest.raises(UserError, match=r"--target_modules: .*lm_head"):
        select_targets(model, ("lm_head",))
    assert len(select_targets(model, ("all-linear",))) == 3 * 7
    with pytest.raises(
        UserError, match=r"--target_modules q_prj matches no linear layer; did you mean q_proj\?"
    ):
        select_targets(model, ("q_prj",))
    assert exchange(model, LoraSpec(target_modules=("q_proj", "v_proj"))) == [
        f"model.layers.{i}.self_attn.{leaf}" for i in range(3) for leaf in ("q_proj", "v_proj")
    ]


# ---- the adapter's first values --------------------------------------------------------------------------


def test_first_values_depend_on_name_and_seed_alone(folder: Path) -> None:
    torch.manual_seed(0)
    whole = Engine(build(folder)).parameters
    torch.manual_seed(1)
    few = Engine(build(folder, LoraSpec(rank=4, alpha=1, target_modules=("v_proj", "q_proj")))).parameters
    assert few.keys() < whole.keys()
    assert all(torch.equal(few[name], whole[name]) for name in few)
    other = Engine(build(folder, seed=7)).parameters
    firsts = {name: t for name, t in whole.items() if name.endswith("lora_A")}
    assert all(not torch.equal(other[name], first) for name, first in firsts.items())
    flat = [tuple(first.flatten()[:8].tolist()) for first in firsts.values()]
    assert len(set(flat)) == len(flat), "no two layers start alike"


def test_a_is_kaiming_uniform_and_b_is_zero(tmp_path: Path) -> None:
    tiny.make("llama", tmp_path)
    parameters = Engine(build(tmp_path, LoraSpec(rank=64, alpha=8))).parameters
    for name, parameter in parameters.items():
        if name.endswith("lora_B"):
            assert not parameter.any()
            continue
        bound, first = 1 / math.sqrt(parameter.shape[1]), parameter.detach()
        assert 0.98 * bound < first.max() <= bound and -bound <= first.min() < -0.98 * bound
        assert abs(float(first.std()) * math.sqrt(3) / bound - 1) < 0.05


# ---- dropout ---------------------------------------------------------------------------------------------


def dropping(probability: float) -> LoraLinear:
    plain = nn.Linear(16, 12)
    layer = LoraLinear(plain, LoraSpec(rank=4, alpha=8, dropout=probability))
    layer.reset_adapter(name="layer", seed=0, device=CPU)
    with torch.no_grad():
        layer.lora_B.normal_()
    return layer


def test_dropout_acts_in_training_alone_and_keeps_the_mean(seed: int) -> None:
    layer, reference = dropping(0.25), dropping(0.0)
    reference.load_state_dict(layer.state_dict())
    x = torch.randn(3, 16)
    layer.eval()
    assert torch.equal(layer(x), reference(x))
    layer.train()
    with torch.no_grad():
        draws = torch.stack([layer(x) for _ in range(4000)])
    assert not torch.equal(draws[0], draws[1])
    error = draws.mean(0) - reference(x)
    assert (error.abs() <= 5 * draws.std(0) / math.sqrt(4000)).all()


def test_dropout_leaves_the_base_alone(seed: int) -> None:
    layer = dropping(0.9)
    with torch.no_grad():
        layer.lora_B.zero_()
    x = torch.randn(5, 16)
    torch.testing.assert_close(layer.train()(x), layer.eval()(x), rtol=0, atol=0)


# ---- adapters that do not fit ----------------------------------------------------------------------------


def test_an_adapter_of_another_model_is_refused(folder: Path) -> None:
    engine = Engine(build(folder))
    fitting = {name: torch.ones_like(p) for name, p in engine.parameters.items()}
    engine.load_adapter(fitting)
    assert all(bool((p == 1).all()) for p in engine.parameters.values())
    first = next(iter(fitting))
    with pytest.raises(UserError, match=rf"{first} is only in one of the two"):
        engine.load_adapter({name: t for name, t in fitting.items() if name != first})
    with pytest.raises(UserError, match=rf"{first} is \[4, 3\], the model asks for \[4, 64\]"):
        engine.load_adapter({**fitting, first: torch.ones(4, 3)})
