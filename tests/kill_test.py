"""SIGKILL at random moments, then resume, then compare with the unbroken run bit for bit.

python -m tests.kill_test --times 200 [--seed 1]

Each time a run is killed again and again until it ends by itself: the longer it lives, the more it gets done.
A process forked from this one does the run, so that what takes seconds to import is imported once; everything
else is the real path, from the config to the run folder.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from swiftkit.config import SftConfig
from swiftkit.methods import sft
from swiftkit.train.artifact import read_model
from swiftkit.train.checkpoint import damage, read_facts, read_snapshot, same_bytes
from swiftkit.train.run import checkpoints, runs_of
from tests import tiny

ROWS = 20
STEPS = 16
SURE = 20  # lives after which a run may end by itself, whatever the draw says
CLOCKS = ("elapsed_seconds", "tokens_per_second")  # the only values that may differ


@dataclass
class Tally:
    """What the kills met.

    Args:
        moments: kills by what the run was doing.
        kills, times: of processes, and of runs that were compared.
    """

    moments: Counter[str] = field(default_factory=Counter)
    kills: int = 0
    times: int = 0

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {count}" for name, count in self.moments.most_common())
        return f"{self.times} runs, {self.kills} kills ({parts})"


class KillTest:
    """One model and one data set, on which runs are killed.

    Args:
        folder: for everything.
        draw: decides the moments.
    """

    def __init__(self, folder: Path, draw: random.Random):
        self._folder, self._draw, self.tally = folder, draw, Tally()
        self._model = folder / "toy"
        tiny.make_toy(self._model, template="chatml")
        rows = [{"prompt": f"say {n}: ", "completion": "abcdefgh"[: 1 + n % 8]} for n in range(ROWS)]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        sft.run(self._config("warm"), Console(quiet=True))  # imports for all that is forked from here
        spans = []
        for name in ("whole", "again"):
            began = time.monotonic()
            self._live(name, None)
            spans.append(time.monotonic() - began)
        self._span = min(spans)  # seconds of a whole run
        self._whole = only_run(folder / "whole")
        compare(self._whole, only_run(folder / "again"))
        print(f"a whole run takes {self._span:.2f} s", flush=True)

    def once(self) -> None:
        """Kill one run until it is through.

        Raises:
            AssertionError: when it differs from the unbroken one.
        """
        output = self._folder / "killed"
        shutil.rmtree(output, ignore_errors=True)
        for life in range(SURE + 1):
            longest = self._span * min(0.4 + 0.2 * life, 1.0)  # later lives have less to do, and should end
            after = None if life == SURE else self._draw.uniform(0, longest)
            if self._live("killed", after):
                break
            self.tally.kills += 1
            self.tally.moments[moment(output)] += 1
            for run in output.glob("*/v*"):
                unsound = [damage(path) for path in checkpoints(run) if damage(path) is not None]
                assert not unsound, f"a final name for what is not whole: {unsound}"
        compare(self._whole, only_run(output))
        self.tally.times += 1

    def _live(self, output: str, kill_after: float | None) -> bool:
        """Fork a process that starts or resumes the run; whether it ended by itself."""
        child = os.fork()
        if child == 0:
            self._child(output)
        if kill_after is not None:
            time.sleep(kill_after)
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            assert os.WTERMSIG(status) == signal.SIGKILL, f"the run died of signal {os.WTERMSIG(status)}"
            return False
        assert os.WEXITSTATUS(status) == 0, (self._folder / f"{output}.txt").read_text()[-4000:]
        return True

    def _child(self, output: str) -> None:
        """The run itself; never returns."""
        code = 1
        try:
            with (self._folder / f"{output}.txt").open("a") as file:
                torch.manual_seed(os.getpid())  # a new process has drawn other numbers before
                console = Console(file=file, width=400)
                try:
                    sft.run(self._config(output), console)
                    code = 0
                except Exception:
                    console.print_exception()
        finally:
            os._exit(code)

    def _config(self, output: str) -> SftConfig:
        return SftConfig(
            model=str(self._model), dataset=[str(self._folder / "rows.jsonl")], split_dataset_ratio=0.2,
            output_dir=str(self._folder / output), device="cpu", report_to=["none"], sample_prompts=[],
            learning_rate=5e-3, lora_rank=4, lora_dropout=0.1, max_steps=STEPS, global_batch_size=4,
            per_device_train_batch_size=2, logging_steps=5, eval_steps=4, save_steps=1, save_total_limit=2,
            metric_for_best_model="eval_loss", resume_from_checkpoint="auto",
        )  # fmt: skip


def only_run(output: Path) -> Path:
    """The run folder that has a checkpoint: those killed before their first one are left behind."""
    found = [run for run in runs_of(str(output), "toy") if checkpoints(run)]
    assert len(found) == 1, f"{len(found)} runs have checkpoints in {output}"
    return found[0]


def moment(output: Path) -> str:
    """What the killed run was doing, by what it left."""
    runs = runs_of(str(output), "toy")
    if not runs:
        return "before there was a run folder"
    if list(runs[0].glob(".checkpoint-*.removed")):
        return "removing an old checkpoint"
    if list(runs[0].glob(".checkpoint-*.partial")):
        return "writing a checkpoint"
    steps = [read_facts(path)["step"] for path in checkpoints(runs[0])[-1:] if damage(path) is None]
    if not steps:
        return "before the first checkpoint"
    return "between checkpoints" if steps[0] < STEPS else "after the last checkpoint"


def compare(whole: Path, other: Path) -> None:
    """Log, trained tensors, moments, random numbers and the choice of the best: all bit for bit.

    Raises:
        AssertionError: naming what differs.
    """
    one, two = (lines(run) for run in (whole, other))
    assert one == two, f"log lines differ:\n{one}\n{two}"
    assert (whole / "best.json").read_text() == (other / "best.json").read_text()
    assert [path.name for path in checkpoints(whole)][-2:] == [path.name for path in checkpoints(other)][-2:]
    last = f"checkpoint-{STEPS}"
    models = [read_model(run / last) for run in (whole, other)]
    snapshots = [read_snapshot(run / last) for run in (whole, other)]
    for mine, theirs in (models, [snapshot.tensors for snapshot in snapshots]):
        assert mine.keys() == theirs.keys()
        odd = [name for name in mine if not same_bytes(mine[name], theirs[name])]
        assert not odd, f"tensors differ: {odd}"
    assert snapshots[0].facts == snapshots[1].facts


def lines(run: Path) -> list[dict[str, Any]]:
    """The log without what a clock decides."""
    found = [json.loads(line) for line in (run / "logging.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in CLOCKS} for line in found]


def kill_test(times: int, seed: int, folder: Path) -> Tally:
    """Run the whole test; `seed` decides the moments, as far as a clock lets it."""
    torch.set_num_threads(1)
    test = KillTest(folder, random.Random(seed))
    for number in range(times):
        test.once()
        if (number + 1) % 10 == 0:
            print(f"{number + 1} of {times}: {test.tally}", flush=True)
    return test.tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        tally = kill_test(options.times, options.seed, Path(folder))
    print(f"equal bit for bit: {tally}, {time.monotonic() - began:.0f} s")
    sys.exit(0)


if __name__ == "__main__":
    main()
