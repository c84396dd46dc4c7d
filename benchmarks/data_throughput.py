"""From files to packed windows: how fast, beside the tokenizer alone, and in how much memory.

    python benchmarks/data_throughput.py --into docs/performance.md
    python benchmarks/data_throughput.py --rows 1000000 --into docs/performance.md

Everything is measured with one thread a process (TOKENIZERS_PARALLELISM=false), the tokenizer alone too.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"

REPOSITORY = Path(__file__).resolve().parents[1]
SHARED = REPOSITORY.parent / "shared" / "data"
SETTINGS = {"max_length": 2048, "packing": True, "truncation_strategy": "drop", "system": None}
BATCH_ROWS = 512
SEED_TASK_EVERY = 50  # rows
LETTERS_A_TOKEN = 3  # the stand-in for a tokenizer, where there is none
SAMPLE_S = 0.1  # seconds between two looks at the memory


def main() -> None:
    """Measures rates, or with --rows memory, and prints what goes into the document."""
    args = parse()
    from swiftkit.data.tokenizer import load_tokenizer
    from swiftkit.formats.named import open_model

    tokenizer = load_tokenizer(open_model(args.model, source="auto").path)
    folder = Path(tempfile.mkdtemp(prefix="data-throughput-", dir=args.scratch))
    try:
        if args.rows:
            name, lines = "memory", memory(folder, args.rows, tokenizer, args.shared)
        else:
            name, lines = "rates", rates(folder, args.rate_rows, args.repeats, tokenizer, args.shared)
    finally:
        shutil.rmtree(folder)
    text = "\n".join([*lines, "", f"- {conditions(args.model)}"])
    print(text)
    if args.into:
        put(args.into, f"data_throughput {name}", text)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="whose tokenizer and template")
    parser.add_argument(
        "--shared", type=Path, default=REPOSITORY.parent / "shared" / "data", help="real rows"
    )
    parser.add_argument("--rate_rows", type=int, default=15_000, help="rows of the rates")
    parser.add_argument("--repeats", type=int, default=3, help="of each rate, in turns; the median counts")
    parser.add_argument("--rows", type=int, help="measure memory, over a file of so many rows")
    parser.add_argument("--scratch", type=Path, help="where the file and its windows lie meanwhile")
    parser.add_argument("--into", type=Path, help="document with a place for the result")
    return parser.parse_args()


def real_rows(shared: Path) -> Iterator[dict[str, Any]]:
    """GSM8K again and again, each time made distinct, and among it the Alpaca seed tasks."""

    def lines(name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (shared / name).read_text(encoding="utf-8").splitlines()]

    sums, tasks = lines("gsm8k/train.jsonl"), lines("alpaca/seed_tasks.jsonl")
    number = 0
    while True:
        number += 1
        if number % SEED_TASK_EVERY == 0:
            task = tasks[number // SEED_TASK_EVERY % len(tasks)]
            instance = task["instances"][0]
            yield {
                "instruction": f"Task {number}: {task['instruction']}",
                "input": instance["input"],
                "output": instance["output"] or "Nothing.",
            }
        else:
            row = sums[number % len(sums)]
            yield {"question": f"Problem {number}: {row['question']}", "answer": row["answer"]}


def write_rows(path: Path, count: int, shared: Path) -> int:
    """Writes so many rows as JSON lines; returns bytes."""
    with path.open("w", encoding="utf-8") as file:
        for _, row in zip(range(count), real_rows(shared), strict=False):
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    return path.stat().st_size


def rates(folder: Path, rows: int, repeats: int, tokenizer: Any, shared: Path) -> list[str]:
    """The table of rates, each step measured in turns so that all share the machine's weather."""
    from swiftkit.data import Renderer, pack, prepare, read, to_example

    path = folder / "rows.jsonl"
    size = write_rows(path, rows, shared)
    renderer = Renderer(tokenizer)
    texts = [renderer.layout(to_example(row)).text for row in read(str(path))]
    backend = tokenizer.backend_tokenizer

    def ceiling() -> None:
        for start in range(0, rows, BATCH_ROWS):
            backend.encode_batch(texts[start : start + BATCH_ROWS], add_special_tokens=False)

    def whole(*, times: int = 1, processes: int = 1) -> None:
        prepare([str(path)] * times, tokenizer=tokenizer, num_proc=processes, **SETTINGS)

    def without_tokenizer() -> None:
        lengths = [
            min(sum(len(m["content"]) for m in to_example(row).messages) // LETTERS_A_TOKEN + 1, 2048)
            for row in read(str(path))
        ]
        pack(lengths, 2048)

    def rendered_too() -> None:
        lengths = [
            min(len(renderer.layout(to_example(row)).text) // LETTERS_A_TOKEN + 1, 2048)
            for row in read(str(path))
        ]
        pack(lengths, 2048)

    steps: dict[str, Callable[[], None]] = {
        "ceiling": ceiling,
        "whole": whole,
        "two": lambda: whole(processes=2),
        "two twice": lambda: whole(times=2, processes=2),
        "read": without_tokenizer,
        "render": rendered_too,
    }
    prepare([f"{path}#1"], tokenizer=tokenizer, **SETTINGS)  # what happens once: imports, the template
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for _ in range(repeats):
        for name, step in steps.items():
            seen[name].append(timed(step))
    tokens = sum(len(found.ids) for found in backend.encode_batch(texts, add_special_tokens=False))
    return rate_table(seen, size=size, rows=rows, tokens=tokens)


def timed(step: Callable[[], None]) -> tuple[float, float]:
    """Seconds on the clock, and seconds of processor time of this process and those that it started."""
    clock, processor = time.perf_counter(), processor_time()
    step()
    return time.perf_counter() - clock, processor_time() - processor


def processor_time() -> float:
    """Seconds so far, of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def rate_table(seen: dict[str, list[tuple[float, float]]], *, size: int, rows: int, tokens: int) -> list[str]:
    """The rates as lines of Markdown."""
    clock = {name: statistics.median(wall for wall, _ in values) for name, values in seen.items()}
    busy = {name: statistics.median(cpu for _, cpu in values) for name, values in seen.items()}
    # What two processes need before their first row is in both, and falls out.
    start = clock["two"]
    for kind in (clock, busy):
        kind["two"] = kind["two twice"] - kind["two"]
    start -= clock["two"]
    labels = {
        "ceiling": "the tokenizer alone, one thread (the ceiling)",
        "whole": "the whole path, one process",
        "two": "the whole path, two processes that tokenise",
        "read": "reading and packing, without template and tokenizer",
        "render": "reading, rendering and packing, without the tokenizer",
    }
    lines = [
        f"{rows:,} rows, {size / 1e6:.1f} MB, {tokens:,} tokens (GSM8K made distinct; one row in "
        f"{SEED_TASK_EVERY} is an Alpaca seed task). Median of {len(seen['whole'])} rounds.",
        "",
        "| step | seconds | MB/s | of the ceiling | processor seconds | MB for each | of the ceiling |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, label in labels.items():
        lines.append(
            f"| {label} | {clock[name]:.2f} | {size / clock[name] / 1e6:.1f} | "
            f"{clock['ceiling'] / clock[name]:.2f} | {busy[name]:.2f} | {size / busy[name] / 1e6:.1f} | "
            f"{busy['ceiling'] / busy[name]:.2f} |"
        )
    return [
        *lines,
        "",
        f"Two processes against one: {clock['whole'] / clock['two']:.2f} times as fast by the clock, once "
        f"started ({start:.1f} s, not in the table). By their processor time it could be at most "
        f"{2 * busy['whole'] / busy['two']:.2f} times, on two cores that nobody else uses.",
    ]


def memory(folder: Path, rows: int, tokenizer: Any, shared: Path) -> list[str]:
    """Reads, tokenises and packs a large file once, then starts again from the cache."""
    from swiftkit.data import prepare

    path, cache = folder / "rows.jsonl", folder / "cache"
    size = write_rows(path, rows, shared)
    source = [str(path)]
    prepare([f"{path}#1"], tokenizer=tokenizer, **SETTINGS)
    before, lines, found = tree_memory(os.getpid()), [], []
    for start in ("first", "second"):
        with Watched() as peak:
            clock = time.perf_counter()
            data = prepare(source, tokenizer=tokenizer, num_proc="auto", cache=cache, **SETTINGS)
            seconds = time.perf_counter() - clock
        found.append((data.fingerprint, data.report.to_dict()))
        lines.append(
            f"| {start} | {seconds:,.1f} | {size / seconds / 1e6:,.1f} | {peak['all'] / 2**20:,.0f} | "
            f"{peak['own'] / 2**20:,.0f} | {data.report.cache.replace(str(cache), 'the cache')} |"
        )
    assert found[0] == found[1], "the second start has other windows or another report than the first"
    report = data.report
    return [
        f"{rows:,} rows, {size / 1e6:,.0f} MB; {report.tokens:,} tokens in {report.windows:,} windows of "
        f"{data.max_length:,}, {report.packing_efficiency:.1%} full. Memory is of all processes "
        f"together, sampled every {SAMPLE_S} s; before the start it was {before['all'] / 2**20:,.0f} MiB "
        f"({before['own'] / 2**20:,.0f} MiB of it own), which is Python with its libraries.",
        "",
        "| start | seconds | MB/s | peak MiB | of it own, without mapped files | cache |",
        "|---|---|---|---|---|---|",
        *lines,
        "",
        "Fingerprint and report of both starts are equal.",
    ]


class Watched:
    """Looks at the memory of this process and those that it has started, and keeps the largest sums."""

    def __enter__(self) -> dict[str, int]:
        self.peak = {"all": 0, "own": 0}
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self.peak

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _look(self) -> None:
        while True:
            for kind, amount in tree_memory(os.getpid()).items():
                self.peak[kind] = max(self.peak[kind], amount)
            if self._end.wait(SAMPLE_S):
                return


def tree_memory(process: int) -> dict[str, int]:
    """Resident bytes of a process and its children: `all`, and `own`, which no file stands behind (Linux)."""
    found = {"all": 0, "own": 0}
    children = Path(f"/proc/{process}/task").glob("*/children")
    for number in [process, *(int(word) for child in children for word in child.read_text().split())]:
        try:
            status = Path(f"/proc/{number}/status").read_text()
        except FileNotFoundError:
            continue  # it has ended meanwhile
        for kind, key in (("all", "VmRSS"), ("own", "RssAnon")):
            if amount := re.search(rf"{key}:\s+(\d+) kB", status):
                found[kind] += int(amount[1]) * 1024
    return found


def conditions(model: str) -> str:
    """Where and with what it was measured."""
    names = ("tokenizers", "transformers", "jinja2", "numpy")
    processor = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())
    commit = subprocess.run(
        ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty"], capture_output=True, text=True
    ).stdout.strip()
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    return (
        f"{processor[1] if processor else platform.machine()}, {len(os.sched_getaffinity(0))} cores, load "
        f"{os.getloadavg()[0]:.1f} at the end; tokenizer and template of {model}; one tokenizer thread a "
        f"process; Python {platform.python_version()}, {versions}; {time.strftime('%Y-%m-%d')}, commit "
        f"{commit or 'unknown'}."
    )


def put(document: Path, name: str, text: str) -> None:
    """Replaces what stands between a document's two marks."""
    begin, end = (f"<!-- {name}: {word} -->" for word in ("begin", "end"))
    old = document.read_text(encoding="utf-8")
    if begin not in old or end not in old:
        sys.exit(f"{document} has no place for it: write {begin} and {end} there")
    before, rest = old.split(begin, 1)
    after = rest.split(end, 1)[1]
    document.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
