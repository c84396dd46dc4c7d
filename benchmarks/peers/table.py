"""The table of docs/performance.md, made from the records of one or several calls."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from peers.rows import ROWS

BEGIN = "<!-- sft_throughput: begin -->"
END = "<!-- sft_throughput: end -->"
COLUMNS = [
    "row", "checkpointing", "tokens/s", "median step ms", "allocated / reserved GiB",
    "first step s, cold / warm", "loss first → last", "gradient norm first → last", "machine",
]  # fmt: skip
Record = dict[str, Any]


def merge(files: Iterable[Path], into: Path) -> None:
    """Put the table between the markers of a document.

    Of several records of a row the latest that finished counts; a failure shows only where nothing finished.

    Raises:
        ValueError: when the document has no markers, or the records have different workloads.
    """
    records = [json.loads(line) for file in files for line in file.read_text().splitlines() if line.strip()]
    text = into.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"{into} needs the lines {BEGIN} and {END} once each")
    workloads = {json.dumps(record["workload"], sort_keys=True) for record in records}
    if len(workloads) != 1:
        raise ValueError(
            f"the records have {len(workloads)} different workloads: " + "; ".join(sorted(workloads))
        )
    before, _, rest = text.partition(BEGIN)
    into.write_text(f"{before}{BEGIN}\n\n{render(records)}\n{END}{rest.partition(END)[2]}")


def render(records: list[Record]) -> str:
    """Workload, table, versions and machines as Markdown."""
    machines = _machines(records)
    chosen = [_choose([r for r in records if r["row"] == name]) for name in ROWS]
    shown = sorted((r for r in chosen if r), key=lambda record: -record.get("tokens_per_s", 0.0))
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(_cells(record, records, machines)) + " |" for record in shown]
    return "\n".join(
        [_workload_line(records[0]["workload"]), "", *lines, "", *_footnotes(shown, machines), ""]
    )


def _choose(same_row: list[Record]) -> Record | None:
    finished = [record for record in same_row if record["phase"] == "done"] or same_row
    return max(finished, key=lambda record: record["date"]) if finished else None


def _machines(records: list[Record]) -> dict[str, str]:
    """A letter for each machine, by its id."""
    ids = list(dict.fromkeys(record["machine"]["id"] for record in records))
    return {machine: chr(ord("A") + index) for index, machine in enumerate(ids)}


def _workload_line(workload: Record) -> str:
    return (
        f"{workload['shape']} ({workload['layers']} layers, random weights), LoRA rank {workload['rank']} on "
        f"all linear layers, {workload['documents']} x {workload['length']} tokens a step, "
        f"{workload['warmup']} steps to warm up and {workload['steps']} timed, seed {workload['seed']}."
    )


def _cells(record: Record, records: list[Record], machines: dict[str, str]) -> list[str]:
    title = ROWS[record["row"]].title
    checkpointing = {False: "no", True: "yes"}.get(record["checkpointing"], "offloading")
    letter = machines[record["machine"]["id"]]
    if record["phase"] != "done":
        return [title, checkpointing, record["error"], *[""] * (len(COLUMNS) - 4), letter]
    return [
        title, checkpointing, f"{record['tokens_per_s']:,.0f}", f"{record['median_step_ms']:,.1f}",
        _pair(record.get("allocated_gib"), record.get("reserved_gib")),
        _pair(*(_first_step(record["row"], records, cache) for cache in ("cold", "warm"))),
        f"{record['first_loss']:.4f} → {record['last_loss']:.4f}",
        f"{record['first_grad_norm']:.4f} → {record['last_grad_norm']:.4f}", letter,
    ]  # fmt: skip


def _pair(first: float | None, second: float | None) -> str:
    return " / ".join("–" if value is None else f"{value:.1f}" for value in (first, second))


def _first_step(row: str, records: list[Record], cache: str) -> float | None:
    known = [r for r in records if r["row"] == row and r["compile_cache"] == cache and "first_step_s" in r]
    return max(known, key=lambda record: record["date"])["first_step_s"] if known else None


def _footnotes(shown: list[Record], machines: dict[str, str]) -> list[str]:
    """Machines, then versions: those that rows of a peer share are said once."""
    lines = []
    for machine, letter in machines.items():
        of_it = [record for record in shown if record["machine"]["id"] == machine]
        if of_it:
            facts = of_it[0]["machine"]
            dates = sorted({record["date"][:10] for record in of_it})
            commits = sorted({record["commit"] for record in of_it})
            lines.append(
                f"- Machine {letter}: {facts['card']}, driver {facts['driver']}, {facts['clocks']}, "
                f"Python {facts['python']}; {', '.join(dates)}, commit {', '.join(commits)}."
            )
    peers: dict[str, dict[str, str]] = {}
    for record in shown:
        peers.setdefault(ROWS[record["row"]].packages, {}).update(record.get("versions", {}))
    for name, versions in sorted(peers.items()):
        if versions:
            lines.append(f"- Versions ({name}): " + ", ".join(f"{k} {v}" for k, v in versions.items()) + ".")
    return lines
