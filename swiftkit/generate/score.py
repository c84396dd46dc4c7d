"""How likely a model finds a text that is given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from swiftkit.data import Document, Origin, collate, pack
from swiftkit.engine import Batch, Engine
from swiftkit.generate.decode import TOKENS_AT_ONCE

ROW_MULTIPLE = 128  # of tokens, for the kernels of fused layers


@dataclass(frozen=True, slots=True)
class Score:
    """Of the last tokens of a text.

    Attributes:
        logprob: sum of log p(token), in nats.
        greedy: whether each of them is the likeliest token at its place.
    """

    logprob: float
    greedy: bool


@torch.no_grad()
def score(engine: Engine, texts: Sequence[tuple[Sequence[int], int]]) -> list[Score]:
    """Scores in the order of the texts.

    Args:
        engine: the model; it answers in the mode without dropout.
        texts: token ids, and how many of the last are scored; the first token follows nothing, so it cannot
            be one of them.
    """
    documents = [_document(ids, targets, line) for line, (ids, targets) in enumerate(texts, 1)]
    lengths = [len(document) for document in documents]
    found: dict[int, Score] = {}
    training = engine.model.training
    engine.model.eval()
    try:
        for row in pack(lengths, max([TOKENS_AT_ONCE[engine.device.type], *lengths])):
            logprobs, hits = _targets(engine, [documents[index] for index in row])
            counts = [documents[index].targets for index in row]
            for index, own, right in zip(row, logprobs.split(counts), hits.split(counts), strict=True):
                found[index] = Score(float(own.double().sum()), bool(right.all()))
    finally:
        engine.model.train(training)
    return [found[index] for index in range(len(texts))]


def _document(ids: Sequence[int], targets: int, line: int) -> Document:
    assert 0 < targets < len(ids), "at least one token is scored, and never the first"
    return Document(
        ids=np.array(ids, np.int32),
        trained=np.arange(len(ids)) >= len(ids) - targets,
        origin=Origin("texts", line),
    )


def _targets(engine: Engine, documents: Sequence[Document]) -> tuple[Tensor, Tensor]:
    """Of all scored tokens of a row, on the host: log p, and whether it is the likeliest."""
    tokens = sum(map(len, documents))
    pad_to = -(-tokens // ROW_MULTIPLE) * ROW_MULTIPLE if engine.device.type == "cuda" else None
    batch = Batch.of(collate([documents], pad_id=0, pad_to=pad_to), device=engine.device)
    with torch.compiler.set_stance("force_eager"):  # every row has another length
        hidden = engine.hidden(batch)[batch.positions]  # [targets, hidden]
    parts = list(_chunks(engine, hidden, batch.targets))
    return torch.cat([part for part, _ in parts]).cpu(), torch.cat([hit for _, hit in parts]).cpu()


def _chunks(engine: Engine, hidden: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The same, some positions at a time: the logits of all would not fit."""
    for own, wanted in zip(hidden.split(engine.head.chunk), targets.split(engine.head.chunk), strict=True):
        logits = engine.head.logits(own)  # float32 [positions, vocabulary]
        chosen = logits.gather(1, wanted[:, None])[:, 0]
        yield chosen - logits.logsumexp(-1), logits.argmax(-1) == wanted
