"""Metrics on their way out: `logging.jsonl` always, TensorBoard and others as asked, a line for the eye."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

from swiftkit.errors import UserError
from swiftkit.train.stop import Terminated

FILE = "logging.jsonl"


class Writer(Protocol):
    """Where metrics also go."""

    def write(self, values: dict[str, float], step: int) -> None:
        """Take the metrics of a step."""

    def close(self) -> None:
        """Flush and end."""


class TensorBoardWriter:
    """Event files in the run's `runs/` folder."""

    def __init__(self, folder: Path, _: dict[str, Any], done: int):
        from torch.utils.tensorboard import SummaryWriter

        # A resumed run says that later steps, which an earlier process logged, did not happen.
        self._writer = SummaryWriter(str(folder / "runs"), purge_step=done + 1 if done else None)

    def write(self, values: dict[str, float], step: int) -> None:
        """Take the metrics of a step."""
        for name, value in values.items():
            group = "eval" if name.startswith("eval_") else "train"
            self._writer.add_scalar(f"{group}/{name.removeprefix('eval_')}", value, step)

    def close(self) -> None:
        """Flush and end."""
        self._writer.close()


class WandbWriter:
    """Weights & Biases; its own environment variables choose project and mode. A resumed run is a new one."""

    def __init__(self, folder: Path, settings: dict[str, Any], _: int):
        import wandb

        self._run = wandb.init(dir=str(folder), name=folder.name, config=settings)

    def write(self, values: dict[str, float], step: int) -> None:
        """Take the metrics of a step."""
        self._run.log(values, step=step)

    def close(self) -> None:
        """Flush and end."""
        self._run.finish()


WRITERS: dict[str, type[TensorBoardWriter] | type[WandbWriter]] = {
    "tensorboard": TensorBoardWriter,
    "wandb": WandbWriter,
}
NEEDS = {"wandb": "swiftkit[wandb]"}  # what to install for a writer whose package is not always there


def check_writers(report_to: Iterable[str]) -> None:
    """Refuse writers whose package is missing.

    Raises:
        UserError: with what to install.
    """
    for name in report_to:
        if name in NEEDS and find_spec(name) is None:
            raise UserError(f"--report_to {name} needs its package: pip install '{NEEDS[name]}'")


class TimeLeft(ProgressColumn):
    """Time left while it runs, time taken at its end."""

    def render(self, task: Task) -> Text:
        """The column's text."""
        if task.finished:
            return Text(f"took {_clock(task.finished_time)}")
        return Text(f"{_clock(task.time_remaining)} left")


def _clock(seconds: float | None) -> str:
    return "-:--:--" if seconds is None else str(timedelta(seconds=int(seconds)))


class NotebookLine:
    """A line of text in a notebook that is written over, where a terminal has a bar."""

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, text: str) -> None:
        """Put `text` in the place of the last one."""
        display = import_module("IPython.display").display  # the notebook's own
        data = {"text/plain": text}
        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)


def _cut(path: Path, size: int) -> None:
    """Keep the whole lines in the first `size` bytes of a file that may be there, and may be shorter."""
    if path.is_file():
        kept = path.read_bytes()[:size]
        os.truncate(path, kept.rfind(b"\n") + 1)


class Log:
    """One run's metrics.

    Args:
        folder: the run folder.
        steps: how many there will be.
        report_to: names of WRITERS; `none` is nobody.
        settings: the run's configuration, for writers that show it.
        resumed: what `position` said when the checkpoint was made that the run goes on from; lines behind it
            are cut off.
        console: where people look: a bar on a terminal, a line that changes in a notebook, else a line a log
            step.
    """

    def __init__(
        self,
        folder: Path,
        *,
        steps: int,
        report_to: Sequence[str],
        settings: dict[str, Any],
        console: Console,
        resumed: Mapping[str, Any] | None = None,
    ):
        resumed = resumed or {"step": 0, "bytes": 0, "seconds": 0.0}
        self._done = int(resumed["step"])
        self._writers: list[Writer] = [
            WRITERS[name](folder, settings, self._done) for name in report_to if name != "none"
        ]
        self._folder = folder
        _cut(folder / FILE, resumed["bytes"])
        self._file = (folder / FILE).open("a", encoding="utf-8")
        self._start = time.perf_counter() - resumed["seconds"]
        self._began = self._done, time.perf_counter()
        self._steps = steps
        self._console = console
        self._line = NotebookLine() if console.is_jupyter else None
        self._bar = Progress(
            BarColumn(bar_width=None),  # the one that gives way on a narrow screen
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[status]}"),
            TimeLeft(table_column=Column(no_wrap=True)),
            console=console,
            disable=not console.is_terminal,
            speed_estimate_period=300,
        )
        self._task = self._bar.add_task("training", total=steps, completed=self._done, status="first step")

    def __enter__(self) -> Log:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._bar.stop()
        self._file.close()
        for writer in self._writers:
            writer.close()
        if kind is not None and issubclass(kind, KeyboardInterrupt | Terminated):
            words = f"\nstopped after {self._done} of {self._steps} steps; the log is in {self._folder}"
            self._console.print(words, highlight=False, markup=False, soft_wrap=True)

    def training(self, values: dict[str, float], *, step: int, epoch: float, learning_rate: float) -> None:
        """Metrics since the last line."""
        self._write({"epoch": epoch, "learning_rate": learning_rate, **values}, step)
        loss = f"{values['loss']:.4f}" if "loss" in values else "of no step"  # all were held back
        status = f"loss {loss}  lr {learning_rate:.2e}  {values['tokens_per_second']:,.0f} tokens/s"
        self._done = step
        self._bar.update(self._task, completed=step, status=status)
        if self._line is not None:
            first, start = self._began
            left = _clock((time.perf_counter() - start) / (step - first) * (self._steps - step))
            self._line.show(f"step {step}/{self._steps}  {status}  {left} left")
        elif not self._console.is_terminal:
            self._console.print(f"step {step}/{self._steps}  {status}", highlight=False, soft_wrap=True)

    def evaluation(self, values: dict[str, float], *, step: int) -> None:
        """Metrics of an evaluation after `step` steps."""
        self._write(values, step)
        words = "  ".join(f"{name.removeprefix('eval_')} {value:,.4f}" for name, value in values.items())
        text = f"step {step}/{self._steps}  evaluation: {words}"
        self._console.print(text, highlight=False, soft_wrap=True)

    def position(self) -> dict[str, Any]:
        """Where the log is now, for `resumed` of a later one."""
        seconds = time.perf_counter() - self._start
        return {"step": self._done, "bytes": self._file.tell(), "seconds": seconds}

    def say(self, text: str) -> None:
        """A sentence for people, between the lines."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def advance(self, step: int) -> None:
        """A step without metrics: nothing is read from the device."""
        self._done = step
        self._bar.update(self._task, completed=step)

    def _write(self, values: dict[str, float], step: int) -> None:
        line = {"step": step, **values, "elapsed_seconds": time.perf_counter() - self._start}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()
        for writer in self._writers:
            writer.write(values, step)


class SilentLog(Log):
    """The log of a rank that leaves writing to the first one.

    Args:
        rank: named before what has to be said all the same.
    """

    def __init__(self, rank: int):
        self._rank = rank

    def __enter__(self) -> SilentLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        pass

    def training(self, values: dict[str, float], *, step: int, epoch: float, learning_rate: float) -> None:
        """Nothing: the first rank has the same numbers."""

    def evaluation(self, values: dict[str, float], *, step: int) -> None:
        """Nothing, as above."""

    def position(self) -> dict[str, Any]:
        """Of no use: this rank writes no checkpoint."""
        return {}

    def say(self, text: str) -> None:
        """To the standard error output, which the launcher keeps."""
        print(f"rank {self._rank}: {text}", file=sys.stderr, flush=True)

    def advance(self, step: int) -> None:
        """Nothing."""
