"""A packed batch on the device, with everything a step needs computed on the host beforehand."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from swiftkit.data import PackedBatch
from swiftkit.data.batch import IGNORED
from swiftkit.engine.attention import AttentionPlan


@dataclass(frozen=True, eq=False)
class Batch:
    """Documents one after another in one row.

    Args:
        input_ids, position_ids: int64 [tokens]; positions restart with each document.
        positions: int64 [targets], where the model's output is trained.
        targets: int64 [targets], the token that should follow there.
        plan: who may look at whom.
    """

    input_ids: Tensor
    position_ids: Tensor
    positions: Tensor
    targets: Tensor
    plan: AttentionPlan

    @classmethod
    def of(cls, packed: PackedBatch, *, device: torch.device) -> Batch:
        """Copy a packed batch to the device; the host knows all sizes, so the device is never asked."""
        positions = np.flatnonzero(packed.labels != IGNORED)

        def send(array: np.ndarray) -> Tensor:
            tensor = torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64))
            return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor

        return cls(
            input_ids=send(packed.input_ids),
            position_ids=send(packed.position_ids),
            positions=send(positions),
            targets=send(packed.labels[positions]),
            plan=AttentionPlan.of(np.diff(packed.cu_seqlens).tolist(), device=device),
        )
