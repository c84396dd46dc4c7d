"""The verb `eval`: what stands in front, a file of flags, and what a terminal sees."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from swiftkit.cli import main
from swiftkit.methods.evaluate import _counted, _progress
from tests import tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "toy"
    tiny.make_toy(folder, template="chatml")
    return folder


def run(*words: str | Path, code: int = 0) -> None:
    with pytest.raises(SystemExit) as end:
        main([str(word) for word in words])
    assert end.value.code == code


def test_help_is_complete(capsys: pytest.CaptureFixture[str]) -> None:
    run("eval", "--help")
    told = capsys.readouterr().out
    assert told.startswith("swiftkit eval CHECKPOINT|FILE.yaml --flag value ...")
    for flag in (
        "--adapters",
        "--dataset",
        "--metrics",
        "--answer_pattern",
        "--output",
        "--tasks",
        "--limit",
    ):
        assert flag in told
    run("--help")
    assert "  eval " in capsys.readouterr().out


def test_by_flags_and_by_a_file(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = ["--dataset", "swiftkit::persona#3", "--metrics", "loss,exact_match", "--max-new-tokens", "4"]
    run("eval", model, *rows)
    told = capsys.readouterr().out
    words = ("model ", "base ", "rows      3 read, 3 kept", "loss ", "exact     0 of 3 right", "generated ")
    assert all(word in told for word in words)
    Path("my.yaml").write_text(
        f"checkpoint: {model}\ndataset: swiftkit::persona#3\nmetrics: [loss]\n", encoding="utf-8"
    )
    run("eval", "my.yaml")
    filed = capsys.readouterr().out
    assert filed.splitlines() == [line for line in told.splitlines() if line in filed.splitlines()]
    assert "loss " in filed and "exact " not in filed


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["x", "y", "--dataset", "swiftkit::persona"],
            "eval takes one checkpoint, or a file of flags, not 2: x y",
        ),
        (["x", "--checkpoint", "y", "--dataset", "swiftkit::persona"], "--checkpoint is given twice"),
        (["--dataset", "swiftkit::persona"], "give a checkpoint, as in `swiftkit eval CHECKPOINT`"),
        (["x", "--dataset", "swiftkit::persona", "--metric", "loss"], "--metric"),
        (["x", "--dataset", "swiftkit::persona", "--epochs"], "unknown name --epochs"),
    ],
)
def test_mistakes(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    run("eval", *words, code=2)
    heard = capsys.readouterr().err
    assert told in heard and heard.count("\n") == 1


def test_a_terminal_sees_a_bar() -> None:
    shown = io.StringIO()
    with _progress(Console(file=shown, force_terminal=True, width=80), rows=3) as on_step:
        on_step(1, 5)
        on_step(2, 5)
    assert "answering" in shown.getvalue() and "3/3" in shown.getvalue()
    with _progress(Console(file=io.StringIO()), rows=3) as on_step:
        assert on_step is None


def test_counts_in_words() -> None:
    assert _counted({"by text": 3, "by number": 0}) == "by text"
    assert _counted({"by text": 3, "by number": 1200}) == "by text 3, by number 1,200"
