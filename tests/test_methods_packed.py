"""Whole runs over quantized folders: the command trains, stops and goes on, answers, and merges."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import swiftkit
from swiftkit.cli import main
from swiftkit.errors import UserError
from swiftkit.formats.peft import load_adapter
from swiftkit.formats.quantized import dequantized_copy
from swiftkit.formats.shards import StoredWeights
from swiftkit.train.run import Run
from tests.adapters import ids, logits, make_base, make_checkpoint, reopened, write_args
from tests.packed import pack_folder

ROWS = [{"prompt": f"{n} and {n + 1} make ", "completion": f"{2 * n + 1}."} for n in range(12)]
PAIRS = [{"prompt": f"{n}? ", "chosen": f"yes, {n}", "rejected": f"no {n} at all"} for n in range(8)]
FORMS = [
    ("gptq", 3, True), ("gptq", 4, False), ("gptq_v2", 4, True), ("gptq", 8, True), ("awq", 4, False),
    ("compressed-tensors", 4, True), ("compressed-tensors", 8, False),
]  # fmt: skip


@pytest.fixture
def base(tmp_path: Path) -> Path:
    make_base(tmp_path / "base")
    return tmp_path / "base"


def rows(folder: Path, values: list[dict[str, Any]]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")
    return str(path)


def trained(model: Path, out: Path, data: str, *, method: str = "sft", **knobs: Any) -> tuple[Run, str]:
    """A run, and what it said."""
    console = Console(file=io.StringIO(), width=200)
    quick: dict[str, Any] = dict(
        max_steps=8, learning_rate=1e-2, lora_rank=4, logging_steps=1, global_batch_size=4, max_length=64,
    )  # fmt: skip
    if method == "sft":
        quick["sample_prompts"] = "none"
    start = getattr(swiftkit, method)
    run = start(model=model, dataset=data, output_dir=out, console=console, **{**quick, **knobs})
    return run, console.file.getvalue()  # type: ignore[attr-defined]


def apart(one: Run, other: Run) -> float:
    """Relative difference of two adapters."""
    values = [load_adapter(run.adapter_dir)[1] for run in (one, other)]
    assert values[0].keys() == values[1].keys()
    flat = [torch.cat([tensors[name].flatten() for name in sorted(tensors)]) for tensors in values]
    return float((flat[0] - flat[1]).norm() / flat[1].norm())


@pytest.mark.parametrize(("form", "bits", "ordered"), FORMS)
def test_training_is_that_over_the_dequantized_folder(
    form: str, bits: int, ordered: bool, base: Path, tmp_path: Path, seed: int
) -> None:
    packed = pack_folder(base, tmp_path / "packed", form, bits, ordered=ordered, seed=seed)
    dequantized_copy(packed, tmp_path / "plain")
    data = rows(tmp_path, ROWS)
    run, said = trained(packed, tmp_path / "a", data)
    reference, _ = trained(tmp_path / "plain", tmp_path / "b", data)
    assert run.metrics["loss"].tolist() == pytest.approx(reference.metrics["loss"].tolist(), rel=1e-5)
    assert run.metrics["loss"].iloc[-1] < run.metrics["loss"].iloc[0]
    assert apart(run, reference) < 1e-5
    kind = "symmetric" if form in ("gptq", "compressed-tensors") else "asymmetric"
    assert f"base      {form} int{bits}, group 32, {kind} on CPU" in said
    assert run.args["config"]["base_precision"] == f"int{bits}"
    # Only said to be plain, the same weights are unpacked first.
    unpacked, said = trained(packed, tmp_path / "c", data, base_precision="fp32")
    assert f"base      fp32, unpacked from {form} int{bits}" in said
    assert apart(unpacked, reference) < 1e-5


@pytest.mark.parametrize("method", ["dpo", "reward"])
def test_the_other_methods_are_those_over_the_dequantized_folder(
    method: str, base: Path, tmp_path: Path
) -> None:
    packed = pack_folder(base, tmp_path / "packed", "gptq", 4)
    dequantized_copy(packed, tmp_path / "plain")
    data = rows(tmp_path, PAIRS)
    run, _ = trained(packed, tmp_path / "a", data, method=method, max_steps=4)
    reference, _ = trained(tmp_path / "plain", tmp_path / "b", data, method=method, max_steps=4)
    assert run.metrics["loss"].tolist() == pytest.approx(reference.metrics["loss"].tolist(), rel=1e-5)
    assert apart(run, reference) < 1e-5


def test_a_run_goes_on_answers_and_starts_another(base: Path, tmp_path: Path) -> None:
    packed = pack_folder(base, tmp_path / "packed", "awq", 4)
    data = rows(tmp_path, ROWS)
    whole, _ = trained(packed, tmp_path / "a", data, save_steps=4)
    broken, _ = trained(packed, tmp_path / "b", data, save_steps=4)
    shutil.rmtree(broken.folder / "checkpoint-8")
    again, said = trained(packed, tmp_path / "b", data, save_steps=4, resume_from_checkpoint="auto")
    assert "resume    from step 4" in said and again.folder == broken.folder
    assert apart(again, whole) == 0.0
    first = whole.metrics["loss"].iloc[0]
    further, said = trained(packed, tmp_path / "c", data, init_adapter=str(again.adapter_dir), max_steps=2)
    assert "goes on from" in said and further.metrics["loss"].iloc[0] < first
    quiet = Console(file=io.StringIO(), width=200)
    found = swiftkit.evaluate(again.adapter_dir, dataset=data, metrics="loss", console=quiet)
    assert found.metrics["loss"] < first
    assert "base      awq int4, group 32, asymmetric" in quiet.file.getvalue()  # type: ignore[attr-defined]
    dequantized_copy(packed, tmp_path / "plain")
    answers = [
        again.chat(max_new_tokens=6, **knobs).ask("1 and 2 make ")
        for knobs in ({}, {"model": str(tmp_path / "plain")})
    ]
    assert answers[0] == answers[1]


def test_a_quantized_folder_answers_by_itself(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packed = pack_folder(base, tmp_path / "packed", "gptq", 4)
    dequantized_copy(packed, tmp_path / "plain")
    answers = []
    for folder in (packed, tmp_path / "plain"):
        with pytest.raises(SystemExit) as ended:
            main(["chat", "--model", str(folder), "--prompt", "1 and 2", "--max_new_tokens", "6"])
        assert ended.value.code == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1] and answers[0].strip()


@pytest.mark.parametrize("form", ["gptq", "awq", "compressed-tensors"])
@pytest.mark.parametrize("merge_base", ["original", "dequantized"])
def test_a_merge_unpacks_the_base(
    form: str, merge_base: str, base: Path, tmp_path: Path, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    packed = pack_folder(base, tmp_path / "packed", form, 4, seed=seed)
    dequantized_copy(packed, tmp_path / "plain")
    tuned = make_checkpoint(tmp_path / "checkpoint", tmp_path / "plain", seed=seed)
    write_args(tmp_path / "checkpoint", packed, "int4")
    expected = logits(tuned, ids(seed))
    for dtype, bound in (("base", 0.02), ("fp32", 1e-5)):
        out = swiftkit.merge(
            tmp_path / "checkpoint", tmp_path / f"merged-{dtype}", merge_dtype=dtype, merge_base=merge_base
        )
        said = capsys.readouterr().out
        written = "bf16" if dtype == "base" else "fp32"
        assert f"its weights are unpacked, and all is written in {written}" in said
        config = json.loads((out / "config.json").read_text())
        assert "quantization_config" not in config
        kinds = {t.dtype for t in StoredWeights(out).tensors.values()}
        assert kinds == {torch.bfloat16 if dtype == "base" else torch.float32}
        found = logits(reopened(out), ids(seed))
        assert float((found - expected).norm() / expected.norm()) < bound


# ---- what is refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        (
            {"tuner_type": "full", "lora_rank": 16},
            "--tuner_type full: .*quantized .gptq int4.*train an adapter",
        ),
        (
            {"tuner_type": "full", "lora_rank": 16, "base_precision": "fp32"},
            "--tuner_type full: .*quantized .gptq int4",
        ),
        ({"init_lora_weights": "pissa"}, "pissa and --base_precision int4: .*which unpacks the folder"),
        ({"use_dora": True}, "--use_dora and --base_precision int4: .*which unpacks the folder"),
        ({"modules_to_save": ["norm"]}, "--modules_to_save with others and --base_precision int4"),
        ({"base_precision": "nf4"}, "--base_precision nf4: the model is quantized already .gptq int4"),
        ({"base_precision": "fp8"}, "--base_precision fp8: the model is quantized already .gptq int4"),
    ],
)
def test_what_cannot_be_had_is_said(knobs: dict[str, Any], words: str, base: Path, tmp_path: Path) -> None:
    packed = pack_folder(base, tmp_path / "packed", "gptq", 4)
    with pytest.raises(UserError, match=words):
        trained(packed, tmp_path / "out", rows(tmp_path, ROWS), **knobs)
    assert not list(tmp_path.glob("out/**/args.json"))


def test_a_plain_folder_has_no_whole_numbers(base: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--base_precision int4 is for a folder that holds it"):
        trained(base, tmp_path / "out", rows(tmp_path, ROWS), base_precision="int4")


def test_what_is_quantized_is_not_quantized_again(base: Path, tmp_path: Path) -> None:
    packed = pack_folder(base, tmp_path / "packed", "gptq", 4)
    with pytest.raises(UserError, match=r"quantized already .gptq int4.*swiftkit merge"):
        swiftkit.quantize_model(packed, tmp_path / "out", dataset=rows(tmp_path, ROWS))
