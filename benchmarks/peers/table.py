"""The tables of docs/performance.md, made from the records of one or several calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers.rows import ROWS, Row

Record = dict[str, Any]


@dataclass(frozen=True)
class Table:
    """What is shown of a benchmark's records.

    Args:
        name: of the benchmark; its table stands in a document between two marks that name it.
        rows: that there are.
        columns: beside those of the row's name, its checkpointing and its machine.
        cells: of a finished record, one for each column; the other argument is all records.
        heading: what all rows compute, from a record's workload.
        value: of a finished record; the largest comes first.
    """

    name: str
    rows: Mapping[str, Row]
    columns: tuple[str, ...]
    cells: Callable[[Record, list[Record]], list[str]]
    heading: Callable[[Record], str]
    value: Callable[[Record], float]

    @property
    def begin(self) -> str:
        """The line before the table."""
        return f"<!-- {self.name}: begin -->"

    @property
    def end(self) -> str:
        """The line behind it."""
        return f"<!-- {self.name}: end -->"


def merge(table: Table, files: Iterable[Path], into: Path) -> None:
    """Put the table between the markers of a document.

    Of several records of a row the latest that finished counts; a failure shows only where nothing finished.

    Raises:
        ValueError: when the document has no markers, or the records have different workloads.
    """
    records = [json.loads(line) for file in files for line in file.read_text().splitlines() if line.strip()]
    text = into.read_text()
    if text.count(table.begin) != 1 or text.count(table.end) != 1:
        raise ValueError(f"{into} needs the lines {table.begin} and {table.end} once each")
    workloads = {json.dumps(record["workload"], sort_keys=True) for record in records}
    if len(workloads) != 1:
        raise ValueError(
            f"the records have {len(workloads)} different workloads: " + "; ".join(sorted(workloads))
        )
    before, _, rest = text.partition(table.begin)
    after = rest.partition(table.end)[2]
    into.write_text(f"{before}{table.begin}\n\n{render(table, records)}\n{table.end}{after}")


def render(table: Table, records: list[Record]) -> str:
    """Workload, table, versions and machines as Markdown."""
    machines = _machines(records)
    chosen = [_choose([r for r in records if r["row"] == name]) for name in table.rows]
    shown = sorted((r for r in chosen if r), key=lambda r: -table.value(r) if r["phase"] == "done" else 0.0)
    columns = ["row", "checkpointing", *table.columns, "machine"]
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(_cells(table, record, records, machines)) + " |" for record in shown]
    return "\n".join(
        [table.heading(records[0]["workload"]), "", *lines, "", *_footnotes(table, shown, machines), ""]
    )


def _choose(same_row: list[Record]) -> Record | None:
    finished = [record for record in same_row if record["phase"] == "done"] or same_row
    return max(finished, key=lambda record: record["date"]) if finished else None


def _machines(records: list[Record]) -> dict[str, str]:
    """A letter for each machine, by its id."""
    ids = list(dict.fromkeys(record["machine"]["id"] for record in records))
    return {machine: chr(ord("A") + index) for index, machine in enumerate(ids)}


def _cells(table: Table, record: Record, records: list[Record], machines: dict[str, str]) -> list[str]:
    title = table.rows[record["row"]].title
    checkpointing = {False: "no", True: "yes"}.get(record["checkpointing"], "offloading")
    done = record["phase"] == "done"
    cells = table.cells(record, records) if done else [record["error"], *[""] * (len(table.columns) - 1)]
    return [title, checkpointing, *cells, machines[record["machine"]["id"]]]


def _footnotes(table: Table, shown: list[Record], machines: dict[str, str]) -> list[str]:
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
        peers.setdefault(table.rows[record["row"]].packages, {}).update(record.get("versions", {}))
    for name, versions in sorted(peers.items()):
        if versions:
            lines.append(f"- Versions ({name}): " + ", ".join(f"{k} {v}" for k, v in versions.items()) + ".")
    return lines


# ---- sft_throughput ----------------------------------------------------------------------------------------


def _sft_heading(workload: Record) -> str:
    return (
        f"{workload['shape']} ({workload['layers']} layers, random weights), LoRA rank {workload['rank']} on "
        f"all linear layers, {workload['documents']} x {workload['length']} tokens a step, "
        f"{workload['warmup']} steps to warm up and {workload['steps']} timed, seed {workload['seed']}."
    )


def _sft_cells(record: Record, records: list[Record]) -> list[str]:
    return [
        f"{record['tokens_per_s']:,.0f}", f"{record['median_step_ms']:,.1f}", memory(record),
        _pair(*(_first_step(record["row"], records, cache) for cache in ("cold", "warm"))),
        *losses_and_norms(record),
    ]  # fmt: skip


def memory(record: Record) -> str:
    """Allocated and reserved, GiB."""
    return _pair(record.get("allocated_gib"), record.get("reserved_gib"))


def losses_and_norms(record: Record) -> list[str]:
    """Of the first and the last step."""
    return [
        f"{record['first_loss']:.4f} → {record['last_loss']:.4f}",
        f"{record['first_grad_norm']:.4f} → {record['last_grad_norm']:.4f}",
    ]


def _pair(first: float | None, second: float | None) -> str:
    return " / ".join("–" if value is None else f"{value:.1f}" for value in (first, second))


def _first_step(row: str, records: list[Record], cache: str) -> float | None:
    known = [r for r in records if r["row"] == row and r["compile_cache"] == cache and "first_step_s" in r]
    return max(known, key=lambda record: record["date"])["first_step_s"] if known else None


SFT = Table(
    name="sft_throughput",
    rows=ROWS,
    columns=(
        "tokens/s", "median step ms", "allocated / reserved GiB", "first step s, cold / warm",
        "loss first → last", "gradient norm first → last",
    ),
    cells=_sft_cells,
    heading=_sft_heading,
    value=lambda record: record["tokens_per_s"],
)  # fmt: skip
