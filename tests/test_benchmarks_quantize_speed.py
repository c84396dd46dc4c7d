"""The benchmark of quantization runs on a CPU at a tiny shape, and its parts are the whole."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "quantize_speed.py"


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_parts_add_up_and_the_whole_model_is_predicted(method: str, tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    words = f"--method {method} --shape tiny --layers 1 --windows 4 --length 64 --judged 1 --group_size 32"
    command = [sys.executable, str(SCRIPT), *words.split(), "--device", "cpu"]
    done = subprocess.run(
        [*command, "--scratch", str(tmp_path), "--results", str(results)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (record,) = [json.loads(line) for line in results.read_text().splitlines()]
    assert record["layers"] == 1 and record["total_s"] > 0
    assert sum(record["seconds"].values()) == pytest.approx(record["total_s"], abs=0.2)
    assert {"forward", "hessians", "solving", "packing", "writing"} < record["seconds"].keys()
    assert record["predicted_s"] >= record["total_s"]
    assert "all 2 layers: " in done.stdout
