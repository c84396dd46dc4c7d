"""Metrics on their way out: the file, TensorBoard, and what a person sees."""

from __future__ import annotations

import io
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from swiftkit.errors import UserError
from swiftkit.train.log import FILE, Log, NotebookLine, TimeLeft, check_writers

VALUES = {"loss": 2.5, "grad_norm": 0.75, "tokens_per_second": 25_431.9}
EVALUATED = {"eval_loss": 2.25, "eval_perplexity": 9.4877}


def log_of(folder: Path, console: Console, *, steps: int = 20, report_to: tuple[str, ...] = ("none",)) -> Log:
    return Log(folder, steps=steps, report_to=report_to, settings={"seed": 1}, console=console)


def write(log: Log) -> None:
    with log:
        log.evaluation(EVALUATED, step=0)
        log.training(VALUES, step=1, epoch=0.5, learning_rate=1e-4)
        log.advance(2)
        log.training({**VALUES, "loss": 2.0}, step=5, epoch=2.5, learning_rate=5e-5)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / FILE).read_text(encoding="utf-8").splitlines()]


def test_the_file_has_every_metric(tmp_path: Path) -> None:
    write(log_of(tmp_path, Console(file=io.StringIO())))
    evaluated, first, second = lines(tmp_path)
    assert evaluated.items() >= {"step": 0, **EVALUATED}.items()
    assert first.items() >= {"step": 1, "epoch": 0.5, "learning_rate": 1e-4, **VALUES}.items()
    assert (second["step"], second["loss"], second["learning_rate"]) == (5, 2.0, 5e-5)
    assert 0 <= evaluated["elapsed_seconds"] <= first["elapsed_seconds"] <= second["elapsed_seconds"]


def test_lines_are_there_while_it_runs(tmp_path: Path) -> None:
    with log_of(tmp_path, Console(file=io.StringIO())) as log:
        log.training(VALUES, step=1, epoch=0.5, learning_rate=1e-4)
        assert len(lines(tmp_path)) == 1


def test_the_file_is_json_or_nothing(tmp_path: Path) -> None:
    with log_of(tmp_path, Console(file=io.StringIO())) as log, pytest.raises(ValueError, match="JSON"):
        log.training({**VALUES, "loss": float("nan")}, step=1, epoch=0.5, learning_rate=1e-4)
    assert lines(tmp_path) == []


def test_tensorboard_reads_the_same_values_back(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write(log_of(tmp_path, Console(file=io.StringIO()), report_to=("tensorboard",)))
    events = EventAccumulator(str(tmp_path / "runs"))
    events.Reload()
    read = {
        tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }
    expected: dict[str, list[tuple[int, Any]]] = {}
    for line in lines(tmp_path):
        step = line.pop("step")
        del line["elapsed_seconds"]
        for name, value in line.items():
            tag = f"eval/{name.removeprefix('eval_')}" if name.startswith("eval_") else f"train/{name}"
            expected.setdefault(tag, []).append((step, pytest.approx(value, rel=1e-6)))  # float32 there
    assert read == expected
    assert {"train/loss", "train/learning_rate", "train/grad_norm", "eval/perplexity"} <= read.keys()


def test_a_missing_package_is_said_with_its_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swiftkit.train.log.find_spec", lambda name: None)
    with pytest.raises(
        UserError, match=r"--report_to wandb needs its package: pip install 'swiftkit\[wandb\]'"
    ):
        check_writers(["tensorboard", "wandb"])
    check_writers(["tensorboard", "none"])


def test_wandb_offline_takes_the_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    write(log_of(tmp_path, Console(file=io.StringIO()), report_to=("wandb",)))
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


def test_elsewhere_than_on_a_terminal_a_line_a_log_step(tmp_path: Path) -> None:
    out = io.StringIO()
    write(log_of(tmp_path, Console(file=out, width=40)))  # a narrow file wraps nothing
    assert out.getvalue().splitlines() == [
        "step 0/20  evaluation: loss 2.2500  perplexity 9.4877",
        "step 1/20  loss 2.5000  lr 1.00e-04  25,432 tokens/s",
        "step 5/20  loss 2.0000  lr 5.00e-05  25,432 tokens/s",
    ]


@pytest.mark.parametrize("width", [80, 100])
def test_the_bar_fits_one_line_of_a_terminal(width: int, tmp_path: Path) -> None:
    out = io.StringIO()
    console = Console(
        file=out, force_terminal=True, width=width, height=24, color_system=None, legacy_windows=False
    )
    with log_of(tmp_path, console, steps=12_345) as log:
        log.training(VALUES, step=9_999, epoch=0.5, learning_rate=1e-4)
    with console.capture() as captured:
        console.print(log._bar.get_renderable())
    bar = captured.get().rstrip("\n")
    assert "\n" not in bar and len(bar) <= width
    for part in ("━━━", "9999/12345", "loss 2.5000", "lr 1.00e-04", "25,432 tokens/s", " left"):
        assert part in bar, bar


def test_time_left_becomes_time_taken(tmp_path: Path) -> None:
    column, log = TimeLeft(), log_of(tmp_path, Console(file=io.StringIO(), force_terminal=True, width=100))
    task = log._bar.tasks[0]
    assert column.render(task) == Text("-:--:-- left")
    task.finished_time = 3_723.4
    assert column.render(task) == Text("took 1:02:03")
    with log:
        pass


def test_a_notebook_has_one_line_that_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[tuple[str, str]] = []

    class Handle:
        def update(self, data: dict[str, str], *, raw: bool) -> None:
            shown.append(("update", data["text/plain"]))

    def display(data: dict[str, str], *, raw: bool, display_id: bool) -> Handle:
        shown.append(("new", data["text/plain"]))
        return Handle()

    monkeypatch.setitem(sys.modules, "IPython.display", types.SimpleNamespace(display=display))
    line = NotebookLine()
    for text in ("one", "two", "three"):
        line.show(text)
    assert shown == [("new", "one"), ("update", "two"), ("update", "three")]


def test_an_interrupted_run_says_where_it_was(tmp_path: Path) -> None:
    out = io.StringIO()
    with pytest.raises(KeyboardInterrupt), log_of(tmp_path, Console(file=out, width=30)) as log:
        log.training(VALUES, step=1, epoch=0.5, learning_rate=1e-4)
        log.advance(2)
        raise KeyboardInterrupt
    assert out.getvalue().endswith(f"\nstopped after 2 of 20 steps; the log is in {tmp_path}\n")
    assert len(lines(tmp_path)) == 1


def test_a_resumed_log_has_no_line_of_what_did_not_happen(tmp_path: Path) -> None:
    with log_of(tmp_path, Console(file=io.StringIO())) as log:
        log.training(VALUES, step=1, epoch=0.5, learning_rate=1e-4)
        position = log.position()
        log.training(VALUES, step=2, epoch=0.6, learning_rate=1e-4)
    for torn in ("", '{"step": 3, "lo'):
        with (tmp_path / FILE).open("a") as file:
            file.write(torn)
        with Log(
            tmp_path,
            steps=20,
            report_to=[],
            settings={},
            console=Console(file=io.StringIO()),
            resumed=position,
        ) as log:
            assert [line["step"] for line in lines(tmp_path)] == [1]
            log.training(VALUES, step=2, epoch=0.5, learning_rate=1e-4)
        before, after = lines(tmp_path)
        assert after["step"] == 2 and after["elapsed_seconds"] > before["elapsed_seconds"]
    (tmp_path / FILE).write_text('{"step": 1}\n{"step": 2')  # the machine lost what was not on the disk yet
    Log(tmp_path, steps=2, report_to=[], settings={}, console=Console(quiet=True), resumed=position)
    assert lines(tmp_path) == [{"step": 1}]


def test_tensorboard_is_told_where_a_resumed_run_begins(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    resumed = None
    for last in (3, 4):
        console = Console(file=io.StringIO())
        log = Log(tmp_path, steps=9, report_to=["tensorboard"], settings={}, console=console, resumed=resumed)
        first = 1 if resumed is None else 3
        with log:
            for step in range(first, last + 1):
                log.training(
                    {**VALUES, "loss": float(10 * last + step)}, step=step, epoch=1.0, learning_rate=1e-4
                )
                if step == 2:
                    resumed = log.position()
    events = EventAccumulator(str(tmp_path / "runs"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 31), (2, 32), (3, 43), (4, 44)]
