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
    assert done.returncode == 2 and "--random_weights --model is required" in done.stderr and not records


def test_pairs_a_second_count_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from align_throughput import rates

    record = {"tokens_per_s": 4096.0, "workload": {"length": 1024, "documents": 4, "warmup": 2, "steps": 8}}
    assert rates(record) == (2.0, 2.0)
    assert rates({**record, "reference_s": 20.0}) == (2.0, pytest.approx(1.0))
