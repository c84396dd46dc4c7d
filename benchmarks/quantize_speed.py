"""Time of a quantization, part by part, at a model's true shape with random weights.

    python benchmarks/quantize_speed.py --method gptq --shape llama3-8b --results results.jsonl

Counted is everything from the first calibration window to the last layer's packed tensors on the disk: what
`swiftkit quantize` does but for opening the model, tokenising, and joining the layers to shards.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peers.workload import SHAPES, SPECIAL_TOKENS, Workload
from sft_throughput import commit, machine

from swiftkit.data import Document, Origin, PackedBatch, collate
from swiftkit.engine.build import describe
from swiftkit.formats.shards import Stored, StoredWeights
from swiftkit.quantize import awq, block, gptq, run
from swiftkit.quantize.gram import Gram
from swiftkit.quantize.layout import choose
from swiftkit.quantize.report import Report
from swiftkit.quantize.stream import StreamedModel
from swiftkit.quantize.texts import Texts

GIB = 2**30
PARTS: list[tuple[Any, str, str]] = [
    (StreamedModel, "load", "reading"),
    (StreamedModel, "begin", "forward"),
    (StreamedModel, "run", "forward"),
    (Gram, "settle", "hessians"),
    (gptq, "solve", "solving"),
    (awq, "fold_scales", "solving"),
    (awq, "clipped_grid", "solving"),
    (block, "_error", "errors"),
    (block, "_store", "packing"),
    (run, "_save", "writing"),
    (run, "judge", "judging"),
    (run, "drift", "judging"),
]


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--method", choices=["gptq", "awq"], required=True)
    parser.add_argument("--shape", choices=SHAPES, default="llama3-8b")
    parser.add_argument("--layers", type=int, help="fewer than the shape has; the whole is predicted")
    parser.add_argument("--windows", type=int, default=256, help="of calibration")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a window")
    parser.add_argument("--judged", type=int, default=8, help="windows that perplexity is measured on")
    parser.add_argument("--group_size", type=int, default=128)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()) / "quantize_speed")
    parser.add_argument("--results", type=Path, default=Path("quantize_speed.jsonl"), help="appended to")
    parser.add_argument("--commit", help="by default git is asked")
    return parser.parse_args()


class Clock:
    """Seconds by part; parts inside of others are counted once, in the inner one."""

    def __init__(self, device: torch.device):
        self.seconds: dict[str, float] = {}
        self._device, self._inner = device, [0.0]

    def now(self) -> float:
        """With the device idle."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count what happens inside."""
        begun = self.now()
        self._inner.append(0.0)
        try:
            yield
        finally:
            spent = self.now() - begun
            self.seconds[name] = self.seconds.get(name, 0.0) + spent - self._inner.pop()
            self._inner[-1] += spent

    def around(self, owner: Any, attribute: str, name: str) -> None:
        """Count the calls of a function as a part, from now on."""
        whole: Callable[..., Any] = getattr(owner, attribute)

        def counted(*args: Any, **options: Any) -> Any:
            with self.part(name):
                return whole(*args, **options)

        setattr(owner, attribute, counted)


def windows(count: int, length: int, *, vocabulary: int, seed: int) -> list[PackedBatch]:
    """Random tokens; in each window every token but the first is predicted."""
    draw = np.random.default_rng(seed)
    ids = draw.integers(SPECIAL_TOKENS, vocabulary, (count, length)).astype(np.int32)
    trained = np.arange(length) > 0
    return [collate([[Document(row, trained, Origin("random", 1))]], pad_id=0) for row in ids]


@dataclasses.dataclass
class Source:
    """A model folder's tensors, whole."""

    weights: StoredWeights

    @property
    def tensors(self) -> list[Stored]:
        """All of them."""
        return list(self.weights.tensors.values())

    def pieces(self, tensor: Stored) -> Iterator[torch.Tensor]:
        """A tensor's rows."""
        for rows in tensor.ranges():
            yield self.weights.rows(tensor.name, *rows)


def measure(args: argparse.Namespace, model: Path) -> dict[str, Any]:
    """Quantize, and say what took how long."""
    device, shape = torch.device(args.device), SHAPES[args.shape]
    texts = Texts(
        *(
            windows(count, args.length, vocabulary=shape.vocabulary, seed=args.seed + number)
            for number, count in enumerate((args.windows, args.judged))
        ),
        held_out=True,
    )
    layout = choose(
        method=args.method, form="auto", bits=4, group_size=args.group_size, symmetric="auto", damping=0.05,
        act_order=True, dtype=torch.bfloat16,
    )  # fmt: skip
    clock = Clock(device)
    for owner, attribute, name in PARTS:
        clock.around(owner, attribute, name)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    stream = StreamedModel(
        Source(StoredWeights(model)), description=describe(model), device=device,
        dtype=torch.bfloat16 if device.type == "cuda" else torch.float32,
    )  # fmt: skip
    report = Report({})
    with tempfile.TemporaryDirectory(dir=args.scratch) as folder, clock.part("the rest"):
        run.quantize_layers(stream, texts, layout, folder=Path(folder), report=report, say=print)
    layers, ends = len(stream.layers), clock.seconds.get("judging", 0.0)
    total = sum(clock.seconds.values())
    found = {
        "seconds": {name: round(value, 2) for name, value in clock.seconds.items()},
        "total_s": round(total, 1),
        "predicted_s": round((total - ends) / layers * shape.layers + ends, 1),
        "layers": layers,
    }
    if device.type == "cuda":
        found["allocated_gib"] = torch.cuda.max_memory_allocated(device) / GIB
        found["reserved_gib"] = torch.cuda.max_memory_reserved(device) / GIB
    return found


def main() -> None:
    """Write the model, quantize it, and say how long that took."""
    args = parse()
    layers = args.layers or SHAPES[args.shape].layers
    args.scratch.mkdir(parents=True, exist_ok=True)
    workload = Workload(
        shape=args.shape, layers=layers, documents=1, length=args.length, warmup=0, steps=0, seed=args.seed,
        folder=args.scratch / f"{args.shape}-{layers}-layers-seed-{args.seed}",
    )  # fmt: skip
    workload.write_model()
    if args.device == "cuda":
        torch.cuda.empty_cache()
    record = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": args.commit or commit(),
        "machine": machine(),
        "torch": torch.__version__,
        **{name: getattr(args, name) for name in ("method", "shape", "windows", "length", "group_size")},
        **measure(args, workload.folder),
    }
    with args.results.open("a") as file:
        file.write(json.dumps(record) + "\n")
    parts = ", ".join(f"{name} {value}" for name, value in record["seconds"].items())
    print(f"{args.method} {args.shape}, {record['layers']} layers: {record['total_s']} s ({parts})")
    print(
        f"all {SHAPES[args.shape].layers} layers: {record['predicted_s']} s; "
        f"{record.get('allocated_gib', 0):.1f} GiB allocated, {record.get('reserved_gib', 0):.1f} reserved"
    )


if __name__ == "__main__":
    main()
