"""`swiftkit doctor`: is this machine ready? One line a check, good, weak or broken, with what mends it.

Facts are collected in `doctor_facts.py`; the checks are functions of them alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.text import Text

from swiftkit.parallel import doctor_gpus, doctor_host
from swiftkit.parallel.doctor_facts import Facts, collect
from swiftkit.parallel.doctor_line import Line
from swiftkit.parallel.options import DoctorConfig

CHECKS: tuple[Callable[[Facts], Iterator[Line]], ...] = (
    doctor_host.python,
    doctor_host.packages,
    doctor_gpus.driver,
    doctor_gpus.gpus,
    doctor_host.cuda,
    doctor_host.nccl,
    doctor_gpus.links,
    doctor_gpus.peers,
    doctor_host.network,
    doctor_host.host_memory,
    doctor_host.shared_memory,
    doctor_host.checkpoint_disk,
)
COLOURS = {"good": "green", "weak": "yellow", "broken": "bold red"}


def run(config: DoctorConfig, console: Console) -> bool:
    """Look, judge, measure where that is asked for, and print.

    Args:
        config: where checkpoints go, and what is measured.
        console: where the lines go.

    Returns:
        Whether nothing is broken.

    Raises:
        UserError: for links that cannot be measured as asked.
    """
    facts = collect(config.output_dir)
    lines = judge(facts)
    if not config.as_json:
        show(lines, console)
        for row in doctor_gpus.link_map(facts):
            console.print(row, highlight=False, markup=False, soft_wrap=True)
    bench: dict[str, Any] = {}
    if config.bench:
        from swiftkit.parallel.doctor_bench import measure, verdicts

        measured = measure(config, facts)
        more = verdicts(measured, facts)
        lines += more
        bench = measured.as_dict()
        if not config.as_json:
            show(more, console)
            for row in measured.table():
                console.print(row, highlight=False, markup=False, soft_wrap=True)
    if config.as_json:
        found = {**as_json(facts, lines), **({"bench": bench} if bench else {})}
        console.print(json.dumps(found, indent=2), highlight=False, markup=False, soft_wrap=True)
    else:
        console.print(_summary(lines), highlight=False, markup=False, soft_wrap=True)
    return healthy(lines)


def judge(facts: Facts) -> list[Line]:
    """Every check, in the order in which a person would look."""
    return [line for check in CHECKS for line in check(facts)]


def healthy(lines: list[Line]) -> bool:
    """Whether nothing is broken."""
    return all(line.verdict != "broken" for line in lines)


def as_json(facts: Facts, lines: list[Line]) -> dict[str, Any]:
    """Lines and facts, for `--json`."""
    return {"healthy": healthy(lines), "checks": [asdict(line) for line in lines], "facts": asdict(facts)}


def show(lines: list[Line], console: Console) -> None:
    """One line a check, and what mends it on the next."""
    for line in lines:
        row = Text(f"{line.verdict:<8}", style=COLOURS[line.verdict])
        row.append(f"{line.name:<20}{line.found}", style="default")
        console.print(row, soft_wrap=True)
        if line.mend:
            console.print(Text(f"{'':<28}-> {line.mend}", style="default"), soft_wrap=True)


def _summary(lines: list[Line]) -> str:
    counts = {verdict: sum(line.verdict == verdict for line in lines) for verdict in COLOURS}
    if counts["broken"]:
        return f"{counts['broken']} broken, {counts['weak']} weak: mend what is broken before you train"
    return f"nothing is broken, {counts['weak']} weak, {counts['good']} good"
