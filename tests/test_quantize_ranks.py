"""Quantization over several processes: what one process does, within rounding; and by a file of settings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from swiftkit.cli import main
from swiftkit.formats.weights import Weights
from swiftkit.quantize.block import _shares
from tests.adapters import make_base
from tests.packed import pack_folder

ROOT = Path(__file__).resolve().parents[1]
WORDS = ["the", "harbour", "froze", "twice", "that", "winter", "boats", "were", "pulled", "up", "ropes"]


def write_text(folder: Path, seed: int) -> Path:
    drawn = torch.randint(len(WORDS), (700,), generator=torch.Generator().manual_seed(seed)).tolist()
    path = folder / "text.txt"
    path.write_text(" ".join(WORDS[word] for word in drawn), encoding="utf-8")
    return path


def run(
    folder: Path, out: str, processes: int, *words: str, **knobs: Any
) -> subprocess.CompletedProcess[str]:
    """The command over a YAML file."""
    settings = {
        "checkpoint": str(folder / "base"), "output_dir": str(folder / out),
        "dataset": [str(folder / "text.txt")], "group_size": 32, "max_length": 64, "eval_windows": 5,
        "device": "cpu", **knobs,
    }  # fmt: skip
    file = folder / f"{out}.yaml"
    file.write_text("".join(f"{name}: {json.dumps(value)}\n" for name, value in settings.items()))
    command = [sys.executable, "-m", "swiftkit", "quantize", str(file), "--nproc_per_node", str(processes)]
    return subprocess.run(
        [*command, *words], cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True,
        text=True, timeout=240,
    )  # fmt: skip


def report(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "quantize_report.json").read_text())
    return found


@pytest.mark.parametrize(
    ("processes", "method", "form"),
    [(2, "gptq", "gptq"), (2, "awq", "awq"), (3, "gptq", "compressed-tensors"), (2, "rtn", "gptq_v2")],
)
def test_several_processes_do_what_one_does(
    processes: int, method: str, form: str, tmp_path: Path, seed: int
) -> None:
    make_base(tmp_path / "base", dtype=torch.bfloat16)
    write_text(tmp_path, seed)
    knobs = {"method": method, "format": form}
    done = [run(tmp_path, out, count, **knobs) for out, count in (("one", 1), ("several", processes))]
    assert [ended.returncode for ended in done] == [0, 0], done[1].stderr
    assert (
        f"\nprocesses {processes}, each with a share" in done[1].stdout
        and "\nprocesses" not in done[0].stdout
    )
    assert done[1].stdout.count("wrote     ") == 1
    one, several = report(tmp_path / "one"), report(tmp_path / "several")
    assert one["calibration"] == several["calibration"] and one["size"] == several["size"]
    assert one["quality"]["tokens"] == several["quality"]["tokens"]
    names = [[linear["name"] for linear in found["linears"]] for found in (one, several)]
    assert names[0] == names[1] and len(names[0]) == 21
    for mine, theirs in zip(one["linears"], several["linears"], strict=True):
        assert mine["rows"] == theirs["rows"]
        first = mine["name"].startswith("model.layers.0.")
        # Later layers are fitted to the inputs that the earlier ones' codes give, and those flip by rounding.
        assert mine["error"] == pytest.approx(theirs["error"], rel=1e-2 if first else 0.2), mine["name"]
    same = 1e-9 if method == "rtn" else 0.05
    for key in ("perplexity_before", "perplexity_after"):
        bound = 1e-6 if key == "perplexity_before" else max(same, 1e-6)
        assert one["quality"][key] == pytest.approx(several["quality"][key], rel=bound)
    kept = [Weights(tmp_path / out) for out in ("one", "several")]
    assert kept[0].names() == kept[1].names()
    if method == "rtn":
        for name in kept[0].names():
            assert torch.equal(kept[0].read(name), kept[1].read(name)), name


def test_fewer_windows_than_processes(tmp_path: Path, seed: int) -> None:
    """Ranks without rows take part with zeros."""
    make_base(tmp_path / "base", dtype=torch.bfloat16)
    write_text(tmp_path, seed)
    ended = run(tmp_path, "out", 2, calibration_windows=1, eval_windows=1)
    assert ended.returncode == 0, ended.stderr
    assert report(tmp_path / "out")["calibration"]["windows"] == 1


def test_a_refusal_at_the_end_is_everybodys(tmp_path: Path, seed: int) -> None:
    make_base(tmp_path / "base", dtype=torch.bfloat16)
    write_text(tmp_path, seed)
    ended = run(tmp_path, "out", 2, method="rtn", max_ppl_increase=0, seed=1)
    if report_beside := sorted(tmp_path.glob("out.*.json")):
        assert ended.returncode == 2 and ended.stderr.count("the perplexity rises by") == 1, ended.stderr
        assert report_beside and not (tmp_path / "out").exists()
    else:
        assert report(tmp_path / "out")["quality"]["perplexity_increase"] <= 0
    assert not list(tmp_path.glob(".out*"))


def test_a_mistake_is_said_once(tmp_path: Path, seed: int) -> None:
    make_base(tmp_path / "plain", dtype=torch.bfloat16)
    pack_folder(tmp_path / "plain", tmp_path / "base", "gptq", 4)
    write_text(tmp_path, seed)
    ended = run(tmp_path, "out", 2)
    assert ended.returncode == 2
    assert ended.stderr.count("quantized already") == 1 and "Traceback" not in ended.stderr


def test_a_file_of_settings_and_its_mistakes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.yaml").write_text("checkpoint: m\noutput_dir: o\ndataset: d.jsonl\nbit: 4\n")
    with pytest.raises(SystemExit):
        main(["quantize", "my.yaml"])
    assert "my.yaml:4" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["quantize", "my.yaml", "b", "c"])
    assert "not 3 words" in capsys.readouterr().err


def test_units_go_to_the_rank_with_the_least_to_do() -> None:
    assert _shares([6, 4, 3, 2], 1) == [0, 0, 0, 0]
    assert _shares([6, 4, 3, 2], 2) == [0, 1, 1, 0]
    assert _shares([1, 5], 3) == [1, 0]
