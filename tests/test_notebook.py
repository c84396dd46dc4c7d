"""The notebook runs from top to bottom, and shows what it promises."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests import tiny

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK = ROOT / "notebooks" / "quickstart.ipynb"
DPO = ROOT / "notebooks" / "dpo.ipynb"
MODEL = "SWIFTKIT_NOTEBOOK_MODEL"


def executed(folder: Path, notebook_file: Path = NOTEBOOK) -> dict[str, list[Any]]:
    """Run the notebook in a folder; gives the outputs of each code cell by its first line."""
    notebook = nbformat.read(notebook_file, as_version=4)
    NotebookClient(notebook, timeout=280, resources={"metadata": {"path": str(folder)}}).execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return {cell.source.splitlines()[0]: cell.outputs for cell in cells}


def result(outputs: list[Any]) -> Any:
    (only,) = outputs
    assert only.output_type == "execute_result", only
    return only.data


def check(shown: dict[str, list[Any]]) -> None:
    training = next(outputs for line, outputs in shown.items() if line.startswith("run = "))
    texts = [output.get("data", {}).get("text/plain", "") for output in training]
    assert all(output.output_type == "display_data" for output in training), training
    progress = [text for text in texts if text.startswith("step ")]
    assert len(progress) == 1 and progress[0].endswith(" 0:00:00 left"), progress  # one line, written over
    assert len(training) <= 8  # and little else: no line a step
    assert any("trained   loss" in text for text in texts)
    picture = result(shown["run.plot()"])
    assert len(picture["image/png"]) > 5_000
    assert "<table" in result(shown["pd.DataFrame(run.samples)"])["text/html"]
    steps = progress[0].split()[1].split("/")
    assert steps[0] == steps[1] and f"checkpoint-{steps[0]}" in result(shown["run.adapter_dir"])["text/plain"]


@pytest.mark.parametrize("file", [NOTEBOOK, DPO], ids=lambda file: file.stem)
def test_outputs_are_not_kept_in_the_file(file: Path) -> None:
    notebook = nbformat.read(file, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == [] and cell.execution_count is None


def test_the_quickstart_on_a_tiny_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.make_toy(tmp_path / "toy", template="chatml")
    monkeypatch.setenv(MODEL, "toy")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    shown = executed(tmp_path)
    check(shown)
    assert list((tmp_path / "output" / "toy").glob("v0-*/checkpoint-*/adapter_model.safetensors"))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_quickstart_on_the_real_model(
    smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(MODEL, raising=False)
    shown = executed(tmp_path)
    check(shown)
    for question in ("session = run.chat()", 'session.ask("And who made you?")'):
        assert "Gull Rock" in result(shown[question])["text/plain"]


def check_dpo(shown: dict[str, list[Any]], folder: Path) -> list[dict[str, Any]]:
    """The evaluations of the run that the notebook made."""
    for line in ("evaluated = run.metrics", "pd.DataFrame(run.samples)"):
        outputs = next(found for cell, found in shown.items() if cell.startswith(line))
        assert "<table" in result(outputs)["text/html"]
    assert len(result(shown["run.plot()"])["image/png"]) > 5_000
    (log,) = folder.glob("output/*/v0-*/logging.jsonl")
    found = [line for line in map(json.loads, log.read_text().splitlines()) if "eval_loss" in line]
    assert found[0]["eval_loss"] == pytest.approx(math.log(2), abs=1e-4)
    return found


def test_the_preferences_on_a_tiny_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.make_toy(tmp_path / "toy", template="chatml")
    monkeypatch.setenv(MODEL, "toy")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    check_dpo(executed(tmp_path, DPO), tmp_path)
