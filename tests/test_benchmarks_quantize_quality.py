"""The quality table: one judge for every row, results that grow over calls, and what it says of others."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import swiftkit
from swiftkit.formats.quantized import dequantized_copy
from tests.adapters import make_base

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
WORDS = ["the", "harbour", "froze", "twice", "that", "winter", "boats", "were", "pulled", "up", "ropes"]
LENGTH = 64


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import quantize_quality

    monkeypatch.setattr(quantize_quality, "LENGTH", LENGTH)
    return quantize_quality


@pytest.fixture
def call(
    benchmark: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., dict[str, Any]]:
    """Run the script on a tiny model; gives the content of its results.json."""
    base = tmp_path / "base"
    make_base(base)
    for name, seed in (("calibration", 0), ("text", 1)):
        drawn = np.random.default_rng(seed).integers(len(WORDS), size=400)
        (tmp_path / f"{name}.txt").write_text(" ".join(WORDS[word] for word in drawn), encoding="utf-8")

    def run(*flags: str) -> dict[str, Any]:
        files = ["--calibration", str(tmp_path / "calibration.txt"), "--text", str(tmp_path / "text.txt")]
        sizes = ["--group_size", "32", "--windows", "4", "--eval_windows", "6"]
        command = [
            "quantize_quality.py",
            "--model",
            str(base),
            "--work",
            str(tmp_path / "work"),
            *files,
            *sizes,
        ]
        monkeypatch.setattr(sys, "argv", [*command, *flags])
        benchmark.main()
        found: dict[str, Any] = json.loads((tmp_path / "work" / "results.json").read_text())
        return found

    return run


def test_rows_grow_over_calls_and_the_judge_says_what_quantize_says(
    call: Callable[..., dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = call("--rows", "fp32,gptq", "--seeds", "0")
    assert set(first["rows"]) == {"fp32", "gptq/0"}
    both = call("--rows", "fp32,gptq,rtn", "--seeds", "0", "1")
    assert set(both["rows"]) == {"fp32", "gptq/0", "gptq/1", "rtn"}
    assert both["rows"]["gptq/0"] == first["rows"]["gptq/0"]  # measured once
    swiftkit.quantize_model(
        tmp_path / "base", tmp_path / "out", method="gptq", group_size=32, seed=1, max_length=LENGTH,
        dataset=str(tmp_path / "calibration.txt"), val_dataset=str(tmp_path / "text.txt"),
        calibration_windows=4, eval_windows=6, max_ppl_increase=100.0, device="cpu",
    )  # fmt: skip
    quality = json.loads((tmp_path / "out" / "quantize_report.json").read_text())["quality"]
    assert both["rows"]["gptq/1"]["perplexity"] == pytest.approx(quality["perplexity_after"], rel=1e-4)
    assert both["rows"]["fp32"]["perplexity"] == pytest.approx(quality["perplexity_before"], rel=1e-4)
    shown = capsys.readouterr().out
    row = both["rows"]
    assert f"| gptq | {row['gptq/0']['perplexity']:.3f} | {row['gptq/1']['perplexity']:.3f} |" in shown


def test_others_get_the_windows_that_ours_get(
    call: Callable[..., dict[str, Any]],
    benchmark: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given: list[np.ndarray] = []

    def other(row: str, base: Path, ids: np.ndarray, folder: Path, options: Any) -> None:
        """Stands for another quantizer: it rounds."""
        given.append(ids)
        benchmark.ours("rtn", 0, folder / "out", options)

    monkeypatch.setattr(benchmark, "peer", other)
    found = call("--rows", "rtn,gptq,gptqmodel", "--seeds", "0", "1")["rows"]
    assert (
        found["gptqmodel/0"]["perplexity"] == found["gptqmodel/1"]["perplexity"] == found["rtn"]["perplexity"]
    )
    seen: list[torch.Tensor] = []
    from swiftkit.quantize.stream import StreamedModel

    begin = StreamedModel.begin

    def spy(self: StreamedModel, batches: Any) -> Any:
        seen.extend(torch.from_numpy(batch.input_ids) for batch in batches)
        return begin(self, batches)

    monkeypatch.setattr(StreamedModel, "begin", spy)
    out = tmp_path / "again"
    benchmark.ours("gptq", 1, out, benchmark.arguments())
    assert torch.equal(torch.stack(seen[:4]), torch.from_numpy(given[1]))  # the rest is judged
    assert not np.array_equal(given[0], given[1])
    dequantized_copy(out, tmp_path / "plain")
    _, judged = benchmark.texts(tmp_path / "base", 1, benchmark.arguments())
    assert benchmark.perplexity(tmp_path / "plain", judged) == found["gptq/1"]["perplexity"]
    ratios = [found[f"gptq/{seed}"]["perplexity"] / found["rtn"]["perplexity"] - 1 for seed in (0, 1)]
    assert f"gptq beside gptqmodel: {ratios[0]:+.2%}, {ratios[1]:+.2%}" in capsys.readouterr().out


def test_other_settings_need_another_folder(call: Callable[..., dict[str, Any]]) -> None:
    call("--rows", "fp32", "--seeds", "0")
    with pytest.raises(SystemExit, match="give another --work"):
        call("--rows", "fp32", "--seeds", "0", "--eval_windows", "2")
    with pytest.raises(SystemExit):
        call("--rows", "gptk")
