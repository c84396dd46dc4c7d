"""A packed batch on the device, with everything a step needs computed on the host beforehand."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from swiftkit.data import AnswerBatch, HostBatch
from swiftkit.engine.attention import AttentionPlan


@dataclass(frozen=True, eq=False)
class Answers:
    """Which targets are one answer, and what is known of it; each row has the same number of answers.

    Args:
        owner: int64 [targets], the answer that each belongs to.
        sizes: int64 [answers], targets of each.
        ends: int64 [answers], where the last token of each lies in the batch.
        reference: float32 [answers], log-probabilities by the reference policy.
        margins: float32 [rows].
        good: bool [rows].
    """

    owner: Tensor
    sizes: Tensor
    ends: Tensor
    reference: Tensor
    margins: Tensor
    good: Tensor

    def sums(self, values: Tensor) -> Tensor:
        """[targets] to [answers]."""
        return values.new_zeros(len(self.sizes)).index_add(0, self.owner, values)


@dataclass(frozen=True, eq=False)
class Batch:
    """Documents one after another in one row.

    Args:
        input_ids, position_ids: int64 [tokens]; positions restart with each document.
        positions: int64 [targets], where the model's output is trained.
        targets: int64 [targets], the token that should follow there.
        plan: who may look at whom.
        answers: where the batch is of preferences.
    """

    input_ids: Tensor
    position_ids: Tensor
    positions: Tensor
    targets: Tensor
    plan: AttentionPlan
    answers: Answers | None = None

    @classmethod
    def of(cls, packed: HostBatch, *, device: torch.device) -> Batch:
        """Copy a packed batch to the device; the host knows all sizes, so the device is never asked."""
        send = partial(_send, device=device)
        answers: Answers | None = None
        prefixes: tuple[int, ...] = ()
        if isinstance(packed, AnswerBatch):
            prefixes = packed.prefixes
            answers = Answers(
                owner=send(packed.answer),
                sizes=send(packed.sizes),
                ends=send(packed.ends),
                reference=send(packed.reference),
                margins=send(packed.margins),
                good=send(packed.good),
            )
        return cls(
            input_ids=send(packed.input_ids),
            position_ids=send(packed.position_ids),
            positions=send(packed.positions),
            targets=send(packed.targets),
            plan=AttentionPlan.of(packed.lengths, device=device, prefixes=prefixes),
            answers=answers,
        )


def _send(array: np.ndarray, *, device: torch.device) -> Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
