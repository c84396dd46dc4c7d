"""Where a run computes and in which precision: what `auto` means on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from swiftkit.engine.fused.base import BaseKind
from swiftkit.errors import UserError

# Compute capabilities from which tensor cores multiply these.
BF16, FP8 = (8, 0), (8, 9)


@dataclass(frozen=True)
class Placement:
    """A device, and how the frozen weights are stored and multiplied there.

    Args:
        device: where everything is.
        base_precision: fp32, bf16, fp8 or nf4.
        base: the storage that it means.
        fused: whether decoder layers are exchanged for fused ones.
    """

    device: torch.device
    base_precision: str
    base: BaseKind
    fused: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """Of activations, embeddings, norms and head."""
        if self.base_precision in ("fp32", "bf16"):
            return torch.float32 if self.base_precision == "fp32" else torch.bfloat16
        # bf16 products are many times slower than fp32 on a CPU.
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    @property
    def device_name(self) -> str:
        """For people."""
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        threads = torch.get_num_threads()
        return f"CPU, {threads} thread{'s' if threads > 1 else ''}"


def place(device: str, base_precision: str, nf4_compute: str = "bf16", *, fuses: bool = False) -> Placement:
    """Choose what was left on `auto`.

    Args:
        device: auto, cpu or cuda; auto is the GPU where there is one.
        base_precision: auto, fp32, bf16, fp8 or nf4. Auto is fp8 where it was measured to be faster (fused
            layers on Hopper, see docs/performance.md), else bf16 on a GPU and fp32 on a CPU.
        nf4_compute: bf16 or fp8, the products of an nf4 base.
        fuses: whether fused layers serve the model and its adapter, as far as they go.

    Raises:
        UserError: when a GPU is asked for and none is there, or this one lacks bf16 or FP8 products.
    """
    kind = find_device(device)
    capability = torch.cuda.get_device_capability() if kind == "cuda" else (0, 0)
    if base_precision == "auto":
        hopper = fuses and capability == (9, 0)
        base_precision = "fp8" if hopper else "bf16" if capability >= BF16 else "fp32"
    computes_fp8 = base_precision == "fp8" or (base_precision == "nf4" and nf4_compute == "fp8")
    if kind == "cuda" and base_precision != "fp32" and capability < (FP8 if computes_fp8 else BF16):
        what, mend = ("FP8", "bf16 or nf4") if computes_fp8 else ("bf16", "fp32")
        raise UserError(
            f"--base_precision {base_precision}: this GPU ({torch.cuda.get_device_name()}) has no {what} "
            f"products; take {mend}"
        )
    # The kernels compute in bf16, and cast to FP8 as Hopper does.
    fused = fuses and base_precision != "fp32" and capability >= ((9, 0) if computes_fp8 else BF16)
    return Placement(torch.device(kind), base_precision, _storage(base_precision, nf4_compute), fused)


def find_device(wanted: str) -> Literal["cpu", "cuda"]:
    """`auto` is the GPU where there is one.

    Raises:
        UserError: when a GPU is asked for and none is there.
    """
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise UserError(
            "--device cuda: torch sees no GPU here; leave it on auto, or check driver and torch build"
        )
    return "cuda" if available and wanted != "cpu" else "cpu"


def _storage(base_precision: str, nf4_compute: str) -> BaseKind:
    if base_precision == "nf4":
        return "nf4-fp8" if nf4_compute == "fp8" else "nf4"
    return "fp8" if base_precision == "fp8" else "plain"
