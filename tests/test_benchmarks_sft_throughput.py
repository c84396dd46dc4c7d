"""The benchmark runs on a CPU at a tiny shape, rows begin equal, and results merge into a document."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SCRIPT = BENCHMARKS / "sft_throughput.py"


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def run(folder: Path, *arguments: str) -> tuple[str, list[dict[str, Any]]]:
    """The script's output and its records."""
    pytest.importorskip("peft")
    results = folder / "results.jsonl"
    command = [
        sys.executable,
        str(SCRIPT),
        "--shape",
        "tiny",
        "--scratch",
        str(folder),
        "--results",
        str(results),
    ]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = results.read_text().splitlines() if results.exists() else []
    return done.stdout, [json.loads(line) for line in lines]


def test_rows_begin_with_the_same_loss(tmp_path: Path) -> None:
    output, records = run(tmp_path, "--rows", "ours-bf16,hf-peft", "--warmup", "2", "--steps", "3")
    assert [record["row"] for record in records] == ["ours-bf16", "hf-peft"]
    ours, theirs = records
    for record in records:
        assert record["phase"] == "done", output
        assert record["tokens_per_s"] > 0
        assert len(record["step_ms"]) == 3
        assert record["compile_cache"] == "cold"
        assert record["first_step_s"] > 0
        assert record["versions"]["torch"]
    assert ours["first_loss"] == pytest.approx(theirs["first_loss"], rel=1e-3)
    assert ours["last_loss"] == pytest.approx(theirs["last_loss"], rel=1e-3)
    # B is zero and A random: only the size of the gradient is comparable.
    assert ours["first_grad_norm"] == pytest.approx(theirs["first_grad_norm"], rel=0.2)


def test_a_row_that_takes_too_long_is_ended_and_said(tmp_path: Path) -> None:
    output, records = run(tmp_path, "--rows", "hf-peft", "--timeout", "0.05")
    assert records[0]["error"] == "no end of: import, in 0 s"
    assert "hf-peft" in output


def test_a_failing_row_is_said_and_a_spent_budget_begins_none(tmp_path: Path) -> None:
    output, records = run(tmp_path, "--rows", "hf-peft", "--budget", "1")
    assert "hf-peft: not run" in output and records == []
    output, records = run(tmp_path, "--rows", "ours-bf16", "--checkpointing", "on")
    assert records[0]["error"] == "ValueError: this peer has no checkpointing and no Liger"
    assert "Traceback" in output


def test_unknown_row_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--rows", "ours-fp7", "--scratch", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "no such row: ours-fp7; there are ours-fp8" in done.stderr


def workload(folder: Path, **changes: Any) -> Any:
    from peers.workload import Workload

    options = dict(shape="tiny", layers=2, documents=2, length=16, warmup=1, steps=2, seed=7, folder=folder)
    return Workload(**(options | changes))


def test_stream_and_rows_are_the_same_tokens(peers: None, tmp_path: Path) -> None:
    steps = list(workload(tmp_path).tokens())
    assert np.array(steps).shape == (3, 2, 16)
    again = np.array([row["input_ids"] for row in workload(tmp_path).rows()]).reshape(3, 2, 16)
    np.testing.assert_array_equal(np.array(steps), again)
    assert not np.array_equal(steps[0], next(workload(tmp_path, seed=8).tokens()))


def test_model_is_written_once_and_loads_in_transformers(peers: None, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    workload(tmp_path / "a").write_model()
    workload(tmp_path / "b").write_model()
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "a", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    twin = AutoModelForCausalLM.from_pretrained(tmp_path / "b").state_dict()
    assert all(torch.equal(tensor, twin[name]) for name, tensor in model.state_dict().items())
    assert model.lm_head.weight.float().std().item() == pytest.approx(0.02, rel=0.02)
    assert model.config.rope_parameters["rope_theta"] == 500000.0
    assert AutoTokenizer.from_pretrained(tmp_path / "a").decode([0]) == "<|begin_of_text|>"
    before = (tmp_path / "a" / "model-00000.safetensors").stat().st_mtime_ns
    workload(tmp_path / "a").write_model()
    assert (tmp_path / "a" / "model-00000.safetensors").stat().st_mtime_ns == before


def record(row: str, rate: float, date: str, **changes: Any) -> dict[str, Any]:
    """A finished row."""
    return {
        "row": row, "phase": "done", "date": f"2026-01-{date}T00:00:00+00:00", "commit": "abc1234",
        "compile_cache": "cold", "checkpointing": False, "tokens_per_s": rate,
        "median_step_ms": rate and 16384e3 / rate,
        "allocated_gib": 70.25, "reserved_gib": 80.0, "first_step_s": 30.0,
        "first_loss": 12.5, "last_loss": 12.4,
        "first_grad_norm": 0.5, "last_grad_norm": 0.6, "versions": {"torch": "2.11.0"},
        "machine": {"id": "GPU-1", "card": "NVIDIA H200", "driver": "580", "clocks": "", "python": "3.12"},
        "workload": {"shape": "llama3-8b", "layers": 32, "documents": 4, "length": 4096, "warmup": 3,
                     "steps": 8, "seed": 42, "rank": 16},
    } | changes  # fmt: skip


def merged(folder: Path, *records: dict[str, Any]) -> str:
    from peers.table import SFT, merge

    results, document = folder / "results.jsonl", folder / "performance.md"
    results.write_text("".join(json.dumps(one) + "\n" for one in records))
    if not document.exists():
        document.write_text(f"# Before\n\n{SFT.begin}\nformer table\n{SFT.end}\n\nAfter.\n")
    merge(SFT, [results], document)
    text = document.read_text()
    assert text.startswith("# Before\n") and text.endswith(f"{SFT.end}\n\nAfter.\n") and "former" not in text
    return text


def test_merge_keeps_the_latest_finished_record_of_a_row(peers: None, tmp_path: Path) -> None:
    failed = record("ours-fp8", 0, "03", phase="steps", error="ended", tokens_per_s=0)
    text = merged(
        tmp_path,
        record("unsloth-bf16", 15211.0, "02"),
        record("ours-fp8", 20000.0, "01"),
        record("ours-fp8", 24000.0, "02", compile_cache="warm", first_step_s=9.0),
        failed,
    )
    rows = [line for line in text.splitlines() if line.startswith("| ") and "NVIDIA" not in line][1:]
    assert rows[0].startswith(
        "| swiftkit, FP8 base | no | 24,000 | 682.7 | 70.2 / 80.0 | 30.0 / 9.0 | 12.5000 → "
    )
    assert rows[1].startswith("| unsloth, bf16 base | no | 15,211 |")
    assert len(rows) == 2
    assert "Machine A: NVIDIA H200, driver 580" in text
    assert merged(tmp_path, record("unsloth-bf16", 15211.0, "02")).count("unsloth, bf16 base") == 1


def test_merge_shows_a_failure_where_nothing_finished(peers: None, tmp_path: Path) -> None:
    error = "no end of: first step, in 150 s"
    early = record("ours-fp8", 0, "01", phase="import", error="ImportError: none")
    del early["versions"]
    text = merged(tmp_path, record("unsloth-fp8", 0, "01", phase="first step", error=error), early)
    assert "| swiftkit, FP8 base | no | ImportError: none |" in text
    assert f"| unsloth, FP8 base | no | {error} |" in text


def test_merge_refuses_mixed_workloads_and_a_document_without_markers(peers: None, tmp_path: Path) -> None:
    from peers.table import SFT, merge

    short = record("ours-fp8", 1.0, "01")
    short["workload"] = short["workload"] | {"layers": 4}
    with pytest.raises(ValueError, match="2 different workloads"):
        merged(tmp_path, record("ours-bf16", 1.0, "01"), short)
    plain = tmp_path / "plain.md"
    plain.write_text("nothing\n")
    with pytest.raises(ValueError, match="sft_throughput: begin"):
        merge(SFT, [tmp_path / "results.jsonl"], plain)
