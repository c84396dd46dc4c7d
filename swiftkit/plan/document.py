"""The tables of docs/scaling.md.

`python -m swiftkit.plan.document --into docs/scaling.md` writes them anew.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from swiftkit import registry
from swiftkit.errors import UserError
from swiftkit.plan.job import Base, Job
from swiftkit.plan.layout import Layout
from swiftkit.plan.machine import H100_NODE, H200_NODE, Machine
from swiftkit.plan.predict import Prediction, compare, kind, predict, why
from swiftkit.plan.shape import ModelShape, shape_of

MODELS = {"8B": "llama3-8b", "70B": "llama3-70b", "405B": "llama3.1-405b"}
GPUS = (1, 2, 8, 64, 512)
JOBS = {
    "LoRA, FP8 base": Job(),
    "LoRA, NF4 base, FP8 products": Job(base="nf4-fp8"),
    "full, bf16": Job(tuner="full", base="bf16"),
}
MEASURED: dict[Base, tuple[int, float]] = {
    "fp8": (25_445, 75.9),
    "nf4-fp8": (24_444, 66.5),
    "bf16": (16_840, 64.4),
    "nf4": (16_346, 55.0),
}
"""Tokens/s and GiB of docs/performance.md: Llama-3-8B's shape, 4 x 4,096 tokens a step, one H200."""


def shape_called(name: str) -> ModelShape:
    """The shape of a recipe of the registry.

    Raises:
        UserError: for a name without dimensions.
    """
    recipe = registry.resolve(name)
    if recipe is None or recipe.dimensions is None:
        raise UserError(f"{name}: the registry has no dimensions of it")
    return shape_of(recipe.name, recipe.dimensions)


def measured() -> str:
    """Predictions beside what has been measured, which is one GPU."""
    lines = [
        "| base, 8B, one H200 | tokens/s measured | predicted | GiB measured | predicted |",
        "|---|---|---|---|---|",
    ]
    for base, (speed, room) in MEASURED.items():
        one = predict(shape_called(MODELS["8B"]), Job(base=base), H200_NODE, Layout())
        lines.append(
            f"| {base} | {speed:,} | {one.tokens_per_second:,.0f} | {room} | {one.memory.total / 2**30:.1f} |"
        )
    return "\n".join(lines)


def winners(machine: Machine) -> str:
    """The best layout of every model, number of GPUs and kind of training."""
    lines = [f"| model | GPUs | {' | '.join(JOBS)} |", "|---|---|" + "---|" * len(JOBS)]
    for label, name in MODELS.items():
        shape = shape_called(name)
        for gpus in GPUS:
            cells = [_winner(compare(shape, job, machine, gpus)[0]) for job in JOBS.values()]
            lines.append(f"| {label} | {gpus} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _winner(one: Prediction) -> str:
    if not one.fits:
        return f"none fits (at least {one.memory.total / 2**30:,.0f} GiB each)"
    return f"{one.layout.name}: {one.tokens_per_second:,.0f} ({_share(one)})"


def _share(one: Prediction) -> str:
    low, high = (f"{value:.2f}" for value in (one.efficiency_unhidden, one.efficiency))
    return high if low == high else f"{low} to {high}"


def layouts_table(label: str, job: Job, machine: Machine) -> str:
    """What every kind of layout moves and takes; of several of one kind the best."""
    shape = shape_called(MODELS[label])
    lines = [
        "| GPUs | layout | GiB each | micro-batches, saving | NVLink GB | network GB | computes ms "
        "| waits ms | tokens/s a GPU | efficiency |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for gpus in GPUS:
        ranked = compare(shape, job, machine, gpus)
        lines += [f"| {gpus} | {_row(one)} |" for one in _best_of_each_kind(ranked)]
    return "\n".join(lines)


def _best_of_each_kind(ranked: list[Prediction]) -> Iterator[Prediction]:
    seen: set[str] = set()
    for one in ranked:
        if kind(one.layout) not in seen:
            seen.add(kind(one.layout))
            yield one


def _row(one: Prediction) -> str:
    cells = [one.layout.name, f"{one.memory.total / 2**30:,.0f}"]
    if not one.fits:
        return " | ".join([*cells, "does not fit", *["–"] * 6])
    cells += [
        f"{one.micro_batches} x {one.cut.micro_tokens:,}, {one.cut.saving.name}",
        _gigabytes(one.traffic.nvlink),
        _gigabytes(one.traffic.nic),
        f"{1e3 * one.compute:,.0f}",
        f"{1e3 * one.waiting:,.0f}",
        f"{one.tokens_per_second:,.0f}",
        _share(one),
    ]
    return " | ".join(cells)


def _gigabytes(count: float) -> str:
    return f"{count / 1e9:,.2f}" if count < 10e9 else f"{count / 1e9:,.0f}"


def reasons(machine: Machine) -> str:
    """Why the winner wins, row by row."""
    lines = []
    for title in ("LoRA, FP8 base", "full, bf16"):
        for label, name in MODELS.items():
            for gpus in GPUS[1:]:
                ranked = compare(shape_called(name), JOBS[title], machine, gpus)
                lead = f"**{ranked[0].layout.name}** " if ranked[0].fits else ""
                lines.append(f"- {label}, {title}, {gpus} GPUs: {lead}{why(ranked)}.")
    return "\n".join(lines)


def sections() -> dict[str, str]:
    """Every table of the document, by its mark."""
    found = {
        "measured": measured(),
        "winners h200": winners(H200_NODE),
        "winners h100": winners(H100_NODE),
        "reasons": reasons(H200_NODE),
    }
    for label in MODELS:
        found[f"{label} lora"] = layouts_table(label, JOBS["LoRA, FP8 base"], H200_NODE)
        found[f"{label} full"] = layouts_table(label, JOBS["full, bf16"], H200_NODE)
    return found


def renewed(text: str) -> str:
    """A document with its tables written anew, each between its two marks.

    Raises:
        ValueError: a mark is not there.
    """
    for mark, table in sections().items():
        begin, end = f"<!-- plan {mark}: begin -->", f"<!-- plan {mark}: end -->"
        before, _, rest = text.partition(begin)
        _, found, after = rest.partition(end)
        if not found:
            raise ValueError(f"the document has no {begin} ... {end}")
        text = f"{before}{begin}\n\n{table}\n\n{end}{after}"
    return text


def main() -> None:
    """Print the tables, or write them into a document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--into", type=Path, help="a document with marks; without it the tables are printed")
    into = parser.parse_args().into
    if into is None:
        print("\n\n".join(f"## {mark}\n\n{table}" for mark, table in sections().items()))
    else:
        into.write_text(renewed(into.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
