"""Metrics on their way out: `logging.jsonl` always, TensorBoard and others as asked, a line for the eye."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
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

FILE = "logging.jsonl"


class Writer(Protocol):
    """Where metrics also go."""

    def write(self, values: dict[str, float], step: int) -> None:
        """Take the metrics of a step."""

    def close(self) -> None:
        """Flush and end."""


class TensorBoardWriter:
    """Event files in the run's `runs/` folder."""

    def __init__(self, folder: Path, _: dict[str, Any]):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "runs"))

    def write(self, values: dict[str, float], step: int) -> None:
        """Take the metrics of a step."""
        for name, value in values.items():
            group = "eval" if name.startswith("eval_") else "train"
            self._writer.add_scalar(f"{group}/{name.removeprefix('eval_')}", value, step)

    def close(self) -> None:
        """Flush and end."""
        self._writer.close()


class WandbWriter:
    """Weights & Biases; its own environment variables choose project and mode."""

    def __init__(self, folder: Path, settings: dict[str, Any]):
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


class Log:
    """One run's metrics.

    Args:
        folder: the run folder.
        steps: how many there will be.
        report_to: names of WRITERS; `none` is nobody.
        settings: the run's configuration, for writers that show it.
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
    ):
        self._writers: list[Writer] = [
            WRITERS[name](folder, settings) for name in report_to if name != "none"
        ]
        self._folder = folder
        self._file = (folder / FILE).open("a", encoding="utf-8")
        self._start = time.perf_counter()
        self._steps = steps
        self._done = 0
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
        self._task = self._bar.add_task("training", total=steps, status="first step")

    def __enter__(self) -> Log:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._bar.stop()
        self._file.close()
        for writer in self._writers:
            writer.close()
        if kind is KeyboardInterrupt:
            words = f"\nstopped after {self._done} of {self._steps} steps; the log is in {self._folder}"
            self._console.print(words, highlight=False, markup=False, soft_wrap=True)

    def training(self, values: dict[str, float], *, step: int, epoch: float, learning_rate: float) -> None:
        """Metrics since the last line."""
        self._write({"epoch": epoch, "learning_rate": learning_rate, **values}, step)
        status = (
            f"loss {values['loss']:.4f}  lr {learning_rate:.2e}  {values['tokens_per_second']:,.0f} tokens/s"
        )
        self._done = step
        self._bar.update(self._task, completed=step, status=status)
        if self._line is not None:
            spent = time.perf_counter() - self._start
            left = _clock(spent / step * (self._steps - step))
            self._line.show(f"step {step}/{self._steps}  {status}  {left} left")
        elif not self._console.is_terminal:
            self._console.print(f"step {step}/{self._steps}  {status}", highlight=False, soft_wrap=True)

    def evaluation(self, values: dict[str, float], *, step: int) -> None:
        """Metrics of an evaluation after `step` steps."""
        self._write(values, step)
        words = "  ".join(f"{name.removeprefix('eval_')} {value:,.4f}" for name, value in values.items())
        text = f"step {step}/{self._steps}  evaluation: {words}"
        self._console.print(text, highlight=False, soft_wrap=True)

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
