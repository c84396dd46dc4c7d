"""Where a run computes and in which precision: what `auto` means on this machine."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from swiftkit.errors import UserError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Placement:
    """A device, and the precision of the frozen weights there."""

    device: torch.device
    base_precision: str

    @property
    def dtype(self) -> torch.dtype:
        """Of frozen weights and activations."""
        return DTYPES[self.base_precision]

    @property
    def device_name(self) -> str:
        """For people."""
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        return f"CPU, {torch.get_num_threads()} threads"


def place(device: str, base_precision: str) -> Placement:
    """`auto` is the GPU where there is one, with bf16; on a CPU fp32, as bf16 is many times slower there.

    Raises:
        UserError: when a GPU is asked for and none is there.
    """
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise UserError(
            "--device cuda: torch sees no GPU here; leave it on auto, or check driver and torch build"
        )
    kind = "cuda" if available and device != "cpu" else "cpu"
    if base_precision == "auto":
        base_precision = "bf16" if kind == "cuda" else "fp32"
    return Placement(torch.device(kind), base_precision)
