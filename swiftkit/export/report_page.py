"""The page of a report: curves, samples, data, config, and what the runs were made of."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from html import escape
from pathlib import Path
from typing import Any

from swiftkit.config import Config, DpoConfig, RewardConfig, SftConfig
from swiftkit.data.page import page, tiles
from swiftkit.data.preview_text import visible
from swiftkit.export.curves import COLOURS, Line, chart, number
from swiftkit.export.report import Story

HERE = Path(__file__).parent
CURVES = (  # metric, title, from zero, smooth
    ("loss", "Loss on trained tokens", False, True),
    ("eval_loss", "Evaluation loss", False, False),
    ("learning_rate", "Learning rate", True, False),
    ("grad_norm", "Gradient norm", True, True),
    ("tokens_per_second", "Tokens per second", True, False),
    ("memory_allocated_gib", "Memory allocated, GiB", True, False),
)
NONE = "–"
KEPT = ("rows_kept", "rows_held_out", "rows_left_out", "rows_dropped", "rows_skipped")
FATES = ("kept", "held out", "not drawn", "dropped", "skipped")


def report_page(runs: Sequence[Story]) -> str:
    """The page, with the runs side by side in their order."""
    several = len(runs) > 1
    title = f"{len(runs)} runs, side by side" if several else runs[0].name
    body = [
        f'<header class="top"><p class="kicker">swiftkit report</p><h1>{_text(title)}</h1>',
        f'<p class="lead">{_text(_lead(runs))}</p>{"" if several else _tiles(runs[0])}</header><main>',
        _summary(runs) if several else "",
        _section("Curves", _curves(runs), _buttons()),
        _section("Samples", _samples(runs)),
        _section("Data", _data(runs)),
        _section("Config", _config(runs)),
        _section("What the runs were made of" if several else "What the run was made of", _made_of(runs)),
        "</main><footer>Made from the files of the run folders. The page stands alone.</footer>",
    ]
    return page(
        title=f"{title} · swiftkit report",
        body="\n".join(part for part in body if part),
        style=HERE / "report.css",
        script=HERE / "report.js",
    )


# ---- at first sight ------------------------------------------------------------------------------------


def _lead(runs: Sequence[Story]) -> str:
    models = list(dict.fromkeys(_model(run) for run in runs))
    methods = list(dict.fromkeys(str(run.args.get("method", "")) for run in runs))
    return f"{', '.join(methods)} of {', '.join(models)}" + (f", {_state(runs[0])}" if len(runs) == 1 else "")


def _model(run: Story) -> str:
    return str(run.args.get("config", {}).get("model", "an unknown model")).rstrip("/").rpartition("/")[2]


def _state(run: Story) -> str:
    planned = f" of {run.steps:,}" if run.steps else ""
    return "finished" if run.finished else f"not finished: {run.step:,}{planned} steps are logged"


def _facts(run: Story) -> list[tuple[str, str, str]]:
    """(name, value, a word more) of what is asked first."""
    first, last = run.log.get("loss", [(0, 0.0)])[0][1], run.last("loss")
    best = run.lowest("eval_loss")
    speed, memory = run.usual("tokens_per_second"), run.highest("memory_allocated_gib")
    reserved = run.highest("memory_reserved_gib")
    held = sum(value for _, value in run.log.get("skipped_steps", ()))
    return [
        ("steps", f"{run.step:,}", f"of {run.steps:,}" if run.steps else ""),
        ("loss", _number(last), "" if last is None else f"from {number(first)}"),
        ("best evaluation loss", _number(best and best[1]), f"at step {best[0]:,}" if best else ""),
        ("tokens/s", _number(speed), "median" if speed is not None else ""),
        ("peak memory", NONE if memory is None else f"{memory:.1f} GiB",
         "" if reserved is None else f"{reserved:.1f} reserved"),
        ("steps held back", f"{held:,.0f}" if held else NONE, "their loss or gradient was bad"),
        ("time", _clock(run.seconds), ""),
    ]  # fmt: skip


def _clock(seconds: float) -> str:
    if not seconds:
        return NONE
    return f"{seconds:.1f} s" if seconds < 60 else str(timedelta(seconds=round(seconds)))


def _tiles(run: Story) -> str:
    return tiles([(value, name, more) for name, value, more in _facts(run) if value != NONE])


def _summary(runs: Sequence[Story]) -> str:
    """A line for each run; what no run has gets no column."""
    facts = [_facts(run) for run in runs]
    told = [column for column in range(len(facts[0])) if any(own[column][1] != NONE for own in facts)]
    rows = []
    for place, (run, own) in enumerate(zip(runs, facts, strict=True)):
        cells = "".join(
            f'<td class="num">{_text(value)}{f" <small>{_text(more)}</small>" if more else ""}</td>'
            for _, value, more in (own[column] for column in told)
        )
        state = "" if run.finished else f' <span class="badge bad">{_text(_state(run))}</span>'
        rows.append(f'<tr><th scope="row">{_swatch(place)}{_text(run.name)}{state}</th>{cells}</tr>')
    head = "".join(f'<th scope="col" class="num">{facts[0][column][0]}</th>' for column in told)
    return _table(f'<th scope="col">run</th>{head}', rows, look=" card")


# ---- curves --------------------------------------------------------------------------------------------


def _curves(runs: Sequence[Story]) -> str:
    logged = [curve for curve in CURVES if any(run.log.get(curve[0]) for run in runs)]
    if not logged:
        return '<p class="note">Nothing is logged yet.</p>'
    figures: list[str] = []
    for metric, title, from_zero, smooth in logged:
        lines = [
            Line(place, run.name, [step for step, _ in points], [value for _, value in points])
            for place, run in enumerate(runs)
            if (points := run.log.get(metric))
        ]
        wide = len(logged) % 2 == 1 and not figures  # two in a row, and none alone
        figures.append(chart(title, lines, from_zero=from_zero, smooth=smooth, wide=wide))
    names = "".join(f"<li>{_swatch(place)}{_text(run.name)}</li>" for place, run in enumerate(runs))
    legend = f'<ul class="legend" id="runs">{names}</ul>' if len(runs) > 1 else ""
    return f'{legend}<div class="charts">{"".join(figures)}</div>'


def _buttons() -> str:
    return (
        '<div class="buttons" hidden>'
        '<button type="button" data-look="log" aria-pressed="false">Logarithmic</button></div>'
    )


def _swatch(place: int) -> str:
    dashed = " dashed" if place >= COLOURS else ""
    return f'<span class="swatch r{place % COLOURS}{dashed}" aria-hidden="true"></span>'


# ---- samples -------------------------------------------------------------------------------------------


def _samples(runs: Sequence[Story]) -> str:
    """Each prompt once, with the answers of the runs that were asked it."""
    prompts = dict.fromkeys(sample.get("prompt", "") for run in runs for sample in run.samples)
    if not prompts:
        waits = "They are written when a run ends." if not all(run.finished for run in runs) else ""
        return f'<p class="note">There are no samples. {waits}</p>'
    cards = []
    for prompt in prompts:
        answers = [
            (place, run.name, sample)
            for place, run in enumerate(runs)
            for sample in run.samples
            if sample.get("prompt", "") == prompt
        ]
        cards.append(_prompt(prompt, answers, several=len(runs) > 1))
    return "".join(cards)


def _prompt(prompt: str, answers: Sequence[tuple[int, str, dict[str, str]]], *, several: bool) -> str:
    """An answer before that all runs share is shown once."""
    befores = list(dict.fromkeys(sample.get("before", "") for _, _, sample in answers))
    cells = []
    for place, name, sample in answers:
        label = f"{_swatch(place)}{_text(name)} " if several else ""
        if len(befores) > 1:
            cells.append(_answer(f"{label}before", sample.get("before", "")))
        cells.append(_answer(f"{label}after", sample.get("after", ""), look=f" after r{place % COLOURS}"))
    if len(befores) == 1:
        cells.insert(0, _answer("before", befores[0]))
    inside = f'<h3>{_text(prompt)}</h3><div class="answers">{"".join(cells)}</div>'
    return f'<article class="card sample">{inside}</article>'


def _answer(label: str, words: str, *, look: str = "") -> str:
    shown = _text(words) if words.strip() else "<i>(nothing)</i>"
    return f'<div class="answer{look}"><p class="label">{label}</p><blockquote>{shown}</blockquote></div>'


# ---- data ----------------------------------------------------------------------------------------------


def _data(runs: Sequence[Story]) -> str:
    """A card for each data report; runs with the same one share it."""
    groups: list[tuple[dict[str, Any], list[int]]] = []
    for place, run in enumerate(runs):
        same = next((places for content, places in groups if content == run.data), None)
        if same is None:
            groups.append((run.data, [place]))
        else:
            same.append(place)
    cards = []
    for content, places in groups:
        parts = [_data_of(name, part) for name, part in content.items() if isinstance(part, dict)]
        inside = "".join(parts) or '<p class="note last">The folder has no data report.</p>'
        names = "".join(f"<h3>{_swatch(place)}{_text(runs[place].name)}</h3>" for place in places)
        head = f"<header>{names}</header>" if len(runs) > 1 else ""
        cards.append(f'<article class="card">{head}{inside}</article>')
    return "".join(cards)


def _data_of(name: str, content: Mapping[str, Any]) -> str:
    counts = [int(content.get(key, 0)) for key in KEPT]
    total = sum(counts) or 1
    bar = "".join(
        f'<span class="{fate.replace(" ", "-")}" style="flex:{count}"></span>'
        for fate, count in zip(FATES, counts, strict=True)
        if count
    )
    told = ", ".join(f"{count:,} {fate}" for fate, count in zip(FATES, counts, strict=True) if count)
    tokens, trained = int(content.get("tokens", 0)), int(content.get("trained_tokens", 0))
    share = trained / tokens if tokens else 0.0
    sources = ", ".join(map(str, content.get("sources", [])))
    windows = (
        f"{int(content.get('windows', 0)):,} windows of {int(content.get('max_length', 0)):,} tokens, "
        f"{float(content.get('packing_efficiency', 0)):.0%} full"
    )
    return (
        f'<section class="data"><h4>{_text(f"{name}: {sources}")}</h4>'
        f'<div class="bar" role="img" aria-label="{_text(told)}">{bar}</div>'
        f"<p>{total:,} rows: {_text(told)}</p>"
        f"<p>{tokens:,} tokens, {trained:,} of them trained ({share:.0%}); {windows}</p>"
        f"{_reasons(content)}</section>"
    )


def _reasons(content: Mapping[str, Any]) -> str:
    rows = [
        f'<tr><td><span class="badge{" bad" if fate != "note" else ""}">{fate}</span></td>'
        f'<td class="num">{int(tally.get("rows", 0)):,}</td><td>{_text(reason)}</td>'
        f'<td class="mono">{_text(", ".join(map(str, tally.get("first", []))))}</td></tr>'
        for fate, key in (("dropped", "dropped"), ("skipped", "skipped"), ("note", "notes"))
        for reason, tally in content.get(key, {}).items()
    ]
    head = '<th>what</th><th class="num">rows</th><th>reason</th><th>first of them</th>'
    return _table(head, rows) if rows else ""


# ---- config and versions -------------------------------------------------------------------------------


def _config(runs: Sequence[Story]) -> str:
    configs = [run.args.get("config", {}) for run in runs]
    if len(runs) > 1:
        differing = list(_differing(configs))
        same = '<p class="note">Every knob has the same value in all of these runs.</p>'
        first = _knobs(runs, configs, differing) if differing else same
        return f"<h3>What differs</h3>{first}{_folded('All knobs', _knobs(runs, configs, _keys(configs)))}"
    of_method: dict[str, type[Config]] = {"dpo": DpoConfig, "reward": RewardConfig}
    fields = of_method.get(runs[0].args.get("method", ""), SftConfig).model_fields
    chosen = [
        name
        for name, value in configs[0].items()
        if name in fields and (fields[name].is_required() or _plain(fields[name].default) != value)
    ]
    first = _knobs(runs, configs, chosen)
    return (
        f"<h3>Not at their defaults</h3>{first}{_folded('All knobs', _knobs(runs, configs, _keys(configs)))}"
    )


def _plain(value: Any) -> Any:
    """A default as JSON writes it."""
    return json.loads(json.dumps(value, default=str))


def _keys(mappings: Iterable[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for mapping in mappings for name in mapping))


def _differing(mappings: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for name in _keys(mappings):
        if any(mapping.get(name, NONE) != mappings[0].get(name, NONE) for mapping in mappings):
            yield name


def _knobs(runs: Sequence[Story], mappings: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    """A table of names, with a column for each run; values that differ are set off."""
    apart = set(_differing(mappings))
    rows = []
    for name in names:
        look = ' class="differs"' if name in apart else ""
        cells = "".join(
            f'<td class="mono">{_text(_value(mapping.get(name, NONE)))}</td>' for mapping in mappings
        )
        rows.append(f'<tr{look}><th scope="row" class="mono">{_text(name)}</th>{cells}</tr>')
    columns = "".join(f'<th scope="col">{_swatch(n)}{_text(run.name)}</th>' for n, run in enumerate(runs))
    return _table(f"<th></th>{columns}" if len(runs) > 1 else "", rows)


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _made_of(runs: Sequence[Story]) -> str:
    """Versions, machine, base and data, each a line; of several runs first what differs."""
    facts = []
    for run in runs:
        found: dict[str, Any] = {"folder": str(run.folder), "state": _state(run)}
        for part in ("base", "data", "machine", "plan", "versions"):
            content = run.args.get(part, {})
            if isinstance(content, dict):
                named = {
                    f"{part}: {name}": value for name, value in content.items() if value not in ("", None)
                }
                found |= named
        facts.append(found)
    if len(runs) == 1:
        return _knobs(runs, facts, _keys(facts))
    whole = _folded("All of it", _knobs(runs, facts, _keys(facts)))
    return f"{_knobs(runs, facts, list(_differing(facts)))}{whole}"


# ---- pieces --------------------------------------------------------------------------------------------


def _section(title: str, inside: str, beside: str = "") -> str:
    name = title.split()[0].lower()
    return f'<section id="{name}"><div class="head"><h2>{title}</h2>{beside}</div>{inside}</section>'


def _folded(title: str, inside: str) -> str:
    return f"<details><summary>{title}</summary>{inside}</details>"


def _table(head: str, rows: Sequence[str], *, look: str = "") -> str:
    heads = f"<thead><tr>{head}</tr></thead>" if head else ""
    return f'<div class="scroll{look}"><table>{heads}<tbody>{"".join(rows)}</tbody></table></div>'


def _number(value: float | None) -> str:
    return NONE if value is None else number(value)


def _text(words: str) -> str:
    return escape(visible(words))
