"""Kinds of adapters with PEFT as oracle: outputs and gradients; what is saved loads there, logits equal."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from swiftkit.engine import Batch, Engine, FullSpec, LoraSpec
from swiftkit.engine.exchange import fused_experts
from swiftkit.errors import UserError
from swiftkit.formats.peft import CONFIG, load_adapter, load_trained
from swiftkit.methods.sft import loss
from swiftkit.train.artifact import Artifact, read_model
from tests import tiny

peft = pytest.importorskip("peft")
CPU = torch.device("cpu")
BOUNDS = dict(rtol=1e-5, atol=2e-5)
TARGETS = ("q_proj", "down_proj")
KINDS: dict[str, dict[str, Any]] = {
    "rslora": dict(rslora=True),
    "dora": dict(dora=True),
    "dora-rslora": dict(dora=True, rslora=True),
    "pissa": dict(pissa=True),
    "pissa-rslora": dict(pissa=True, rslora=True),
}


def load(folder: Path, spec: LoraSpec, **options: Any) -> Engine:
    return Engine.load(folder, dtype=torch.float32, device=CPU, lora=spec, **options)


def logits(engine: Engine, batch: Batch) -> torch.Tensor:
    engine.model.eval()
    with torch.no_grad():
        return engine.head.logits(engine.hidden(batch))


def theirs_of(folder: Path, spec: LoraSpec, **options: Any) -> Any:
    """PEFT's adapter of the same shape over transformers' model."""
    config = peft.LoraConfig(
        r=spec.rank,
        lora_alpha=spec.alpha,
        lora_dropout=spec.dropout,
        target_modules=list(spec.target_modules),
        use_rslora=spec.rslora,
        use_dora=spec.dora,
        init_lora_weights="pissa" if spec.pissa else True,
        task_type="CAUSAL_LM",
        **options,
    )
    base = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    return peft.get_peft_model(base, config)


def named(theirs: Any) -> dict[str, torch.Tensor]:
    """PEFT's trained tensors by our names."""
    found = {}
    for name, parameter in theirs.named_parameters():
        if parameter.requires_grad:
            name = name.removeprefix("base_model.model.").replace(".modules_to_save.default", "")
            found[name.replace(".default.weight", "")] = parameter
    return found


def their_loss(theirs: Any, batch: Batch) -> torch.Tensor:
    """The same sum over trained tokens."""
    scores = theirs(input_ids=batch.input_ids[None], use_cache=False).logits[0]
    return torch.nn.functional.cross_entropy(scores[batch.positions], batch.targets, reduction="sum")


def check_gradients(engine: Engine, theirs: Any, batch: Batch, *, bound: float = 5e-5) -> None:
    sums = engine.forward_backward([batch], loss, denominator=1.0)
    other = their_loss(theirs, batch)
    other.backward()
    torch.testing.assert_close(sums["loss"].float(), other.detach(), rtol=1e-5, atol=0)
    oracle = named(theirs)
    assert oracle.keys() == engine.parameters.keys()
    for name, parameter in engine.parameters.items():
        expected = oracle[name].grad
        assert expected is not None and parameter.grad is not None and expected.any(), name
        error = (parameter.grad - expected).norm() / expected.norm()
        assert error < bound, f"{name}: relative error {error:.1e}"


def saved(engine: Engine, spec: LoraSpec, folder: Path, base: Path) -> Path:
    folder.mkdir()
    artifact = Artifact(
        spec, str(base), tuple(engine.linear_names), base=base, starts=engine.starts, tied=engine.tied
    )
    artifact.write(folder, engine.parameters)
    return folder


def loaded_by_peft(base: Path, adapter: Path, *, vocabulary: int | None = None) -> Any:
    model = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager", dtype=torch.float32)
    if vocabulary is not None:
        model.resize_token_embeddings(vocabulary)
    return peft.PeftModel.from_pretrained(model, adapter).eval()


# ---- kinds -----------------------------------------------------------------------------------------------


@pytest.mark.compat
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_an_adapter_equals_peft_s(kind: str, tmp_path: Path) -> None:
    """First values, loss, gradients; saved, PEFT reads it; what PEFT writes, we read."""
    base = tmp_path / "base"
    tiny.make("qwen2", base)
    spec = LoraSpec(rank=4, alpha=6, target_modules=TARGETS, **KINDS[kind])
    engine, theirs = load(base, spec), theirs_of(base, spec)
    oracle = named(theirs)
    assert oracle.keys() == engine.parameters.keys()
    if spec.pissa:  # the sign of a pair of singular vectors is free: the products are compared
        for name in (n for n in oracle if n.endswith("lora_A")):
            other = name.replace("lora_A", "lora_B")
            own = engine.parameters[other] @ engine.parameters[name]
            torch.testing.assert_close(own, oracle[other] @ oracle[name], rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        for name, parameter in engine.parameters.items():
            if name.endswith("magnitude_vector"):
                torch.testing.assert_close(parameter, oracle[name], rtol=1e-5, atol=0)
                parameter.mul_(1.1)
            else:
                parameter.add_(torch.randn(parameter.shape) * 0.05)
            oracle[name].copy_(parameter)
    batch = tiny.row(tiny.documents([19]))
    if not spec.pissa:
        check_gradients(engine, theirs, batch)
    else:  # PEFT took another, equal part out of its base; compare with what PEFT makes of our values
        assert engine.starts.keys() == engine.parameters.keys()

    found = logits(engine, batch)
    adapter = saved(engine, spec, tmp_path / "adapter", base)
    with torch.no_grad():
        again = loaded_by_peft(base, adapter)(input_ids=batch.input_ids[None], use_cache=False).logits[0]
    torch.testing.assert_close(found, again, **BOUNDS)
    read, tensors = load_adapter(adapter)
    other_engine = load(base, read)
    other_engine.load_adapter(tensors)
    torch.testing.assert_close(logits(other_engine, batch), found, **BOUNDS)
    trained = read_model(adapter)
    assert trained.keys() == engine.parameters.keys()
    assert all(torch.equal(trained[name], p) for name, p in engine.parameters.items())
    if not spec.pissa:
        theirs.eval().save_pretrained(tmp_path / "peft")
        read, tensors = load_adapter(tmp_path / "peft")
        assert (read.rslora, read.dora) == (spec.rslora, spec.dora)
        third = load(base, read)
        third.load_adapter(tensors)
        torch.testing.assert_close(logits(third, batch), found, **BOUNDS)


def test_pissa_starts_as_the_base_and_its_gradients_are_peft_s(tmp_path: Path) -> None:
    """With PEFT's factors and PEFT's rest of the base in place of ours."""
    base = tmp_path / "base"
    tiny.make("llama", base)
    spec = LoraSpec(rank=4, alpha=6, target_modules=TARGETS, pissa=True)
    engine, theirs = load(base, spec), theirs_of(base, spec)
    batch = tiny.row(tiny.documents([19]))
    plain = Engine.load(base, dtype=torch.float32, device=CPU)
    torch.testing.assert_close(logits(engine, batch), logits(plain, batch), **BOUNDS)
    rest = dict(theirs.named_parameters())
    with torch.no_grad():
        for name, parameter in named(theirs).items():
            engine.parameters[name].copy_(parameter)
            module = engine.model.get_submodule(name.rpartition(".")[0])
            key = f"base_model.model.{name.rpartition('.')[0]}.base_layer.weight"
            torch.testing.assert_close(module.weight, rest[key], rtol=0, atol=2e-5)
            module.weight.copy_(rest[key])
    check_gradients(engine, theirs, batch)


def test_pissa_is_the_same_at_every_start(tmp_path: Path) -> None:
    """A resumed run takes the same part out of the base again."""
    tiny.make("llama", tmp_path)
    spec = LoraSpec(rank=4, target_modules=TARGETS, pissa=True)
    one, other = (load(tmp_path, spec).parameters for _ in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_pissa_in_rounds_is_near_the_exact_one(tmp_path: Path) -> None:
    """Base and adapter are the original weight together; the same seed finds the same part."""
    tiny.make("llama", tmp_path)
    exact = LoraSpec(rank=4, alpha=6, target_modules=("down_proj",), pissa=True)
    spec = replace(exact, pissa_rounds=16)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    engine, again, other = load(tmp_path, spec), load(tmp_path, spec), load(tmp_path, exact)
    assert torch.equal(torch.get_rng_state(), state), "nothing else draws otherwise for it"
    plain = Engine.load(tmp_path, dtype=torch.float32, device=CPU)
    for name in (n for n in engine.parameters if n.endswith("lora_A")):
        module = name.removesuffix(".lora_A")
        assert torch.equal(engine.parameters[name], again.parameters[name])
        products = [
            spec.scaling * e.parameters[f"{module}.lora_B"] @ e.parameters[name] for e in (engine, other)
        ]
        # Singular values of a random matrix are close together: another part of it is as good.
        assert 0.9 * products[1].norm() < products[0].norm() < 1.001 * products[1].norm()
        whole = engine.model.get_submodule(module).weight + products[0]
        torch.testing.assert_close(whole, plain.model.get_submodule(module).weight, rtol=0, atol=1e-5)


def test_dropout_with_dora_is_peft_s(tmp_path: Path) -> None:
    tiny.make("llama", tmp_path)
    spec = LoraSpec(rank=4, alpha=6, dropout=0.3, target_modules=("down_proj",), dora=True)
    engine, theirs = load(tmp_path, spec), theirs_of(tmp_path, spec).train()
    tiny.randomise_adapter(engine.parameters)
    with torch.no_grad():
        for name, parameter in named(theirs).items():
            parameter.copy_(engine.parameters[name])
    batch = tiny.row(tiny.documents([19]))
    torch.manual_seed(5)
    own = engine.forward_backward([batch], loss, denominator=1.0)["loss"]
    torch.manual_seed(5)
    torch.testing.assert_close(own.float(), their_loss(theirs, batch).detach(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("kind", ["dora", "pissa"])
@pytest.mark.parametrize("base", ["nf4", "fp8"])
def test_a_quantized_base_is_refused(kind: str, base: Any, tmp_path: Path) -> None:
    tiny.make("llama", tmp_path)
    with pytest.raises(UserError, match=rf"--base_precision {base}: .*; take --base_precision bf16"):
        load(tmp_path, LoraSpec(**KINDS[kind]), base=base)


@pytest.mark.compat
@pytest.mark.parametrize("rslora", [False, True])
def test_fused_layers_scale_as_plain_ones(rslora: bool, tmp_path: Path) -> None:
    tiny.make("llama", tmp_path, head_dim=32, intermediate_size=128)
    spec = LoraSpec(rank=4, alpha=6, rslora=rslora)
    fused, plain = (load(tmp_path, spec, fused=fused) for fused in (True, False))
    tiny.randomise_adapter(fused.parameters)
    plain.load_adapter(fused.parameters)
    batch = tiny.row(tiny.documents([19]))
    torch.testing.assert_close(logits(fused, batch), logits(plain, batch), **BOUNDS)


@pytest.mark.parametrize("kind", ["dora", "pissa"])
def test_fused_layers_leave_these_to_plain_ones(kind: str, tmp_path: Path) -> None:
    tiny.make("llama", tmp_path, head_dim=32, intermediate_size=128)
    with pytest.raises(UserError, match="fused layers cannot serve here: --"):
        load(tmp_path, LoraSpec(**KINDS[kind]), fused=True)


# ---- modules that are trained whole ----------------------------------------------------------------------


@pytest.mark.compat
@pytest.mark.parametrize(
    ("family", "modules", "chunk"),
    [
        ("llama", ("embed_tokens", "lm_head"), 3),
        ("llama", ("lm_head",), 1000),
        ("gemma2", ("embed_tokens",), 3),  # tied, with a soft cap
        ("llama-tied-biased", ("lm_head",), 1000),  # tied: it is the embedding
        ("granite", ("embed_tokens", "lm_head", "model.norm"), 5),
    ],
)
def test_modules_trained_whole_equal_peft_s(
    family: str, modules: tuple[str, ...], chunk: int, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    tiny.make(family, base)
    spec = LoraSpec(rank=4, alpha=6, target_modules=TARGETS, modules_to_save=modules)
    engine = load(base, spec)
    engine.head.chunk = chunk
    theirs = theirs_of(base, spec, modules_to_save=list(modules), ensure_weight_tying=engine.tied)
    with torch.no_grad():
        for name, parameter in named(theirs).items():
            if "lora" in name:
                parameter.copy_(torch.randn(parameter.shape) * 0.1)
            else:
                parameter.add_(torch.randn(parameter.shape) * 0.02)
            engine.parameters[name].copy_(parameter)
    batch = tiny.row(tiny.documents([19]))
    check_gradients(engine, theirs, batch)
    found = logits(engine, batch)
    adapter = saved(engine, spec, tmp_path / "adapter", base)
    with torch.no_grad():
        again = loaded_by_peft(base, adapter)(input_ids=batch.input_ids[None], use_cache=False).logits[0]
    torch.testing.assert_close(found, again, **BOUNDS)
    trained = read_model(adapter)
    assert trained.keys() == engine.parameters.keys()
    assert all(torch.equal(trained[name], p) for name, p in engine.parameters.items())
    theirs.eval().save_pretrained(tmp_path / "peft")
    for folder in (adapter, tmp_path / "peft"):
        read, tensors = load_adapter(folder)
        other = load(base, replace(read, dropout=0.0))
        other.load_adapter(tensors)
        torch.testing.assert_close(logits(other, batch), found, **BOUNDS)


@pytest.mark.parametrize("base", ["plain", "fp8", "nf4"])
def test_embedding_and_head_are_trained_over_fused_layers(base: Any, tmp_path: Path) -> None:
    tiny.make("llama", tmp_path, head_dim=32, intermediate_size=128)
    spec = LoraSpec(rank=4, modules_to_save=("embed_tokens", "lm_head"))
    fused, plain = (load(tmp_path, spec, fused=fused, base=base) for fused in (True, False))
    batch = tiny.row(tiny.documents([19]))
    for engine in (fused, plain):
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, parameter in engine.parameters.items():
                if "lora" in name:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
        engine.forward_backward([batch], loss, denominator=1.0)
    bound = 1e-4 if base != "fp8" else 0.2  # casts to FP8 fall otherwise where the sums are
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        one, other = (engine.parameters[name].grad for engine in (fused, plain))
        assert one is not None and other is not None and other.any()
        assert (one - other).norm() / other.norm() < bound, name


def test_modules_that_cannot_be_trained_whole(tmp_path: Path) -> None:
    tiny.make("llama", tmp_path)
    with pytest.raises(
        UserError, match=r"--modules_to_save lm_haed matches no module .*did you mean lm_head"
    ):
        load(tmp_path, LoraSpec(modules_to_save=("lm_haed",)))
    with pytest.raises(UserError, match=r"--modules_to_save q_proj: .*q_proj has an adapter already"):
        load(tmp_path, LoraSpec(modules_to_save=("q_proj",)))
    with pytest.raises(UserError, match="--modules_to_save with others and --base_precision nf4"):
        load(tmp_path, LoraSpec(target_modules=("q_proj",), modules_to_save=("v_proj",)), base="nf4")


def test_an_embedding_trained_apart_from_its_tied_head_is_refused(tmp_path: Path) -> None:
    base = tmp_path / "base"
    tiny.make("llama-tied-biased", base)
    spec = LoraSpec(rank=2, target_modules=TARGETS)
    theirs_of(base, spec, modules_to_save=["embed_tokens"]).save_pretrained(tmp_path / "peft")
    read, _ = load_adapter(tmp_path / "peft")
    with pytest.raises(UserError, match=r"trained model\.embed_tokens apart .*ensure_weight_tying"):
        load(base, read)


# ---- new tokens ------------------------------------------------------------------------------------------


@pytest.mark.compat
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_new_rows_start_as_means_and_peft_loads_them(family: str, tmp_path: Path) -> None:
    base = tmp_path / "base"
    tiny.make(family, base)
    size = tiny.VOCABULARY + 2
    ends = ("embed_tokens",) if family == "gemma2" else ("embed_tokens", "lm_head")
    spec = LoraSpec(rank=2, target_modules=TARGETS, modules_to_save=ends, vocabulary=size)
    new_rows = {tiny.VOCABULARY: (5, 9), tiny.VOCABULARY + 1: ()}
    engine = load(base, spec, new_rows=new_rows)
    old = AutoModelForCausalLM.from_pretrained(base)
    for end, before in zip(ends, (old.get_input_embeddings(), old.get_output_embeddings()), strict=False):
        name = next(n for n in engine.parameters if n.endswith(f"{end}.weight"))
        weight, whole = engine.parameters[name], before.weight.detach()
        assert torch.equal(weight[: tiny.VOCABULARY], whole)
        torch.testing.assert_close(weight[-2], whole[[5, 9]].mean(0))
        torch.testing.assert_close(weight[-1], whole.mean(0))
    batch = tiny.row(tiny.documents([19]))
    batch.input_ids[4] = tiny.VOCABULARY
    found = logits(engine, batch)
    assert found.shape[1] == size
    adapter = saved(engine, spec, tmp_path / "adapter", base)
    theirs = loaded_by_peft(base, adapter, vocabulary=size)
    with torch.no_grad():
        again = theirs(input_ids=batch.input_ids[None], use_cache=False).logits[0]
    torch.testing.assert_close(found, again, **BOUNDS)
    read, tensors = load_adapter(adapter)
    assert read.vocabulary == size
    other = load(base, read)
    other.load_adapter(tensors)
    torch.testing.assert_close(logits(other, batch), found, **BOUNDS)


# ---- what an adapter does not reach ----------------------------------------------------------------------


def test_experts_in_one_tensor_are_named() -> None:
    from transformers import AutoConfig

    from swiftkit.engine.build import skeleton

    config = AutoConfig.for_model(
        "mixtral", **{**tiny.SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}
    )
    assert fused_experts(skeleton(config)) == [f"model.layers.{i}.mlp.experts" for i in range(3)]
    assert fused_experts(skeleton(AutoConfig.for_model("llama", **tiny.SIZES))) == []


def test_a_file_with_other_values_than_its_config_is_refused(tmp_path: Path) -> None:
    tiny.make("llama", tmp_path / "base")
    spec = LoraSpec(rank=2, target_modules=TARGETS, modules_to_save=("lm_head",))
    adapter = saved(load(tmp_path / "base", spec), spec, tmp_path / "adapter", tmp_path / "base")
    config = json.loads((adapter / CONFIG).read_text())
    (adapter / CONFIG).write_text(json.dumps({**config, "modules_to_save": None}))
    with pytest.raises(UserError, match="adapters with lm_head are not served"):
        load_trained(adapter)


def test_unreached_experts_are_said_in_the_header() -> None:
    from transformers import AutoConfig

    from swiftkit.config import SftConfig
    from swiftkit.formats.source import LocalModel
    from swiftkit.train.tuning import Tuning

    config = AutoConfig.for_model(
        "mixtral", **{**tiny.SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}
    )
    base = LocalModel("m", Path("m"), "folder", "", "0", "")
    for spec, count in ((LoraSpec(), 1), (FullSpec(), 0)):
        said = Tuning(spec, SftConfig(model="m", dataset=["d"]), base, config).warnings()
        assert len(said) == count
    assert (
        "the experts of model.layers.0.mlp.experts and 2 more layers"
        in Tuning(LoraSpec(), SftConfig(model="m", dataset=["d"]), base, config).warnings()[0]
    )
