"""The benchmark of DPO runs on a CPU at a tiny shape, and its rows train the same pairs."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def run(folder: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]]:
    """The script's end and its records."""
    results = folder / "results.jsonl"
    command = [sys.executable, str(BENCHMARKS / "align_throughput.py"), "--shape", "tiny", "--scratch"]
    command += [str(folder), "--results", str(results), "--prompt", "24", "--answer", "16", "--pairs", "2"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True)
    lines = results.read_text().splitlines() if results.exists() else []
    return done, [json.loads(line) for line in lines]


@pytest.mark.slow
def test_rows_begin_with_the_same_loss(tmp_path: Path) -> None:
    rows = "trl,trl-cached,ours-bf16"
    done, records = run(tmp_path, "--random_weights", "--rows", rows, "--warmup", "1", "--steps", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [record["row"] for record in records] == rows.split(",")
    for record in records:
        assert record["phase"] == "done", done.stdout
        assert record["first_loss"] == pytest.approx(math.log(2), rel=2e-2)
        assert ("reference_s" in record) == (record["row"] != "trl")
        assert done.stdout.count("with the reference known") == len(records)
    # B is zero and A random: only the size of the gradient is comparable.
    norms = [record["first_grad_norm"] for record in records]
    assert norms[0] > 0 and norms == pytest.approx([norms[0]] * 3, rel=0.3)


def test_where_the_weights_come_from_is_said(tmp_path: Path) -> None:
    done, records = run(tmp_path, "--rows", "trl")
    assert done.returncode == 2 and "give --random_weights or --model FOLDER" in done.stderr and not records


def test_pairs_a_second_count_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from align_throughput import rates

    record = {"tokens_per_s": 4096.0, "workload": {"length": 1024, "documents": 4, "warmup": 2, "steps": 8}}
    assert rates(record) == (2.0, 2.0)
    assert rates({**record, "reference_s": 20.0}) == (2.0, pytest.approx(1.0))


def test_records_become_a_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from align_throughput import TABLE
    from peers.table import merge

    workload = {
        "shape": "llama3-8b", "layers": 32, "documents": 4, "length": 1024, "prompt": 512, "warmup": 3,
        "steps": 7, "seed": 42, "rank": 16,
    }  # fmt: skip
    records = [
        {
            "row": row, "phase": "done", "date": "2026-12-04T03:00:00+00:00", "commit": "abc",
            "checkpointing": False, "workload": workload, "tokens_per_s": rate, "median_step_ms": 300.0,
            "first_loss": 0.6931, "last_loss": 0.6, "first_grad_norm": 70.0, "last_grad_norm": 60.0,
            "machine": {"id": "G", "card": "H200", "driver": "580", "clocks": "", "python": "3.12"},
        } | more
        for row, rate, more in (("trl-liger", 8192.0, {}), ("ours-fp8", 16384.0, {"reference_s": 2.5}))
    ]  # fmt: skip
    document, results = tmp_path / "performance.md", tmp_path / "results.jsonl"
    document.write_text(f"{TABLE.begin}\n{TABLE.end}\n")
    results.write_text("".join(json.dumps(record) + "\n" for record in records))
    merge(TABLE, [results], document)
    rows = [line for line in document.read_text().splitlines() if line.startswith("| ")][1:]
    assert rows[0].startswith("| swiftkit, FP8 base | no | 5.33 | 8.00 | 300.0 |")
    assert rows[1].startswith("| TRL DPOTrainer + Liger | no | 4.00 | 4.00 | 300.0 |")
