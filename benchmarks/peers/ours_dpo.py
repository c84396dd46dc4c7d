"""swiftkit's DPO: the reference's log-probabilities of all pairs first, then its training step."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from peers.meter import Meter
from peers.ours import BASES
from peers.pairs import Ids, PairWorkload
from swiftkit.data import AnswerRow, Document, Origin, collate_answers
from swiftkit.engine import Batch, Engine
from swiftkit.formats.peft import LoraSpec
from swiftkit.methods.preference import PairLoss, answer_logprobs
from swiftkit.train.loop import step


def run(meter: Meter, *, base: str, checkpointing: bool | str, liger: bool) -> None:
    """Train; `base` is bf16, fp8 or nf4."""
    if checkpointing or liger:
        raise ValueError("this peer has no checkpointing and no Liger")
    workload: Any = meter.workload
    assert isinstance(workload, PairWorkload)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    fused = device.type == "cuda"
    engine = Engine.load(
        workload.folder,
        dtype=torch.bfloat16,
        device=device,
        lora=LoraSpec(rank=workload.rank, alpha=workload.alpha),
        seed=workload.seed,
        base=BASES[base],  # type: ignore[arg-type]
        fused=True if fused else None,  # an error, if the fused layers cannot serve
        tokens=workload.step_tokens,
    )
    optimizer = torch.optim.AdamW(
        engine.parameters.values(), lr=workload.learning_rate, weight_decay=0.0, fused=fused
    )
    steps = [_rows(*arrays) for arrays in workload.pairs()]
    _with_reference(engine, steps[0])  # compiles
    began = time.perf_counter()
    steps = [_with_reference(engine, rows) for rows in steps]
    meter.record["reference_s"] = time.perf_counter() - began  # its values are on the host
    meter.loaded()
    for rows in steps:
        batch = Batch.of(collate_answers(rows, pad_id=0), device=device)
        sums, norm = step(
            engine,
            [batch],
            PairLoss("sigmoid", workload.beta),
            optimizer,
            denominator=len(rows),
            rate=workload.learning_rate,
            max_norm=workload.max_grad_norm,
        )
        meter.values(sums["loss"] / len(rows), norm)
        meter.step()
    meter.finish()


def _rows(prompts: Ids, chosen: Ids, rejected: Ids) -> list[AnswerRow]:
    found = []
    for prompt, *answers in zip(prompts, chosen, rejected, strict=True):
        documents = []
        for answer in answers:
            ids = np.concatenate([prompt, answer]).astype(np.int32)
            documents.append(Document(ids, np.arange(len(ids)) >= len(prompt), Origin("random", 1)))
        found.append(AnswerRow(tuple(documents), np.zeros(2), shared=len(prompt)))
    return found


@torch.no_grad()
def _with_reference(engine: Engine, rows: list[AnswerRow]) -> list[AnswerRow]:
    batch = Batch.of(collate_answers(rows, pad_id=0), device=engine.device)
    known = answer_logprobs(engine.head, engine.hidden(batch), batch).double().view(-1, 2).cpu().numpy()
    return [AnswerRow(row.documents, own, shared=row.shared) for row, own in zip(rows, known, strict=True)]
