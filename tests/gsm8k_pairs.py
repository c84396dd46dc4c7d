"""Preferences of the real world: a right solution of a school problem against a wrong one, by four models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MODELS = ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification")


def pairs(solutions: Path) -> Iterator[dict[str, Any]]:
    """One pair for each problem that some model solved and another did not; they take turns."""
    for number, line in enumerate(solutions.read_text(encoding="utf-8").splitlines()):
        row = json.loads(line)
        by_truth: dict[bool, list[str]] = {True: [], False: []}
        for model in MODELS:
            by_truth[row[model]["is_correct"]].append(row[model]["solution"])
        right, wrong = by_truth[True], by_truth[False]
        if right and wrong:
            asked = {"role": "user", "content": row["question"]}
            good, bad = right[number % len(right)], wrong[number % len(wrong)]
            yield {"messages": [asked, {"role": "assistant", "content": good}], "rejected_response": bad}


def write(
    solutions: Path, folder: Path, *, training: int, held_out: int, longest: int = 4000
) -> tuple[Path, Path]:
    """Files of disjoint problems to train on and to hold out, of rows of at most so many characters."""
    found = [json.dumps(pair, ensure_ascii=False) + "\n" for pair in pairs(solutions)]
    found = [line for line in found if len(line) <= longest]
    files = folder / "train.jsonl", folder / "held-out.jsonl"
    files[0].write_text("".join(found[:training]), encoding="utf-8")
    files[1].write_text("".join(found[training : training + held_out]), encoding="utf-8")
    return files
