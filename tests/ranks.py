"""Real processes: one function on every rank, its results back in the test."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def on_ranks(
    function: Callable[..., Any], size: int, folder: Path, *arguments: Any, backend: str = "gloo"
) -> list[Any]:
    """What `function(*arguments)` returned on each of `size` processes, in their order.

    Args:
        function: of a module, so that other processes find it.
        size: of the default process group.
        folder: empty; it holds the meeting place and the results.
        arguments: of the function.
        backend: of the group.
    """
    folder.mkdir(parents=True, exist_ok=True)
    mp.spawn(_work, (function, size, folder, arguments, backend), nprocs=size)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(size)]


def _work(
    rank: int, function: Callable[..., Any], size: int, folder: Path, arguments: tuple[Any, ...], backend: str
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(backend, init_method=f"file://{folder / 'meet'}", rank=rank, world_size=size)
    try:
        torch.save(function(*arguments), folder / f"{rank}.pt")
    finally:
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # gloo's threads may outlive the group, and then abort what takes its time to leave
