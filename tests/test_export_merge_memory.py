"""A merge holds a few pieces of tensors, never a model: measured in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

MIB = 1 << 20


@pytest.mark.parametrize(("precision", "base"), [("bf16", "original"), ("nf4", "dequantized")])
@pytest.mark.slow
@pytest.mark.timeout(1900)
def test_memory_does_not_grow_with_the_model(precision: str, base: str, tmp_path: Path) -> None:
    """Twice the layers and a model of a gigabyte: the peak grows by the larger adapter, and is small."""
    small, large = (measure(tmp_path, layers, precision, base) for layers in (8, 16))
    for found in (small, large):
        print(
            {
                name: f"{value / MIB:.0f} MiB"
                for name, value in found.items()
                if name not in ("seconds", "shards")
            }
        )
    grown = [found["peak"] - found["before"] - found["adapter"] for found in (small, large)]
    assert large["model"] > 900 * MIB and large["shards"] > 8
    assert max(grown) < 280 * MIB < large["model"] / 3
    assert grown[1] < grown[0] + 40 * MIB  # a model kept would add 430


def measure(folder: Path, layers: int, precision: str, base: str) -> dict[str, float]:
    shape = [
        "--hidden",
        "1536",
        "--intermediate",
        "4608",
        "--heads",
        "16",
        "--vocabulary",
        "16384",
        "--shard_bytes",
        "100000000",
    ]
    options = {"layers": layers, "precision": precision, "merge_base": base, "folder": folder, "threads": 1}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, str(ROOT / "benchmarks" / "merge_memory.py"), *shape, *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=900)
    assert done.returncode == 0, done.stderr
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found
