"""The plain training loop of the peers that bring a model but no trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from peers.meter import Meter


def train(
    forward: Callable[[Tensor], Tensor], parameters: Iterable[Tensor], *, meter: Meter, device: str
) -> None:
    """Train for the workload's steps with AdamW.

    Args:
        forward: from token ids [documents, length] to their mean loss.
        parameters: the trained tensors.
        meter: takes the times and losses.
        device: cuda or cpu.
    """
    workload = meter.workload
    parameters = list(parameters)
    optimizer = torch.optim.AdamW(
        parameters, lr=workload.learning_rate, weight_decay=0.0, fused=device == "cuda"
    )
    for windows in workload.tokens():
        ids = torch.from_numpy(windows).to(device, non_blocking=True)
        with torch.autocast(device, torch.bfloat16):  # adapters are float32, as under Trainer
            loss = forward(ids)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, workload.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        meter.values(loss.detach(), norm)
        meter.step()
    meter.finish()
