"""Metrics on their way out: `logging.jsonl` always, TensorBoard and others as asked, a line for the eye."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

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
        try:
            import wandb
        except ImportError:
            raise UserError("--report_to wandb needs its package: pip install 'swiftkit[wandb]'") from None
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


class Log:
    """One run's metrics.

    Args:
        folder: the run folder.
        steps: how many there will be.
        report_to: names of WRITERS; `none` is nobody.
        settings: the run's configuration, for writers that show it.
        console: where people look; a bar on a terminal, a line a log step elsewhere.
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
        self._file = (folder / FILE).open("a", encoding="utf-8")
        self._start = time.perf_counter()
        self._steps = steps
        self._console = console
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("training", total=steps, status="first step")

    def __enter__(self) -> Log:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
        self._file.close()
        for writer in self._writers:
            writer.close()

    def training(self, values: dict[str, float], *, step: int, epoch: float, learning_rate: float) -> None:
        """Metrics since the last line."""
        self._write({"epoch": epoch, "learning_rate": learning_rate, **values}, step)
        status = (
            f"loss {values['loss']:.4f}  lr {learning_rate:.2e}  {values['tokens_per_second']:,.0f} tokens/s"
        )
        self._bar.update(self._task, completed=step, status=status)
        if not self._console.is_terminal:
            self._console.print(f"step {step}/{self._steps}  {status}", highlight=False)

    def evaluation(self, values: dict[str, float], *, step: int) -> None:
        """Metrics of an evaluation after `step` steps."""
        self._write(values, step)
        words = "  ".join(f"{name.removeprefix('eval_')} {value:.4f}" for name, value in values.items())
        self._console.print(f"evaluation after {step} steps: {words}", highlight=False)

    def advance(self, step: int) -> None:
        """A step without metrics: nothing is read from the device."""
        self._bar.update(self._task, completed=step)

    def _write(self, values: dict[str, float], step: int) -> None:
        line = {"step": step, **values, "elapsed_seconds": time.perf_counter() - self._start}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        for writer in self._writers:
            writer.write(values, step)
