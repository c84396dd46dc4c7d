"""The pages in a real browser: nothing fetched, nothing complained of, tokens coloured, curves drawn.

`make test-browser`; SWIFTKIT_PICTURES=FOLDER keeps the screenshots.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread
from numpy.typing import NDArray

from swiftkit.data.preview import preview
from swiftkit.data.preview_page import preview_page
from swiftkit.export.report import report
from tests.browser import Browser
from tests.test_data_preview import ROWS, chatty, rows_file
from tests.test_export_report import two_runs

pytestmark = pytest.mark.browser

# Whether what is written can be read on its ground: WCAG's contrast of each text, by its computed colours.
CONTRAST = """
(() => {
  const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = (colour) => {
    const [r, g, b] = numbers(colour).map((v) => v / 255)
      .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = getComputedStyle(at).backgroundColor;
      if ((numbers(colour)[3] ?? 1) > 0.99) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  const ratio = (element) => {
    const style = getComputedStyle(element);
    const ink = element instanceof SVGElement ? style.fill : style.color;
    const [a, b] = [light(ink), light(ground(element))].sort((x, y) => y - x);
    return (a + 0.05) / (b + 0.05);
  };
  const written = [...document.querySelectorAll("body *")].filter(
    (e) => !["SCRIPT", "STYLE"].includes(e.tagName)
      && e.checkVisibility() && [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()));
  const round = (number) => Math.round(number * 100) / 100;
  const found = written.map((e) => [round(ratio(e)), e.tagName, e.className, e.textContent.slice(0, 20)]);
  return found.sort((a, b) => a[0] - b[0])[0];
})()
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    opened = Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return two_runs(tmp_path_factory.mktemp("runs"))


def seen(browser: Browser, path: Path) -> NDArray[np.float64]:
    """The screenshot, [height, width, 3], 0 to 255."""
    picture = browser.picture(path)
    if folder := os.environ.get("SWIFTKIT_PICTURES"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        shutil.copy(picture, Path(folder) / path.name)
    return np.round(np.asarray(imread(picture), np.float64)[..., :3] * 255)


def box(browser: Browser, selector: str) -> tuple[int, int, int, int]:
    """Left, top, right and bottom of the first element that matches, brought into view."""
    script = (
        f"(() => {{ const e = document.querySelector({selector!r}); e.scrollIntoView({{block: 'center'}}); "
        "const r = e.getBoundingClientRect(); return [r.left, r.top, r.right, r.bottom]; })()"
    )
    left, top, right, bottom = (round(edge) for edge in browser.run(script))
    return left, top, right, bottom


def colour(browser: Browser, selector: str, name: str) -> NDArray[np.float64]:
    value = browser.run(f"getComputedStyle(document.querySelector({selector!r})).{name}")
    return np.array([float(part) for part in value[value.index("(") + 1 : -1].split(",")][:3])


def share(
    picture: NDArray[np.float64], area: tuple[int, int, int, int], wanted: NDArray[np.float64]
) -> float:
    """Share of an area's pixels that have a colour, nearly."""
    left, top, right, bottom = area
    part = picture[top:bottom, left:right]
    return float((np.abs(part - wanted).max(axis=2) < 12).mean())


def check_quiet(browser: Browser) -> None:
    assert browser.requests() == []
    assert browser.complaints() == []
    assert (
        browser.run(
            "document.images.length + document.querySelectorAll('iframe, link[rel=stylesheet]').length"
        )
        == 0
    )
    worst: list[Any] = browser.run(CONTRAST)
    assert worst[0] >= 4.5, worst


def check_fits(browser: Browser, page: Path, width: int) -> None:
    browser.open(page, width=width)
    assert browser.run("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_preview_of_rows(browser: Browser, tmp_path: Path, dark: bool) -> None:
    source = rows_file(tmp_path, [*ROWS[:5], "{broken", *ROWS[5:]])
    found = preview([source], tokenizer=chatty(), rows=9, max_length=120, truncation_strategy="right")
    page = tmp_path / "preview.html"
    page.write_text(preview_page(found, model="toy"), encoding="utf-8")
    browser.open(page, dark=dark)
    check_quiet(browser)
    area = box(browser, ".tokens .t:not(.s)")
    picture = seen(browser, tmp_path / f"preview-{'dark' if dark else 'light'}.png")
    trained = colour(browser, ".tokens .t:not(.s)", "backgroundColor")
    assert share(picture, area, trained) > 0.25  # the ground of a trained token is what its style says
    plain = colour(browser, ".card", "backgroundColor")
    assert np.abs(trained - plain).max() > 25 and np.ptp(trained) > 25  # and it is a colour
    assert browser.run("document.querySelectorAll('.tokens .t').length") == sum(
        v.trained for v in found.views()
    )
    browser.point_at((area[0] + area[2]) / 2, (area[1] + area[3]) / 2)
    assert "trained" in browser.run("document.getElementById('tip').textContent")
    ids = browser.run("document.querySelector('.tokens .t:not(.s)').dataset.i")
    assert f"id {ids} " in browser.run("document.getElementById('tip').textContent")
    browser.run("document.querySelector('.tokens').focus()")
    for place in (0, 1):
        browser.press("ArrowRight")
        first = found.views()[0].tokens[place].id
        told = browser.run("document.getElementById('tip').textContent")
        assert told.startswith(f"id {first}  ·  token {place}")
    browser.run("document.querySelector('[data-look=focus]').click()")
    assert browser.run("getComputedStyle(document.querySelector('.tokens span:not(.t)')).opacity") == "0.38"
    browser.run("document.querySelector('[data-look=borders]').click()")
    assert browser.run("document.querySelectorAll('button[aria-pressed=true]').length") == 2
    check_fits(browser, page, 380)


def test_preview_of_windows(browser: Browser, tmp_path: Path) -> None:
    found = preview(["swiftkit::persona"], tokenizer=chatty(), windows=2, max_length=400)
    page = tmp_path / "windows.html"
    page.write_text(preview_page(found, model="toy"), encoding="utf-8")
    browser.open(page)
    check_quiet(browser)
    seen(browser, tmp_path / "windows.png")
    assert (
        browser.run("getComputedStyle(document.querySelector('.document + .document')).borderTopStyle")
        == "dashed"
    )


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_report_of_two_runs(browser: Browser, runs: list[Path], tmp_path: Path, dark: bool) -> None:
    page = report(runs, output=tmp_path / "report.html")
    browser.open(page, dark=dark)
    check_quiet(browser)
    charts = browser.run("document.querySelectorAll('.chart svg').length")
    assert charts == 5
    for place in range(charts):
        browser.run(f"document.querySelectorAll('.chart svg')[{place}].id = 'chart{place}'")
        area = box(browser, f"#chart{place}")
        picture = seen(browser, tmp_path / f"report-{place}-{'dark' if dark else 'light'}.png")
        for run in (0, 1):
            stroke = colour(browser, f"#chart{place} polyline.r{run}", "stroke")
            assert share(picture, area, stroke) * (area[2] - area[0]) * (area[3] - area[1]) > 100, (
                place,
                run,
            )
    left, top, right, bottom = box(browser, "#chart0")
    browser.point_at(left + (right - left) * 0.5, (top + bottom) / 2)
    told = browser.run("document.getElementById('tip').innerText")
    assert told.startswith("step ") and all(run.name in told for run in runs)
    browser.run("document.getElementById('chart0').focus()")
    steps = []
    for _ in range(2):
        browser.press("ArrowRight")
        steps.append(int(browser.run("document.getElementById('chart0').dataset.step")))
    assert steps[1] == steps[0] + 1
    assert browser.run("getComputedStyle(document.querySelector('.chart .scale.log')).display") == "none"
    browser.run("document.querySelector('[data-look=log]').click()")
    assert browser.run("getComputedStyle(document.querySelector('.chart .scale.log')).display") == "inline"
    assert browser.run("getComputedStyle(document.querySelector('.chart .scale.linear')).display") == "none"
    seen(browser, tmp_path / f"report-log-{'dark' if dark else 'light'}.png")
    check_quiet(browser)
    check_fits(browser, page, 380)


def test_report_of_one_run(browser: Browser, runs: list[Path], tmp_path: Path) -> None:
    page = report(runs[:1], output=tmp_path / "one.html")
    browser.open(page)
    check_quiet(browser)
    browser.run("document.querySelector('details').open = true")
    check_quiet(browser)
    seen(browser, tmp_path / "one.png")
    browser.open(page)
    browser.picture(tmp_path / "whole.png", whole=True)
