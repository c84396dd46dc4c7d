"""A merged model is its adapter on the same base: against PEFT, and for each kind of base."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import swiftkit
from swiftkit.config import MergeConfig, build
from swiftkit.engine.fused.base import BaseKind
from swiftkit.engine.fused.base import make_base as make_storage
from swiftkit.engine.kernels.rows import Rows
from swiftkit.errors import UserError
from swiftkit.export import check
from swiftkit.export.base import dequantized, training_base
from swiftkit.export.merge import merge
from swiftkit.export.weights import MergedWeights, factors_of
from swiftkit.formats.peft import load_adapter
from swiftkit.formats.shards import StoredWeights, shards, write_shards
from swiftkit.formats.weights import INDEX
from tests.adapters import ids, logits, make_base, make_checkpoint, reopened, write_args

pytest.importorskip("peft")
FAMILIES = ["llama", "qwen2", "gemma2", "phi3", "llama-tied-biased"]
EXACT = dict(rtol=1e-4, atol=1e-4)


@pytest.fixture
def lines() -> list[str]:
    """What a merge says."""
    return []


def merged(checkpoint: Path, out: Path, lines: list[str], **knobs: Any) -> Path:
    config = build(MergeConfig, {"adapters": str(checkpoint), "output_dir": str(out), **knobs})
    return merge(config, say=lines.append)


def error_of(one: torch.Tensor, other: torch.Tensor) -> float:
    """Relative difference of logits, a shift of all left out."""
    one, other = one - one.mean(1, keepdim=True), other - other.mean(1, keepdim=True)
    return float((one - other).norm() / other.norm())


# ---- equal to PEFT -----------------------------------------------------------------------------------------


@pytest.mark.compat
@pytest.mark.parametrize("family", FAMILIES)
def test_in_fp32_it_equals_peft_s_adapter_and_peft_s_merge(
    family: str, tmp_path: Path, seed: int, lines: list[str]
) -> None:
    make_base(tmp_path / "base", family)
    tuned = make_checkpoint(tmp_path / "checkpoint", tmp_path / "base", seed=seed, args={})
    live = logits(tuned, ids(seed))
    out = merged(tmp_path / "checkpoint", tmp_path / "out", lines)
    model = reopened(out)
    torch.testing.assert_close(logits(model, ids(seed)), live, **EXACT)
    theirs = tuned.merge_and_unload().state_dict()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(
            tensor, theirs[name], rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )
    assert any("logits on" in line for line in lines)


@pytest.mark.parametrize("lora", [{"use_rslora": True}, {"use_dora": True}], ids=["rslora", "dora"])
def test_other_forms_of_lora_equal_peft_s(
    lora: dict[str, Any], tmp_path: Path, seed: int, lines: list[str]
) -> None:
    make_base(tmp_path / "base")
    tuned = make_checkpoint(tmp_path / "checkpoint", tmp_path / "base", seed=seed, args={}, **lora)
    out = merged(tmp_path / "checkpoint", tmp_path / "out", lines)
    torch.testing.assert_close(logits(reopened(out), ids(seed)), logits(tuned, ids(seed)), **EXACT)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_bf16_base_stays_bf16_within_the_stated_bound(
    family: str, tmp_path: Path, seed: int, lines: list[str]
) -> None:
    make_base(tmp_path / "base", family, dtype=torch.bfloat16)
    tuned = make_checkpoint(tmp_path / "checkpoint", tmp_path / "base", seed=seed, args={})
    out = merged(tmp_path / "checkpoint", tmp_path / "out", lines)
    assert {stored.dtype for stored in StoredWeights(out).tensors.values()} == {torch.bfloat16}
    error = error_of(logits(reopened(out), ids(seed)), logits(tuned, ids(seed)))
    print(f"relative difference {error:.1e}")
    assert error <= check.logit_bound(torch.bfloat16)


def test_merge_dtype_changes_what_is_written(tmp_path: Path, lines: list[str]) -> None:
    make_base(tmp_path / "base", dtype=torch.bfloat16)
    tuned = make_checkpoint(tmp_path / "checkpoint", tmp_path / "base", args={})
    out = merged(tmp_path / "checkpoint", tmp_path / "out", lines, merge_dtype="fp32")
    assert {stored.dtype for stored in StoredWeights(out).tensors.values()} == {torch.float32}
    assert json.loads((out / "config.json").read_text())["dtype"] == "float32"
    torch.testing.assert_close(logits(reopened(out), ids()), logits(tuned, ids()), **EXACT)


# ---- the base of the training ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "device", "expected"),
    [
        ({"base_precision": "fp8"}, "CPU, 2 threads", ("fp8", "fp8", torch.float32)),
        ({"base_precision": "nf4", "nf4_compute": "fp8"}, "NVIDIA H200", ("nf4", "nf4-fp8", torch.bfloat16)),
        ({"base_precision": "nf4"}, "NVIDIA H200", ("nf4", "nf4", torch.bfloat16)),
        ({"base_precision": "bf16"}, "CPU, 1 thread", ("bf16", "plain", torch.bfloat16)),
        ({"base_precision": "fp32"}, "NVIDIA H200", ("fp32", "plain", torch.float32)),
        ({}, "NVIDIA H200", None),
    ],
)
def test_what_a_run_says_of_its_base(config: dict[str, Any], device: str, expected: Any) -> None:
    found = training_base({"config": config, "machine": {"device": device}})
    assert (found and (found.precision, found.storage, found.dtype)) == expected


@pytest.mark.parametrize("kind", ["plain", "fp8", "fp8-backward", "nf4", "nf4-fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dequantized_weights_are_those_of_the_forward_product(
    kind: BaseKind, dtype: torch.dtype, seed: int
) -> None:
    weight = torch.randn(128, 192, generator=torch.Generator().manual_seed(seed)).to(dtype)
    base = make_storage(kind, [128], 192, dtype=dtype, device=torch.device("cpu"))
    base.load(0, weight)
    held = dequantized(weight, kind)
    halves = torch.cat([dequantized(weight[:32], kind), dequantized(weight[32:], kind)])
    assert torch.equal(held, halves)
    one = torch.eye(192).to(torch.float8_e4m3fn if base.fp8 else dtype)
    rows = base.forward(Rows(one, torch.ones(192) if base.fp8 else None))
    torch.testing.assert_close(rows.data.float().T, held.to(dtype).float(), rtol=0, atol=0)
    assert torch.equal(held, weight.float()) == (kind in ("plain", "fp8-backward"))


@pytest.mark.parametrize("precision", ["fp8", "nf4"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "phi3"])
def test_both_bases_of_a_quantized_training(
    precision: str, family: str, tmp_path: Path, seed: int, lines: list[str]
) -> None:
    make_base(tmp_path / "base", family)
    make_checkpoint(tmp_path / "checkpoint", tmp_path / "base", precision=precision, seed=seed, args={})
    said: dict[str, list[str]] = {}
    models = {}
    for name in ("original", "dequantized"):
        said[name] = []
        out = merged(tmp_path / "checkpoint", tmp_path / name, said[name], merge_base=name)
        models[name] = logits(reopened(out), ids(seed))
    apart = error_of(models["dequantized"], models["original"])
    print(f"{precision} moves the logits by {apart:.1e}")
    assert apart > 1e-3
    losses = [losses_in(said[name]) for name in said]
    assert losses[0] == pytest.approx([losses[1][0], losses[1][2], losses[1][1]], abs=1e-3)
    if precision == "nf4":  # its products are those of the dequantized weights
        assert losses[1][0] == pytest.approx(losses[1][1], abs=1e-4)


def losses_in(lines: list[str]) -> list[float]:
    """As trained, merged as it is, merged into the other base."""
    (line,) = [line for line in lines if line.startswith("loss")]
    return [float(part.split()[0]) for part in line.partition(": ")[2].split(", ")]


@pytest.mark.parametrize("args", [None, {}], ids=["foreign", "fp32"])
def test_dequantized_needs_a_quantized_training(
    args: dict[str, Any] | None, tmp_path: Path, lines: list[str]
) -> None:
    make_base(tmp_path / "base")
    make_checkpoint(tmp_path / "checkpoint", tmp_path / "base", args=args)
    with pytest.raises(UserError, match="needs an fp8 or nf4 training") as refusal:
        merged(tmp_path / "checkpoint", tmp_path / "out", lines, merge_base="dequantized")
    assert ("fp32 weights" if args == {} else "no args.json") in str(refusal.value)


# ---- the check ---------------------------------------------------------------------------------------------


def test_the_check_of_layers_finds_a_wrong_scale(tmp_path: Path, seed: int) -> None:
    """Written with an adapter 1 % too strong, read against the right one."""
    make_base(tmp_path / "base")
    make_checkpoint(tmp_path / "checkpoint", tmp_path / "base", seed=seed)
    from swiftkit.engine.build import describe

    spec, tensors = load_adapter(tmp_path / "checkpoint")
    wrong = {n: t * 1.01 if n.endswith("lora_B") else t for n, t in tensors.items()}
    weights = [
        MergedWeights(
            StoredWeights(tmp_path / "base"), description=describe(tmp_path / "base"), spec=spec,
            tensors=chosen, device=torch.device("cpu"),
        )
        for chosen in (tensors, wrong)
    ]  # fmt: skip
    (tmp_path / "out").mkdir()
    write_shards(tmp_path / "out", shards(weights[1].tensors, max_bytes=1 << 30), weights[1].pieces)
    found = check.check_layers(weights[0], tmp_path / "out", device=torch.device("cpu"))
    assert found.worst > 10 and found.kept == pytest.approx(1.01, abs=1e-3)
    assert not found.faults
    same = check.check_layers(weights[1], tmp_path / "out", device=torch.device("cpu"))
    assert same.worst < 0.5 and same.kept == pytest.approx(1, abs=1e-4)


def test_a_changed_tensor_without_adapter_is_found(tmp_path: Path, lines: list[str]) -> None:
    from safetensors.torch import load_file, save_file

    from swiftkit.engine.build import describe

    make_base(tmp_path / "base")
    make_checkpoint(tmp_path / "checkpoint", tmp_path / "base", args={})
    out = merged(tmp_path / "checkpoint", tmp_path / "out", lines)
    tensors = load_file(out / "model.safetensors")
    tensors["model.norm.weight"][3] += 1e-6
    save_file(tensors, out / "model.safetensors")
    spec, adapter = load_adapter(tmp_path / "checkpoint")
    weights = MergedWeights(
        StoredWeights(tmp_path / "base"), description=describe(tmp_path / "base"), spec=spec, tensors=adapter,
        device=torch.device("cpu"),
    )  # fmt: skip
    found = check.check_layers(weights, out, device=torch.device("cpu"))
    assert found.faults == ("model.norm.weight",)


def test_an_adapter_that_is_not_finite_fails_and_leaves_nothing(tmp_path: Path, lines: list[str]) -> None:
    from safetensors.torch import load_file, save_file

    make_base(tmp_path / "base")
    make_checkpoint(tmp_path / "checkpoint", tmp_path / "base", args={})
    file = tmp_path / "checkpoint" / "adapter_model.safetensors"
    tensors = load_file(file)
    next(iter(tensors.values())).view(-1)[0] = float("nan")
    save_file(tensors, file)
    with pytest.raises(UserError, match="the merge failed its check"):
        merged(tmp_path / "checkpoint", tmp_path / "out", lines)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "checkpoint"]


def test_overflow_of_fp16_fails(tmp_path: Path, lines: list[str]) -> None:
    make_base(tmp_path / "base")
    make_checkpoint(tmp_path / "checkpoint", tmp_path / "base", scale=200.0, args={})
    with pytest.raises(UserError, match="--merge_dtype fp32"):
        merged(tmp_path / "checkpoint", tmp_path / "out", lines, merge_dtype="fp16")
    assert not (tmp_path / "out").exists()


def test_what_rounding_loses_is_said(tmp_path: Path, lines: list[str]) -> None:
    """Changes far below a bf16 weight's last place are lost; fp32 has room for them."""
    make_base(tmp_path / "base", dtype=torch.bfloat16)
    make_checkpoint(tmp_path / "checkpoint", tmp_path / "base", scale=0.005, args={})
    merged(tmp_path / "checkpoint", tmp_path / "bf16", lines)
    assert any(line.startswith("warning") and "--merge_dtype fp32" in line for line in lines)
    more: list[str] = []
    merged(tmp_path / "checkpoint", tmp_path / "fp32", more, merge_dtype="fp32")
    assert not any(line.startswith("warning") for line in more)
    assert any("100.0% of the adapter" in line for line in more)


@pytest.mark.parametrize("scale", [0.0, 1e-3])
def test_an_adapter_that_has_hardly_begun_is_merged_whole_in_fp32(
    scale: float, tmp_path: Path, lines: list[str]
) -> None:
    """Its change is a millionth of the weights: nothing of that may be taken for rounding."""
    make_base(tmp_path / "base")
    make_checkpoint(tmp_path / "checkpoint", tmp_path / "base", scale=scale, args={})
    merged(tmp_path / "checkpoint", tmp_path / "out", lines)
    assert any("100.0% of the adapter" in line for line in lines)


def test_an_adapter_that_rounding_would_wipe_out_fails(tmp_path: Path, lines: list[str]) -> None:
    make_base(tmp_path / "base", dtype=torch.bfloat16)
    make_checkpoint(tmp_path / "checkpoint", tmp_path / "base", scale=1e-3, args={})
    with pytest.raises(UserError, match=r"of the adapter's change survives rounding .* --merge_dtype fp32"):
        merged(tmp_path / "checkpoint", tmp_path / "out", lines)
    assert not (tmp_path / "out").exists()


def test_the_check_that_needs_no_room_for_the_model(
    tmp_path: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_base(tmp_path / "base")
    make_checkpoint(tmp_path / "checkpoint", tmp_path / "base", args={})
    merged(tmp_path / "checkpoint", tmp_path / "one", lines, merge_check="layers")
    assert any(line.startswith("checked") for line in lines)
    assert not any("logits" in line for line in lines)
    monkeypatch.setattr("swiftkit.export.verify.free_memory", lambda device: 1 << 19)
    merged(tmp_path / "checkpoint", tmp_path / "two", lines)
    assert any("logits not compared" in line for line in lines)


# ---- files -------------------------------------------------------------------------------------------------


def test_shards_with_an_index_open_as_one(tmp_path: Path, seed: int, lines: list[str]) -> None:
    make_base(tmp_path / "base")
    tuned = make_checkpoint(tmp_path / "checkpoint", tmp_path / "base", seed=seed, args={})
    out = merged(tmp_path / "checkpoint", tmp_path / "out", lines, max_shard_size="100KB")
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 4 and (out / INDEX).is_file()
    assert all(path.stat().st_size < 110_000 for path in files)
    torch.testing.assert_close(logits(reopened(out), ids(seed)), logits(tuned, ids(seed)), **EXACT)


def test_from_both_doors_a_run_folder_takes_its_newest_checkpoint(tmp_path: Path) -> None:
    from swiftkit.cli import main

    make_base(tmp_path / "base")
    for step in (5, 10):
        make_checkpoint(tmp_path / "run" / f"checkpoint-{step}", tmp_path / "base", seed=step, args={})
    one = swiftkit.merge(tmp_path / "run", tmp_path / "one", device="cpu")
    with pytest.raises(SystemExit) as end:
        main(["merge", str(tmp_path / "run" / "checkpoint-10"), str(tmp_path / "two"), "--device", "cpu"])
    assert end.value.code == 0
    weights = [(folder / "model.safetensors").read_bytes() for folder in (one, tmp_path / "two")]
    assert weights[0] == weights[1]


def test_a_merged_model_is_a_model_to_chat_with(tmp_path: Path, lines: list[str]) -> None:
    from swiftkit.config import ChatConfig
    from swiftkit.generate.session import Session

    make_base(tmp_path / "base", template="chatml")
    make_checkpoint(tmp_path / "checkpoint", tmp_path / "base", args={})
    out = merged(tmp_path / "checkpoint", tmp_path / "out", lines)
    answers = [
        Session.open(build(ChatConfig, {**where, "device": "cpu", "max_new_tokens": 8})).ask("hello")
        for where in ({"model": str(out)}, {"adapters": str(tmp_path / "checkpoint")})
    ]
    assert answers[0] == answers[1]


# ---- what is refused ---------------------------------------------------------------------------------------


def test_a_wrong_base_is_refused_by_its_fingerprint(tmp_path: Path, lines: list[str]) -> None:
    make_base(tmp_path / "base")
    make_checkpoint(tmp_path / "checkpoint", tmp_path / "base", args={})
    make_base(tmp_path / "other", rms_norm_eps=1e-5)
    with pytest.raises(UserError, match=r"was trained on .*base .*has other weights or another config.json"):
        merged(tmp_path / "checkpoint", tmp_path / "out", lines, model=str(tmp_path / "other"))
    (tmp_path / "base").rename(tmp_path / "moved")
    merged(tmp_path / "checkpoint", tmp_path / "out", lines, model=str(tmp_path / "moved"))


def test_a_base_of_other_shapes_is_refused_without_a_fingerprint(tmp_path: Path, lines: list[str]) -> None:
    make_base(tmp_path / "base")
    make_checkpoint(tmp_path / "checkpoint", tmp_path / "base")
    make_base(tmp_path / "other", intermediate_size=192)
    with pytest.raises(UserError, match="the adapter does not fit this base"):
        merged(tmp_path / "checkpoint", tmp_path / "out", lines, model=str(tmp_path / "other"))
    merged(tmp_path / "checkpoint", tmp_path / "out", lines)
    assert any("records no fingerprint" in line for line in lines)


def test_a_whole_model_needs_no_merge(tmp_path: Path, lines: list[str]) -> None:
    make_base(tmp_path / "run" / "checkpoint-3")
    write_args(tmp_path / "run" / "checkpoint-3", tmp_path / "run" / "checkpoint-3", "fp32")
    with pytest.raises(UserError, match=r"holds a whole model.*nothing to merge; .*swiftkit chat --model"):
        merged(tmp_path / "run", tmp_path / "out", lines)


def test_other_mistakes(tmp_path: Path, lines: list[str]) -> None:
    make_base(tmp_path / "base")
    make_checkpoint(tmp_path / "checkpoint", tmp_path / "base", args={})
    with pytest.raises(UserError, match="base exists already"):
        merged(tmp_path / "checkpoint", tmp_path / "base", lines)
    with pytest.raises(UserError, match="no adapter and no checkpoint there"):
        merged(tmp_path / "nowhere", tmp_path / "out", lines)
    for size in ("5 apples", "0GB", "-1GB"):
        with pytest.raises(UserError, match="--max_shard_size takes a size such as 5GB"):
            merged(tmp_path / "checkpoint", tmp_path / "out", lines, max_shard_size=size)
    with pytest.raises(UserError, match="--private belongs to --push_to_hub"):
        merged(tmp_path / "checkpoint", tmp_path / "out", lines, private=True)
    assert not (tmp_path / "out").exists()


def test_what_a_killed_merge_left_is_cleared(tmp_path: Path, lines: list[str]) -> None:
    make_base(tmp_path / "base")
    make_checkpoint(tmp_path / "checkpoint", tmp_path / "base", args={})
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "model-00001-of-00002.safetensors").write_bytes(b"half")
    out = merged(tmp_path / "checkpoint", tmp_path / "out", lines)
    assert not list(out.glob("model-*")) and not (tmp_path / ".out.partial").exists()


def test_factors_are_named_by_their_weight(tmp_path: Path) -> None:
    make_base(tmp_path / "base")
    make_checkpoint(tmp_path / "checkpoint", tmp_path / "base", target_modules=["q_proj"])
    factors = factors_of(*load_adapter(tmp_path / "checkpoint"))
    assert sorted(factors) == [f"model.layers.{n}.self_attn.q_proj.weight" for n in range(3)]
    assert all(f.scaling == 2 and f.a.shape == (4, 64) for f in factors.values())
