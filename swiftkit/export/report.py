"""`swiftkit report`: one page on one or several runs, from nothing but their folders."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from swiftkit.data.page import check_target
from swiftkit.errors import UserError
from swiftkit.formats.checkpoints import ARGS
from swiftkit.train.log import FILE
from swiftkit.train.run import SAMPLES

DATA = "data_report.json"
CHECKPOINT = "checkpoint-"


@dataclass(frozen=True, slots=True)
class Story:
    """What a run folder tells.

    Attributes:
        name: of the folder; with its parent's where two runs have the same.
        folder: where it is.
        args: the content of args.json.
        log: metrics by name: (step, value) in order of the steps.
        seconds: of training, up to the last log line.
        data: the content of data_report.json.
        samples: prompts with their answers before and after; empty while a run goes on.
    """

    name: str
    folder: Path
    args: dict[str, Any]
    log: dict[str, list[tuple[int, float]]]
    seconds: float
    data: dict[str, Any]
    samples: list[dict[str, str]]

    @property
    def step(self) -> int:
        """The last one that was logged."""
        return max((points[-1][0] for points in self.log.values()), default=0)

    @property
    def steps(self) -> int | None:
        """How many there should be; None where the folder does not say."""
        planned = self.args.get("plan", {}).get("steps")
        return planned if isinstance(planned, int) else None

    @property
    def finished(self) -> bool:
        """Whether it came to its end."""
        return (self.folder / SAMPLES).is_file()

    def last(self, metric: str) -> float | None:
        """The last value of a metric."""
        points = self.log.get(metric)
        return points[-1][1] if points else None

    def lowest(self, metric: str) -> tuple[int, float] | None:
        """The step with the lowest value of a metric, and that value."""
        return min(self.log.get(metric, ()), key=lambda point: point[1], default=None)

    def usual(self, metric: str) -> float | None:
        """The median of a metric, without the first line, in which things warm up."""
        values = [value for _, value in self.log.get(metric, ())]
        return median(values[1:] or values) if values else None

    def highest(self, metric: str) -> float | None:
        """The highest value of a metric."""
        return max((value for _, value in self.log.get(metric, ())), default=None)


def report(runs: Sequence[str | Path], *, output: str | Path = "report.html") -> Path:
    """Writes the page.

    Args:
        runs: run folders; a checkpoint of one stands for it.
        output: the page's file.

    Raises:
        UserError: a folder is no run, or cannot be read; there is no place for the page.
    """
    from swiftkit.export.report_page import report_page

    target = check_target("output", str(output), ".html")
    folders = list(dict.fromkeys(_folder(Path(run).expanduser()) for run in runs))
    names = _names(folders)
    stories = [read_run(folder, name) for folder, name in zip(folders, names, strict=True)]
    target.write_text(report_page(stories), encoding="utf-8")
    return target


def read_run(folder: Path, name: str) -> Story:
    """Everything that a run folder tells.

    Raises:
        UserError: a file of it is damaged.
    """
    log, seconds = _log(folder / FILE)
    return Story(
        name=name,
        folder=folder,
        args=_object(folder / ARGS),
        log=log,
        seconds=seconds,
        data=_object(folder / DATA) if (folder / DATA).is_file() else {},
        samples=_samples(folder / SAMPLES) if (folder / SAMPLES).is_file() else [],
    )


def _folder(path: Path) -> Path:
    """The run folder that is meant."""
    if path.name.startswith(CHECKPOINT) and (path.parent / ARGS).is_file():
        path = path.parent
    if (path / ARGS).is_file():
        return path
    if not path.is_dir():
        raise UserError(f"{path} is no folder; give a run's, such as output/<model>/v0-...")
    inside = sorted(found.parent for found in [*path.glob(f"*/{ARGS}"), *path.glob(f"*/*/{ARGS}")])
    inside = [found for found in inside if not found.name.startswith(CHECKPOINT)]
    offer = f"; there are {len(inside)} of them in it, such as {inside[0]}" if inside else ""
    raise UserError(f"{path} is no run folder: it has no {ARGS}{offer}")


def _names(folders: Sequence[Path]) -> list[str]:
    """Short names that tell the runs apart."""
    for parts in range(1, 4):
        names = ["/".join(folder.resolve().parts[-parts:]) for folder in folders]
        if len(set(names)) == len(names):
            return names
    return [str(folder) for folder in folders]


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as failure:
        raise UserError(f"{path} cannot be read as JSON: {failure}; is it another program's?") from None


def _object(path: Path) -> dict[str, Any]:
    content = _json(path)
    if not isinstance(content, dict):
        raise UserError(f"{path} is no JSON object; is it another program's?")
    return content


def _samples(path: Path) -> list[dict[str, str]]:
    content = _json(path)
    if not isinstance(content, list) or not all(isinstance(sample, dict) for sample in content):
        raise UserError(f"{path} is no list of samples; is it another program's?")
    return [{name: str(words) for name, words in sample.items()} for sample in content]


def _log(path: Path) -> tuple[dict[str, list[tuple[int, float]]], float]:
    """Metrics over the steps, and the seconds of the last line.

    A step that was logged twice counts as it was logged last. The last line may be half written, by a run
    that goes on or was killed.
    """
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n") if path.is_file() else []
    except OSError as failure:
        raise UserError(f"{path} cannot be read: {failure.strerror or failure}") from None
    metrics: dict[str, dict[int, float]] = {}
    seconds = 0.0
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
            step = int(values.pop("step"))
        except (ValueError, KeyError, TypeError, AttributeError):
            if number == len(lines):  # without its line end: half written
                break
            raise UserError(f"{path}:{number}: no line of metrics with a step; is it damaged?") from None
        seconds = float(values.pop("elapsed_seconds", seconds))
        for name, value in values.items():
            if isinstance(value, int | float) and math.isfinite(value):
                metrics.setdefault(name, {})[step] = float(value)
    return {name: sorted(points.items()) for name, points in metrics.items()}, seconds
