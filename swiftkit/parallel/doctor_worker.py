"""One of the processes between which `swiftkit doctor --bench` measures collectives.

Run by `doctor_bench.py` as `python -m swiftkit.parallel.doctor_worker`, with RANK and WORLD_SIZE set.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

SMALLEST = 4096  # bytes
STEP = 4  # each size is so many times the one before
MOVED = 256 * 2**20  # bytes that a size is repeated for, at most
REPEATS = (3, 20)
TIMEOUT = timedelta(seconds=60)


def sizes(largest: int) -> list[int]:
    """Bytes of the messages, from small to large; the largest is among them."""
    found = []
    size = SMALLEST
    while size < largest:
        found.append(size)
        size *= STEP
    return [*found, largest]


def collectives(message: Tensor, rank: int, world: int) -> dict[str, Callable[[], object]]:
    """What is timed, each over a message of the same size (that of the result, for a gather)."""
    part = message.new_zeros(message.numel() // world)
    whole = message.new_zeros(part.numel() * world)
    other = rank ^ 1

    def pairs() -> None:
        """Rank 0 sends to 1, 2 to 3; of an odd number the last one waits."""
        if rank % 2 == 0 and other < world:
            dist.send(message, other)
        elif rank % 2 == 1:
            dist.recv(message, other)

    return {
        "all_reduce": lambda: dist.all_reduce(message),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "point_to_point": pairs,
    }


def timed(operation: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Seconds of one call, of the slowest rank; all begin together."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    for _ in range(2):
        operation()
    wait()
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(repeats):
        operation()
    wait()
    seconds = torch.tensor([(time.perf_counter() - begin) / repeats], dtype=torch.float64, device=device)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds.item())


def main() -> None:
    """Measure every collective at every size; rank 0 writes the seconds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--largest", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device(options.device, rank) if options.device == "cuda" else torch.device("cpu")
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{(options.folder / 'store').absolute()}",
        rank=rank,
        world_size=world,
        timeout=TIMEOUT,
    )
    found: dict[str, list[tuple[int, float]]] = {}
    for size in sizes(options.largest):
        message = torch.zeros(size // 4, device=device)
        repeats = max(REPEATS[0], min(REPEATS[1], MOVED // size))
        for name, operation in collectives(message, rank, world).items():
            found.setdefault(name, []).append((size, timed(operation, repeats, device)))
    if rank == 0:
        (options.folder / "seconds.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
