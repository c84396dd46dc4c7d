"""Scores of given texts: transformers' own logits are the oracle."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from swiftkit.engine import Engine
from swiftkit.generate.score import score
from tests import tiny


@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere2", "granite"])
def test_scores_equal_transformers(
    family: str, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.make(family, tmp_path, seed=seed % 1000)
    engine = Engine.load(tmp_path, dtype=torch.float32, device=torch.device("cpu"))
    monkeypatch.setattr(engine.head, "chunk", 5)
    monkeypatch.setattr("swiftkit.generate.score.TOKENS_AT_ONCE", {"cpu": 40})
    generator = torch.Generator().manual_seed(seed)
    texts = []
    for length, targets in [(9, 3), (2, 1), (30, 29), (50, 7), (5, 4)]:
        texts.append((torch.randint(3, tiny.VOCABULARY, (length,), generator=generator).tolist(), targets))
    best = model(torch.tensor([texts[0][0][:-1]])).logits[0, -1].argmax()
    texts.append(([*texts[0][0][:-1], int(best)], 1))
    engine.model.train()
    for (ids, targets), found in zip(texts, score(engine, texts), strict=True):
        logits = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)[-targets:]
        wanted = torch.tensor(ids[-targets:])
        assert found.logprob == pytest.approx(float(logits.gather(1, wanted[:, None]).sum()), abs=1e-4)
        assert found.greedy is bool((logits.argmax(-1) == wanted).all())
    assert found.greedy and engine.model.training
    assert score(engine, []) == []
