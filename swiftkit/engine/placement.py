"""Where a run computes and in which precision: what `auto` means on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from swiftkit.engine.fused.base import BaseKind
from swiftkit.errors import UserError
from swiftkit.formats.packing import Packing, packing_of
from swiftkit.support import PACKED

# Compute capabilities from which tensor cores multiply these.
BF16, FP8 = (8, 0), (8, 9)


@dataclass(frozen=True)
class Placement:
    """A device, and how the frozen weights are stored and multiplied there.

    Args:
        device: where everything is.
        base_precision: fp32, bf16, fp8, nf4, or int8 to int3.
        base: the storage that it means.
        fused: whether decoder layers are exchanged for fused ones.
        packing: of the model's folder, where that is quantized.
    """

    device: torch.device
    base_precision: str
    base: BaseKind
    fused: bool = False
    packing: Packing | None = None

    @property
    def precision(self) -> str:
        """For people: `bf16`, or what a quantized folder holds."""
        if self.packing is None:
            return self.base_precision
        return (
            str(self.packing)
            if self.base == "int"
            else f"{self.base_precision}, unpacked from {self.packing}"
        )

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


def settle_precision(asked: str, packing: Packing | None) -> str:
    """What a quantized folder makes of `--base_precision`: auto is what it holds, bf16 and fp32 unpack it.

    Raises:
        UserError: another storage, or whole numbers of a folder that has none.
    """
    if packing is None and asked in PACKED:
        raise UserError(
            f"--base_precision {asked} is for a folder that holds it (GPTQ, AWQ), and this model is not "
            "quantized; take nf4 or fp8, or make such a folder with swiftkit quantize"
        )
    if packing is None or asked in ("fp32", "bf16"):
        return asked
    if asked not in ("auto", packing.precision):
        raise UserError(
            f"--base_precision {asked}: the model is quantized already ({packing}); leave it on auto, or "
            "take bf16 (on a CPU fp32), which unpacks the weights"
        )
    return packing.precision


def place(
    device: str, base_precision: str, nf4_compute: str = "bf16", *, fuses: bool = False,
    description: Any = None,
) -> Placement:  # fmt: skip
    """Choose what was left on `auto`.

    Args:
        device: auto, cpu or cuda; auto is the GPU where there is one.
        base_precision: auto, fp32, bf16, fp8, nf4, or int8 to int3. Auto is what a quantized folder holds;
            else fp8 where it was measured to be faster (fused layers on Hopper, see docs/performance.md),
            bf16 on other GPUs and fp32 on a CPU.
        nf4_compute: bf16 or fp8, the products of an nf4 base.
        fuses: whether fused layers serve the model and its adapter, as far as they go.
        description: the model's transformers config.

    Raises:
        UserError: when a GPU is asked for and none is there, or this one lacks bf16 or FP8 products; as
            `settle_precision` does.
    """
    kind = find_device(device)
    packing = packing_of(description)
    base_precision = settle_precision(base_precision, packing)
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
    fuses = fuses and base_precision not in ("fp32", *PACKED)
    fused = fuses and capability >= ((9, 0) if computes_fp8 else BF16)
    storage = _storage(base_precision, nf4_compute)
    return Placement(torch.device(kind), base_precision, storage, fused, packing)


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
    if base_precision in PACKED:
        return "int"
    return "fp8" if base_precision == "fp8" else "plain"
