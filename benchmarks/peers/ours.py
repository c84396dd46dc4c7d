"""swiftkit's engine and its training step."""

from __future__ import annotations

import numpy as np
import torch

from peers.meter import Meter
from swiftkit.data import Document, Origin, collate
from swiftkit.engine import Batch, Engine
from swiftkit.formats.peft import LoraSpec
from swiftkit.methods.sft import loss
from swiftkit.train.loop import step

BASES = {"bf16": "plain", "fp8": "fp8", "nf4": "nf4", "nf4-fp8": "nf4-fp8"}


def run(meter: Meter, *, base: str, checkpointing: bool | str, liger: bool) -> None:
    """Train; `base` is bf16, fp8, nf4 (bf16 products) or nf4-fp8 (FP8 products)."""
    if checkpointing or liger:
        raise ValueError("this peer has no checkpointing and no Liger")
    workload = meter.workload
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    engine = Engine.load(
        workload.folder,
        dtype=torch.bfloat16,
        device=device,
        lora=LoraSpec(rank=workload.rank, alpha=workload.alpha),
        seed=workload.seed,
        base=BASES[base],  # type: ignore[arg-type]
        fused=True if device.type == "cuda" else None,  # an error, if the fused layers cannot serve
        tokens=workload.step_tokens,
    )
    optimizer = torch.optim.AdamW(
        engine.parameters.values(), lr=workload.learning_rate, weight_decay=0.0, fused=device.type == "cuda"
    )
    meter.loaded()
    for windows in workload.tokens():
        packed = collate([[_document(window)] for window in windows], pad_id=0)
        sums, norm = step(
            engine,
            [Batch.of(packed, device=device)],
            loss,
            optimizer,
            denominator=packed.trained_tokens,
            rate=workload.learning_rate,
            max_norm=workload.max_grad_norm,
        )
        meter.values(sums["loss"] / packed.trained_tokens, norm)
        meter.step()
    meter.finish()


def _document(window: np.ndarray) -> Document:
    return Document(window.astype(np.int32), np.ones(len(window), bool), Origin("random", 1))
