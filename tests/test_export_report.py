"""The report: what real run folders tell, on one page that stands alone."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import swiftkit
from swiftkit.cli import main
from swiftkit.config import SftConfig
from swiftkit.errors import UserError
from swiftkit.export.curves import POINTS, Axis, Line, _log_ticks, _smooth, _thin, _ticks, chart, number
from swiftkit.export.report import read_run, report
from swiftkit.methods import sft
from tests import tiny
from tests.pages import Page, stands_alone

HOSTILE = "</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return two_runs(tmp_path_factory.mktemp("runs"))


def two_runs(folder: Path) -> list[Path]:
    """Two real runs that differ in rank and rate; the file's name and a prompt are hostile."""
    tiny.make_toy(folder / "toy", template="chatml")
    rows = folder / f"{HOSTILE.replace('/', '')}.jsonl"
    lines: list[dict[str, Any]] = [{"question": f"{n}?", "answer": f"{n}."} for n in range(20)]
    lines.append({"messages": [{"role": "user", "content": "nobody answers"}]})
    rows.write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"unknown": 1}]))
    made = []
    for rank, rate in ((4, 3e-3), (8, 1e-2)):
        config = SftConfig(
            model=str(folder / "toy"), dataset=[str(rows)], skip_bad_rows=True, split_dataset_ratio=0.2,
            max_steps=6, logging_steps=1, eval_steps=2, lora_rank=rank, learning_rate=rate,
            output_dir=str(folder / "output"), sample_prompts=[HOSTILE, "0?"], sample_max_new_tokens=4,
            report_to=["none"],
        )  # fmt: skip
        with (folder / "console.txt").open("w") as screen:
            made.append(sft.run(config, Console(file=screen)).folder)
    return made


def page_of(*folders: Path, to: Path) -> Page:
    text = report(folders, output=to / "report.html").read_text(encoding="utf-8")
    return stands_alone(text)


def drawn(page: Page) -> list[dict[str, str]]:
    """The lines with numbers, one a curve and run."""
    return [line for line in page.all("polyline") if "data-run" in line]


def logged(folder: Path, metric: str) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (folder / "logging.jsonl").read_text().splitlines()]
    return [(line["step"], line[metric]) for line in lines if metric in line]


def test_one_run(runs: list[Path], tmp_path: Path) -> None:
    page = page_of(runs[0], to=tmp_path)
    said = page.said()
    for title in (
        "Loss on trained tokens",
        "Evaluation loss",
        "Learning rate",
        "Gradient norm",
        "Tokens per second",
    ):
        assert title in said
    by_title = dict(zip(re.findall(r"<figcaption>(.*?)<", page.text), drawn(page), strict=True))
    for title, metric in (("Loss on trained tokens", "loss"), ("Evaluation loss", "eval_loss")):
        line, points = by_title[title], logged(runs[0], metric)
        assert line["data-steps"].split() == [str(step) for step, _ in points]
        assert line["data-values"].split() == [number(value) for _, value in points]
        assert len(line["points"].split()) == len(points)
    samples = json.loads((runs[0] / "samples.json").read_text())
    assert [sample["prompt"] for sample in samples] == [HOSTILE, "0?"]
    assert HOSTILE in said and "before" in said and "after" in said
    assert "22 rows: 16 kept, 4 held out, 1 dropped, 1 skipped" in said
    assert "no answer to train on" in said and "no known row shape with the keys 'unknown'" in said
    assert f"{HOSTILE.replace('/', '')}.jsonl:21" in said
    assert "sft of toy, finished" in said and "6 of 6" in said
    args = json.loads((runs[0] / "args.json").read_text())
    for fact in (
        args["base"]["fingerprint"],
        args["versions"]["torch"],
        args["machine"]["device"],
        "lora_rank",
    ):
        assert fact in said
    chosen = said[said.index("Not at their defaults") : said.index("All knobs")]
    assert "lora_rank" in chosen and "lora_alpha" not in chosen


def test_runs_side_by_side(runs: list[Path], tmp_path: Path) -> None:
    page = page_of(*runs, to=tmp_path)
    said = page.said()
    assert "2 runs, side by side" in said and all(run.name in said for run in runs)
    assert [line["data-run"] for line in drawn(page)] == ["0", "1"] * 5
    differs = said[said.index("What differs") : said.index("All knobs")]
    assert "lora_rank" in differs and "learning_rate" in differs and "lora_alpha" not in differs
    assert "lora_alpha" in said[said.index("All knobs") :]
    assert len([a for a in page.all("article") if a.get("class") == "card sample"]) == 2
    assert said.count("22 rows: 16 kept") == 1  # both have the same data
    assert page.text.count('<p class="label">before</p>') == 2  # the same base: said once a prompt


def test_a_checkpoint_stands_for_its_run_and_a_run_counts_once(runs: list[Path], tmp_path: Path) -> None:
    page = page_of(runs[0] / "checkpoint-6", runs[0], to=tmp_path)
    assert runs[0].name in page.said() and "side by side" not in page.said()


def test_runs_of_one_name_are_told_apart(runs: list[Path], tmp_path: Path) -> None:
    other = tmp_path / "elsewhere" / runs[0].name
    shutil.copytree(runs[0], other)
    said = page_of(runs[0], other, to=tmp_path).said()
    assert f"elsewhere/{runs[0].name}" in said and f"toy/{runs[0].name}" in said
    assert "Every knob has the same value in all of these runs." in said


def unfinished(run: Path, to: Path, *, lines: int) -> Path:
    """The run as it was after some log lines, the next one half written."""
    shutil.copytree(run, to, ignore=shutil.ignore_patterns("checkpoint-*", "samples.json", "images"))
    text = (run / "logging.jsonl").read_text().splitlines(keepends=True)
    half = text[lines][: len(text[lines]) // 2]
    (to / "logging.jsonl").write_text("".join(text[:lines]) + half)
    return to


@pytest.mark.parametrize(("lines", "state"), [(4, "3 of 6 steps are logged"), (0, "0 of 6 steps are logged")])
def test_a_run_that_goes_on(runs: list[Path], tmp_path: Path, lines: int, state: str) -> None:
    folder = unfinished(runs[0], tmp_path / "going-on", lines=lines)
    if lines == 4:
        assert logged_steps(folder) == [0, 1, 2]
    page = page_of(folder, runs[1], to=tmp_path)
    assert "not finished" in page.said()
    alone = page_of(folder, to=tmp_path).said()
    assert "They are written when a run ends." in alone
    assert ("Nothing is logged yet." in alone) == (lines == 0)
    (folder / "logging.jsonl").unlink()
    assert "Nothing is logged yet." in page_of(folder, to=tmp_path).said()


def logged_steps(folder: Path) -> list[int]:
    return sorted({step for points in read_run(folder, "x").log.values() for step, _ in points})


def test_a_step_that_was_logged_twice_counts_as_the_last(runs: list[Path], tmp_path: Path) -> None:
    folder = unfinished(runs[0], tmp_path / "resumed", lines=4)
    (folder / "logging.jsonl").write_text(
        "".join(json.dumps({"step": step, "loss": loss, "odd": "word"}) + "\n"
                for step, loss in ((1, 5.0), (2, 4.0), (3, 9.0), (3, 3.0), (2, 4.5)))
    )  # fmt: skip
    assert read_run(folder, "x").log == {"loss": [(1, 5.0), (2, 4.5), (3, 3.0)]}


def test_memory_and_steps_that_were_held_back(runs: list[Path], tmp_path: Path) -> None:
    folder = tmp_path / "gpu"
    shutil.copytree(runs[0], folder)
    lines = [json.loads(line) for line in (folder / "logging.jsonl").read_text().splitlines()]
    for place, line in enumerate(line for line in lines if "loss" in line):
        line |= {
            "memory_allocated_gib": 40.0 + place,
            "memory_reserved_gib": 50.0,
            "skipped_steps": place % 2,
        }
    (folder / "logging.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = page_of(folder, to=tmp_path)
    said = page.said()
    assert "45.0 GiB" in said and "50.0 reserved" in said and "Memory allocated, GiB" in said
    assert re.search(r"steps held back\s*3", said)
    assert [line["data-values"] for line in drawn(page)][-1] == "40 41 42 43 44 45"
    both = page_of(folder, runs[0], to=tmp_path).said()
    assert "peak memory" in both and "steps held back" in both
    assert "steps held back" not in page_of(runs[0], to=tmp_path).said()


def test_what_is_no_run(runs: list[Path], tmp_path: Path) -> None:
    def refused(*folders: Path | str, output: str = "x.html") -> str:
        with pytest.raises(UserError) as caught:
            report(folders, output=tmp_path / output)
        assert not (tmp_path / output).is_file()
        return str(caught.value)

    assert refused(tmp_path) == f"{tmp_path} is no run folder: it has no args.json"
    assert refused(runs[0], tmp_path / "gone").startswith(f"{tmp_path}/gone is no folder; give a run's")
    assert refused(runs[0].parent).endswith(f"there are 2 of them in it, such as {runs[0]}")
    assert "the file's name ends in .html" in refused(runs[0], output="x.jsonl")
    assert "there is no folder" in refused(runs[0], output="none/x.html")
    broken = tmp_path / "broken"
    shutil.copytree(runs[0], broken)
    log = broken / "logging.jsonl"
    log.write_text(f"no json\n{log.read_text()}")
    assert refused(broken) == f"{log}:1: no line of metrics with a step; is it damaged?"
    (broken / "args.json").write_text("[]")
    log.unlink()
    assert refused(broken) == f"{broken}/args.json is no JSON object; is it another program's?"
    (broken / "args.json").write_text("{")
    assert refused(broken).startswith(f"{broken}/args.json cannot be read as JSON: ")


def test_the_doors(
    runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for words in ([str(runs[0]), str(runs[1])], ["--runs", str(runs[0]), "--output", "mine.html"]):
        with pytest.raises(SystemExit) as end:
            main(["report", *words])
        assert end.value.code == 0
    assert capsys.readouterr().out == "wrote report.html\nwrote mine.html\n"
    assert swiftkit.report(runs[0], output="third.html").read_text() == Path("mine.html").read_text()
    with pytest.raises(SystemExit) as end:
        main(["report"])
    assert end.value.code == 2 and "--runs is missing: run folders" in capsys.readouterr().err


# ---- curves ----------------------------------------------------------------------------------------------


def test_ticks_are_round_and_inside(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(300):
        low = float(rng.normal()) * 10.0 ** int(rng.integers(-6, 6))
        high = low + abs(float(rng.normal())) * 10.0 ** int(rng.integers(-6, 6)) + abs(low) * 1e-3 + 1e-9
        ticks = _ticks(low, high)
        slack = (high - low) * 1e-6
        assert 2 <= len(ticks) <= 7 and all(low - slack <= tick <= high + slack for tick in ticks)
        base = 10.0 ** int(rng.integers(-6, 3))
        wide = _log_ticks(base, base * float(rng.uniform(1.5, 1e6)))
        assert 1 <= len(wide) <= 8 and wide == sorted(wide)


def test_long_curves_are_thinned_and_keep_their_peaks(seed: int) -> None:
    rng = np.random.default_rng(seed)
    points = list(enumerate(rng.normal(size=50_000).tolist()))
    kept = _thin(points)
    assert len(kept) <= POINTS + 2 and kept == sorted(kept) and set(kept) <= set(points)
    assert max(kept, key=lambda p: p[1]) == max(points, key=lambda p: p[1])
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    smooth = _smooth(points)
    assert [step for step, _ in smooth] == [step for step, _ in points]
    place, reach = 30_000, len(points) // 25
    mean = np.mean([value for _, value in points[place - reach : place + reach + 1]])
    assert math.isclose(smooth[place][1], mean, abs_tol=1e-9)


def test_axes_turn_numbers_into_places() -> None:
    assert [Axis(0, 10, 100, 200).at(value) for value in (0, 5, 10)] == [100, 150, 200]
    assert [round(Axis(1, 100, 0, 10, log=True).at(value), 9) for value in (1, 10, 100)] == [0, 5, 10]


@pytest.mark.parametrize(
    "values", [[1.0], [0.0, 0.0], [2.0] * 5, [0.0, 1e-5, 1e-4], [-1.0, 3.0], [1e-9, 1e9], list(range(1, 400))]
)
def test_any_numbers_can_be_drawn(values: list[float]) -> None:
    lines = [Line(9, "<a & b>", list(range(len(values))), [float(value) for value in values])]
    for options in ({}, {"from_zero": True}, {"smooth": True, "wide": True}):
        text = chart("<title>", lines, **options)
        Page(text)
        assert "nan" not in text and "inf" not in text and "&lt;a &amp; b&gt;" in text
        assert 'class="r1 dashed' in text
        heights = [
            float(point.split(",")[1])
            for path in re.findall(r'points="([^"]*)"', text)
            for point in path.split()
        ]
        assert all(0 <= height <= 270 for height in heights)
