"""The benchmark of DPO's learning: questions held out, writers balanced, and a tiny model that runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests import tiny

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
WRITERS = ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification")


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import dpo_learning

    return dpo_learning


def solutions(count: int, seed: int) -> list[dict[str, Any]]:
    import random

    draw = random.Random(seed)
    return [
        {"question": f"{n}+1?", "ground_truth": f"{n + 1}"}
        | {name: {"is_correct": draw.random() < 0.5, "solution": f"{name[:1]} {n}"} for name in WRITERS}
        for n in range(count)
    ]


def made(module: Any, rows: list[dict[str, Any]], contrast: str) -> dict[str, list[dict[str, Any]]]:
    return {
        row["question"]: [{"writers": list(writers)} for writers in module.sides(row, contrast)]
        for row in rows
        if any(module.sides(row, contrast))
    }


def test_whole_questions_are_held_out_one_pair_of_each(module: Any, seed: int) -> None:
    pairs = {name: [{"at": (name, n)} for n in range(3)] for name in "abcdefgh"}
    training, held_out = module.split(pairs, seed, 3)
    assert len(held_out) == 3 and len(training) == 15
    assert not {row["at"][0] for row in training} & {row["at"][0] for row in held_out}
    assert module.split(pairs, seed, 3) == (training, held_out)


def test_right_is_chosen_and_writers_can_be_balanced(module: Any, seed: int) -> None:
    rows = solutions(60, seed)
    for row in rows:
        right = {name: row[name]["is_correct"] for name in WRITERS}
        for good, bad in module.sides(row, "right"):
            assert right[good] and not right[bad]
        for good, bad in module.sides(row, "people"):
            assert good == "ground_truth" and not right[bad]
    balanced = module.balanced(made(module, rows, "right"))
    wins = Counter(tuple(pair["writers"]) for own in balanced.values() for pair in own)
    assert wins and all(wins[bad, good] == count for (good, bad), count in wins.items())


def test_the_interval_is_wilsons(module: Any) -> None:
    low, high = module.wilson(0.9, 10)  # as in tables
    assert (low, high) == (pytest.approx(0.596, abs=1e-3), pytest.approx(0.982, abs=1e-3))


@pytest.mark.slow
def test_the_script_on_a_tiny_model(tmp_path: Path, seed: int) -> None:
    tiny.make_toy(tmp_path / "toy", seed=1)
    file, document = tmp_path / "solutions.jsonl", tmp_path / "docs" / "a.md"
    file.write_text("".join(json.dumps(row) + "\n" for row in solutions(40, seed)))
    document.parent.mkdir()
    document.write_text("<!-- dpo_learning people: begin -->\n<!-- dpo_learning people: end -->\n")
    command = [sys.executable, str(BENCHMARKS / "dpo_learning.py"), "--output_dir", str(tmp_path / "out")]
    asked = ["--solutions", file, "--model", tmp_path / "toy", "--seeds", 0, 1, "--held_out", 6, "--steps", 2]
    done = subprocess.run(
        [*command, *map(str, asked), "--batch", "4", "--into", str(document)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [(row["seed"], row["before"], row["pairs"]) for row in found] == [(0, 0.5, 6), (1, 0.5, 6)]
    assert "| mean |" in document.read_text()
    assert (document.parent / "images" / "dpo_learning-people.png").stat().st_size > 5_000
