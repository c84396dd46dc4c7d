"""Speed of LoRA fine-tuning: ours beside its peers, over one model and one token stream.

    python benchmarks/sft_throughput.py --rows ours-fp8,unsloth-bf16 --results results.jsonl
    python benchmarks/sft_throughput.py --merge results.jsonl --into docs/performance.md

Every row runs in a process of its own and is written to the results as soon as it is there.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import faulthandler
import importlib
import json
import multiprocessing
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from peers.rows import ROWS, Row
from peers.table import SFT, Table, merge
from peers.workload import SHAPES, Workload

REPOSITORY = Path(__file__).resolve().parents[1]
LEAST_SECONDS = 45  # a row is not begun with less of the budget left


def parse() -> argparse.Namespace:
    """The command line."""
    name = Path(__file__).stem
    parser = parser_of(ROWS, __doc__ or "", name)
    parser.add_argument("--documents", type=int, help="in a step; by default the shape's")
    parser.add_argument("--length", type=int, help="tokens of a document; by default the shape's")
    return checked(parser, ROWS)


def parser_of(rows: Mapping[str, Row], about: str, name: str) -> argparse.ArgumentParser:
    """What every benchmark of rows takes; `name` is that of its files."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--rows", default="all", help="comma-separated, in the order to run: " + ", ".join(rows)
    )
    parser.add_argument("--shape", choices=SHAPES, default="llama3-8b")
    parser.add_argument("--layers", type=int, help="fewer than the shape has, for development")
    parser.add_argument("--warmup", type=int, default=3, help="steps before the clock starts")
    parser.add_argument("--steps", type=int, default=8, help="timed steps")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--checkpointing", choices=["row", "on", "off"], default="row",
                        help="of every row; `row` leaves each what its name says")  # fmt: skip
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()) / name,
                        help="model files (16 GB at full size), compile caches, logs")  # fmt: skip
    parser.add_argument("--packages", type=Path, help="folder of folders, one a set of libraries: "
                        + ", ".join(sorted({row.packages for row in rows.values()})))  # fmt: skip
    parser.add_argument("--results", type=Path, default=Path(f"{name}.jsonl"), help="appended to")
    parser.add_argument(
        "--timeout", type=float, default=150, help="seconds for each of load, first step, steps"
    )
    parser.add_argument(
        "--budget", type=float, help="seconds for the whole call; what does not fit is left out"
    )
    parser.add_argument("--commit", help="by default git is asked")
    parser.add_argument("--merge", type=Path, nargs="+", help="results to make the table from")
    parser.add_argument("--into", type=Path, default=REPOSITORY / "docs" / "performance.md")
    parser.add_argument("--record", type=Path, help="run the one row in this process, and write it here")
    return parser


def checked(parser: argparse.ArgumentParser, rows: Mapping[str, Row]) -> argparse.Namespace:
    """The arguments, with rows that there are."""
    args = parser.parse_args()
    args.rows = list(rows) if args.rows == "all" else args.rows.split(",")
    if unknown := [name for name in args.rows if name not in rows]:
        parser.error(f"no such row: {', '.join(unknown)}; there are {', '.join(rows)}")
    if args.warmup < 1 or args.steps < 2:
        parser.error("--warmup must be at least 1 and --steps at least 2")
    return args


def workload_of(args: argparse.Namespace) -> Workload:
    """What the rows train."""
    shape = SHAPES[args.shape]
    layers = args.layers or shape.layers
    return Workload(
        shape=args.shape, layers=layers, documents=args.documents or shape.documents,
        length=args.length or shape.length, warmup=args.warmup, steps=args.steps, seed=args.seed,
        folder=args.scratch / f"{args.shape}-{layers}-layers-seed-{args.seed}",
    )  # fmt: skip


def asked(row: Row, checkpointing: str) -> Row:
    """The row with the checkpointing of the call."""
    if checkpointing == "row":
        return row
    return dataclasses.replace(row, checkpointing=checkpointing == "on" and (row.checkpointing or True))


# ---- in the row's own process ------------------------------------------------------------------------------


def run_row(args: argparse.Namespace, row: Row, workload: Workload) -> int:
    """Run one row here; whatever it raises becomes the record's error."""
    faulthandler.dump_traceback_later(args.timeout, exit=True)  # until the meter takes over
    record = json.loads(args.record.read_text())
    try:
        peer = importlib.import_module(f"peers.{row.peer}")  # unsloth must come before transformers
        from peers.meter import Meter

        meter = Meter(workload, record=record, path=args.record, limit=args.timeout)
        peer.run(meter, base=row.base, checkpointing=row.checkpointing, liger=row.liger, **row.options)
    except Exception as error:
        traceback.print_exc()
        first_line = str(error).strip().splitlines()[:1]
        record["error"] = f"{type(error).__name__}: {' '.join(first_line)}"[:160]
        args.record.write_text(json.dumps(record))
        return 1
    return 0


# ---- in the parent -----------------------------------------------------------------------------------------


def main() -> int:
    """Run rows, or merge their results."""
    args = parse()
    return merged(args, SFT) if args.merge else measure(args, ROWS, workload_of(args), summary)


def merged(args: argparse.Namespace, table: Table) -> int:
    """Put the results of earlier calls into the document."""
    try:
        merge(table, args.merge, args.into)
    except ValueError as error:
        sys.exit(str(error))
    return 0


def measure(
    args: argparse.Namespace,
    rows: Mapping[str, Row],
    workload: Workload,
    summary: Callable[[dict[str, Any]], str],
) -> int:
    """Run the rows asked for, each in a process of its own, and say each in a line."""
    chosen = {name: asked(rows[name], args.checkpointing) for name in args.rows}
    if args.record:
        return run_row(args, chosen[args.rows[0]], workload)
    deadline = time.monotonic() + (args.budget or 1e9)
    write_model(workload)
    facts = machine()
    print(json.dumps(facts), flush=True)
    for name in args.rows:
        left = deadline - time.monotonic()
        if left < LEAST_SECONDS:
            print(f"{name}: not run, {left:.0f} s of the budget are left", flush=True)
            continue
        record = supervise(name, chosen[name], args, workload, facts, left)
        with args.results.open("a") as file:
            file.write(json.dumps(record) + "\n")
        print(summary(record), flush=True)
    return 0


def write_model(workload: Workload) -> None:
    """In a process of its own, so that its memory on the device is given back."""
    begun = time.monotonic()
    writer = multiprocessing.get_context("spawn").Process(target=workload.write_model)
    writer.start()
    writer.join()
    if writer.exitcode:
        sys.exit(f"the model could not be written to {workload.folder}")
    print(f"model in {workload.folder} ({time.monotonic() - begun:.0f} s)", flush=True)


def supervise(
    name: str, row: Row, args: argparse.Namespace, workload: Workload, facts: dict[str, str], left: float
) -> dict[str, Any]:
    """Run a row in a child, and return its record; the child's output goes to a log."""
    cache = args.scratch / "compile-cache" / name
    record: dict[str, Any] = {
        "row": name,
        "phase": "import",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": args.commit or commit(),
        "machine": facts,
        "compile_cache": "warm" if cache.exists() else "cold",
        "base": row.base,
        "checkpointing": row.checkpointing,
        "workload": {k: v for k, v in dataclasses.asdict(workload).items() if k != "folder"},
    }
    cache.mkdir(parents=True, exist_ok=True)
    path, log = args.scratch / f"{name}.json", args.scratch / f"{name}.log"
    path.write_text(json.dumps(record))
    script = str(Path(sys.argv[0]).resolve())
    command = [sys.executable, script, *sys.argv[1:], "--rows", name, "--record", str(path.resolve())]
    command += ["--scratch", str(args.scratch.resolve())]
    with log.open("w") as output:
        child = subprocess.Popen(
            command, cwd=cache, env=environment(row, cache.resolve(), args.packages), stdout=output,
            stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        stopped = wait(child, left)
    record = json.loads(path.read_text())
    if record["phase"] != "done" and "error" not in record:
        # Status 1 without an error of its own: the row's watchdog ended it.
        ended = f"ended with status {child.returncode} during: {record['phase']}"
        late = f"no end of: {record['phase']}, in {args.timeout:.0f} s"
        record["error"] = stopped or (late if child.returncode == 1 else ended)
    if record["phase"] != "done":
        print("\n".join(f"    {line}" for line in log.read_text().splitlines()[-25:]), flush=True)
    return record


def wait(child: subprocess.Popen[bytes], seconds: float) -> str | None:
    """Wait for a row, and end it with its own children when the call's budget is spent."""
    try:
        child.wait(seconds)
        return None
    except subprocess.TimeoutExpired:
        return f"cut off after {seconds:.0f} s, when the call's budget was spent"
    finally:
        with contextlib.suppress(ProcessLookupError):  # nothing may be left of it
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def environment(row: Row, cache: Path, packages: Path | None) -> dict[str, str]:
    """Of a row: its libraries, empty compile caches of its own, and nothing from the network."""
    paths = [str(packages.resolve() / row.packages)] if packages else []
    paths += [str(REPOSITORY), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "UNSLOTH_DISABLE_STATISTICS": "1",
    }


def machine() -> dict[str, str]:
    """What the numbers depend on: card, driver, clocks."""
    python = platform.python_version()
    if shutil.which("nvidia-smi") is None:
        card = f"CPU {platform.machine()}"
        return {"id": platform.node(), "card": card, "driver": "none", "clocks": "no GPU", "python": python}
    asked = "uuid,name,driver_version,clocks.max.sm,clocks.max.mem,power.limit"
    command = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"]
    line = subprocess.check_output(command, text=True).splitlines()[0]
    uuid, card, driver, sm, memory, power = line.split(", ")
    clocks = f"at most {sm} (SM) and {memory} (memory), {power}"
    return {"id": uuid, "card": card, "driver": driver, "clocks": clocks, "python": python}


def commit() -> str:
    """The checkout's commit, or `unknown` outside one."""
    asked = subprocess.run(
        ["git", "-C", str(REPOSITORY), "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    )
    return asked.stdout.strip() or "unknown"


def summary(record: dict[str, Any]) -> str:
    """A row in one line."""
    name = f"{record['row']:21}"
    first = ""
    if "first_step_s" in record:
        first = f"first step {record['first_step_s']:.1f} s {record['compile_cache']}"
    if record["phase"] != "done":
        return f"{name} {record['error']}  {first}"
    return (
        f"{name} {record['tokens_per_s']:9,.0f} tok/s  {record['median_step_ms']:8.1f} ms  "
        f"{record.get('allocated_gib', 0):6.1f}/{record.get('reserved_gib', 0):.1f} GiB  "
        f"loss {record['first_loss']:.4f} {record['last_loss']:.4f}  "
        f"norm {record['first_grad_norm']:.4f} {record['last_grad_norm']:.4f}  "
        f"load {record['load_s']:.0f} s  {first}"
    )


if __name__ == "__main__":
    sys.exit(main())
