"""The benchmark of the data path runs, and finds two starts equal (its numbers are no test's business)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import tiny

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_the_benchmark_fills_its_places(tmp_path: Path, shared_data: Path) -> None:
    tiny.make_toy(tmp_path / "model", template="chatml")
    document = tmp_path / "performance.md"
    marks = [
        f"<!-- data_throughput {name}: {word} -->"
        for name in ("rates", "memory")
        for word in ("begin", "end")
    ]
    document.write_text("\n".join(["before", *marks, "after"]))
    script = [sys.executable, str(ROOT / "benchmarks" / "data_throughput.py"), "--into", str(document)]
    common = ["--model", str(tmp_path / "model"), "--shared", str(shared_data), "--scratch", str(tmp_path)]
    for own in (["--rows", "300"], ["--rate_rows", "60", "--repeats", "1"]):
        subprocess.run([*script, *common, *own], check=True, cwd=ROOT)
    written = document.read_text()
    assert written.startswith("before\n") and written.endswith("\nafter")
    assert "| second | " in written and "Fingerprint and report of both starts are equal." in written
    assert "| the whole path, one process | " in written
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("data-throughput")] == []
