"""The run folder: its name, its files, and the view of it."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import pandas
import pytest

from swiftkit.config import SftConfig
from swiftkit.errors import UserError
from swiftkit.train.plots import CURVES, save_plots
from swiftkit.train.run import (
    Run,
    check_output_dir,
    checkpoints,
    create_folder,
    versions,
    write_args,
    write_samples,
)

NOON = datetime(2025, 1, 2, 12, 0, 0)


def a_run(folder: Path, **config: Any) -> Run:
    known = SftConfig(model="m", dataset=["d.jsonl"]).model_dump()
    write_args(folder, method="sft", config={**known, **config}, facts={"base": {"source": "folder"}})
    return Run(folder)


@pytest.mark.parametrize(
    ("model", "name"),
    [("smollm2-135m", "smollm2-135m"), ("owner/name-7B", "owner-name-7B"), ("odd name:x", "odd-name-x")],
)
def test_the_folder_is_named_by_model_number_and_time(model: str, name: str, tmp_path: Path) -> None:
    folders = [create_folder(str(tmp_path / "out"), model, now=NOON) for _ in range(3)]
    assert [folder.relative_to(tmp_path).as_posix() for folder in folders] == [
        f"out/{name}/v{number}-20250102-120000" for number in range(3)
    ]
    (folders[1]).rmdir()  # numbers are not used twice while a later run is there
    assert create_folder(str(tmp_path / "out"), model, now=NOON).name.startswith("v3-")


def test_a_model_in_a_folder_gives_the_folder_s_name(tmp_path: Path) -> None:
    model = tmp_path / "deep" / "my-model"
    model.mkdir(parents=True)
    assert create_folder(str(tmp_path / "out"), str(model)).parent == tmp_path / "out" / "my-model"


def test_a_model_in_this_folder_gives_its_name_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my-model").mkdir()
    monkeypatch.chdir(tmp_path / "my-model")
    assert create_folder("out", ".").parent == Path("out/my-model")


def test_runs_that_start_at_once_get_a_folder_each(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: create_folder(str(tmp_path), "m", now=NOON), range(24)))
    assert len(set(found)) == 24


def test_an_output_folder_that_cannot_be_written(tmp_path: Path) -> None:
    check_output_dir(str(tmp_path / "new" / "deep"))
    assert list((tmp_path / "new" / "deep").iterdir()) == []
    (tmp_path / "file").touch()
    for name, rule in (
        ("file", "is a file; give a folder"),
        ("file/in", "Not a directory; give a folder that"),
    ):
        with pytest.raises(UserError, match=f"^--output_dir {tmp_path}/{name}:? {rule}"):
            check_output_dir(str(tmp_path / name))


def test_args_hold_in_every_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("rows.jsonl", "odd#5"):
        Path(name).touch()
    Path("my-model").mkdir()
    sources = ["rows.jsonl", "rows.jsonl#20", "odd#5", "odd#5#7", "swiftkit::persona#3", "gone.jsonl#2"]
    config = a_run(tmp_path, model="my-model", dataset=sources, val_dataset=["rows.jsonl"]).args["config"]
    here = tmp_path.resolve()
    assert config["model"] == f"{here}/my-model"
    assert config["dataset"] == [
        f"{here}/rows.jsonl",
        f"{here}/rows.jsonl#20",
        f"{here}/odd#5",
        f"{here}/odd#5#7",
        "swiftkit::persona#3",
        "gone.jsonl#2",
    ]
    assert config["val_dataset"] == [f"{here}/rows.jsonl"]
    Path("smollm2-135m").touch()  # a file of a model's name is no model
    assert a_run(tmp_path, model="smollm2-135m").args["config"]["model"] == "smollm2-135m"
    Path("llama3-8b").mkdir()  # nor is a folder without a model
    assert a_run(tmp_path, model="llama3-8b").args["config"]["model"] == "llama3-8b"
    Path("mine.jinja").touch()
    Path("chatml").touch()  # the built-in template is meant
    for written, kept in (("mine.jinja", f"{here}/mine.jinja"), ("chatml", "chatml"), (None, None)):
        assert a_run(tmp_path, chat_template=written).args["config"]["chat_template"] == kept


def test_args_say_what_the_run_was_made_of(tmp_path: Path) -> None:
    args = a_run(tmp_path).args
    assert args["method"] == "sft" and args["base"] == {"source": "folder"}
    assert args["versions"] == versions() and {"torch", "transformers", "swiftkit"} <= args["versions"].keys()
    assert SftConfig.model_validate(args["config"]) == SftConfig(model="m", dataset=["d.jsonl"])


def test_checkpoints_are_complete_ones_in_order(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    with pytest.raises(UserError, match="has no checkpoint"):
        _ = run.adapter_dir
    for name in ("checkpoint-2", "checkpoint-10", ".checkpoint-20.partial", "checkpoint-best"):
        (tmp_path / name).mkdir()
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-2", "checkpoint-10"]
    assert run.adapter_dir == tmp_path / "checkpoint-10"


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no args\.json: it is not a run folder"):
        Run(tmp_path)


def test_metrics_samples_and_plots(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    assert run.samples == []
    samples = [{"prompt": "Wer bist du?", "before": "Äh", "after": "🙂\nJa"}]
    write_samples(tmp_path, samples)
    assert run.samples == samples
    lines: list[dict[str, Any]] = [{"step": 0, "eval_loss": 3.5, "eval_perplexity": 33.1}]
    for step in range(1, 31):
        loss = 3.0 / step
        lines.append({"step": step, "loss": loss, "learning_rate": 1e-4, "tokens_per_second": 250.0 + step})
    lines.append({"step": 30, "eval_loss": 0.5, "eval_perplexity": 1.65})
    (tmp_path / "logging.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    metrics = run.metrics
    assert isinstance(metrics, pandas.DataFrame) and len(metrics) == 32
    assert [path.name for path in save_plots(metrics, tmp_path / "images")] == [
        f"{name}.png" for name in CURVES
    ]
    for name, (column, label) in CURVES.items():
        content = (tmp_path / "images" / f"{name}.png").read_bytes()
        assert content.startswith(b"\x89PNG\r\n") and len(content) > 5_000
        (axes,) = run.plot(name).axes
        assert (axes.get_xlabel(), axes.get_ylabel()) == ("step", label)
        drawn = axes.lines[0]
        assert drawn.get_xdata().tolist() == list(range(1, 31))  # type: ignore[union-attr]
        assert drawn.get_ydata().tolist() == metrics[column].dropna().tolist()  # type: ignore[union-attr]
    judged = run.plot().axes[0].lines[1]
    assert (judged.get_xdata().tolist(), judged.get_ydata().tolist()) == ([0, 30], [3.5, 0.5])  # type: ignore[union-attr]
    assert run.plot("learning_rate").axes[0].get_legend() is None
