"""Signals and kills against real processes: exit codes, and what is left to go on from."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from swiftkit.train.checkpoint import damage
from tests import kill_test, tiny
from tests.training import logged, saved

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_and_exits_with_its_own_code(number: int, code: int, tmp_path: Path) -> None:
    """Case 18: a complete checkpoint of the last finished step, then the signal's code; then it goes on."""
    tiny.make_toy(tmp_path / "toy", template="chatml")
    rows = [{"prompt": f"say {n}: ", "completion": "abcd"} for n in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [
        sys.executable, "-m", "swiftkit", "sft", "--model", str(tmp_path / "toy"), "--dataset",
        str(tmp_path / "rows.jsonl"), "--output_dir", str(tmp_path / "output"), "--device", "cpu",
        "--max_steps", "4000", "--save_steps", "4000", "--logging_steps", "1", "--sample_prompts", "none",
        "--report_to", "none", "--resume_from_checkpoint", "auto",
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    reached = []
    for _ in range(2):
        process = subprocess.Popen(
            words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        before = reached[-1] if reached else 0
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and process.poll() is None:
            log = next(tmp_path.glob("output/toy/v0-*/logging.jsonl"), None)
            if log is not None and len(log.read_text().splitlines()) > before + 3:
                break
            time.sleep(0.01)
        process.send_signal(number)
        said, errors = process.communicate(timeout=120)
        assert process.returncode == code, errors.decode()
        assert b"stopping after this step, which is then saved" in said
        (folder,) = (tmp_path / "output" / "toy").iterdir()
        reached.append(saved(folder)[-1])
        assert damage(folder / f"checkpoint-{reached[-1]}") is None
        assert [line["step"] for line in logged(folder)] == list(range(1, reached[-1] + 1))
    assert reached[1] > reached[0] >= 4


@pytest.mark.slow
def test_killed_at_random_moments_a_run_ends_as_the_unbroken_one(seed: int, tmp_path: Path) -> None:
    """Five of what `make kill-test N=200` does as often as one likes."""
    # A process of its own: this one may have threads, which a fork does not take along.
    words = [sys.executable, "-m", "tests.kill_test", "--times", "5", "--seed", str(seed)]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "equal bit for bit: 5 runs" in done.stdout


def test_the_kill_test_sees_a_difference(tmp_path: Path) -> None:
    for name, step in (("one", 1), ("other", 2)):
        (tmp_path / name).mkdir()
        line = json.dumps({"step": step, "elapsed_seconds": step})
        (tmp_path / name / "logging.jsonl").write_text(line + "\n")
    with pytest.raises(AssertionError, match="log lines differ"):
        kill_test.compare(tmp_path / "one", tmp_path / "other")
