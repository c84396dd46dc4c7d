"""What one device gives alone: matrix products and copies."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

ROWS, COLUMNS = 8192, 8192  # of products on a GPU: large enough to be held up by nothing else
ROWS_CPU = 1024
COPIED = {"cuda": 2**30, "cpu": 2**27}  # bytes; far beyond any cache
REPEATS = 10
FP8_CAPABILITY = (8, 9)
TERA, GIGA = 1e12, 1e9


@dataclass(frozen=True)
class Rate:
    """One rate of one device: FLOP/s of products, bytes/s of copies."""

    name: str
    value: float
    device: str

    def shown(self) -> str:
        """In its unit."""
        if "products" in self.name:
            return (
                f"{self.value / TERA:,.2f} TFLOP/s"
                if self.value < TERA
                else f"{self.value / TERA:,.0f} TFLOP/s"
            )
        return f"{self.value / GIGA:,.1f} GB/s"


def read_rates(device: str) -> Iterator[Rate]:
    """Measure the first device, each rate by the median of some calls over random numbers.

    Args:
        device: cpu or cuda.
    """
    name = torch.cuda.get_device_name(0) if device == "cuda" else "CPU"
    measured = _cuda() if device == "cuda" else _cpu()
    for what, value in measured:
        yield Rate(what, value, name)


def _cpu() -> Iterator[tuple[str, float]]:
    a, b = (torch.randn(ROWS_CPU, ROWS_CPU) for _ in range(2))
    yield "fp32 products", 2 * ROWS_CPU**3 / _median(lambda: a @ b, _now)
    source = torch.ones(COPIED["cpu"] // 4)
    target = torch.empty_like(source)
    yield "copies", 2 * COPIED["cpu"] / _median(lambda: target.copy_(source), _now)


def _cuda() -> Iterator[tuple[str, float]]:
    device = torch.device("cuda", 0)
    flops = 2 * ROWS * COLUMNS * COLUMNS
    a = torch.randn(ROWS, COLUMNS, device=device, dtype=torch.bfloat16)
    b = torch.randn(COLUMNS, COLUMNS, device=device, dtype=torch.bfloat16)
    yield "bf16 products", flops / _median(lambda: a @ b.t(), _now_cuda)
    if torch.cuda.get_device_capability(device) >= FP8_CAPABILITY:
        eight, other = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
        one = torch.ones((), device=device)

        def product() -> Tensor:
            return torch._scaled_mm(eight, other.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)

        yield "FP8 products", flops / _median(product, _now_cuda)
    source = torch.ones(COPIED["cuda"] // 4, device=device)
    target = torch.empty_like(source)
    yield "copies on the GPU", 2 * COPIED["cuda"] / _median(lambda: target.copy_(source), _now_cuda)
    host = torch.empty(COPIED["cuda"] // 4, pin_memory=True)
    yield (
        "copies to the GPU",
        COPIED["cuda"] / _median(lambda: target.copy_(host, non_blocking=True), _now_cuda),
    )
    yield (
        "copies from the GPU",
        COPIED["cuda"] / _median(lambda: host.copy_(target, non_blocking=True), _now_cuda),
    )


def _median(call: Callable[[], object], now: Callable[[], float]) -> float:
    """Seconds of a call; the first two are left out."""
    taken = []
    for _ in range(REPEATS + 2):
        begin = now()
        call()
        taken.append(now() - begin)
    return sorted(taken[2:])[REPEATS // 2]


def _now() -> float:
    return time.perf_counter()


def _now_cuda() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()
