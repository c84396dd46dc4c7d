"""Decoding with the slot cache: token for token what transformers' own generation gives."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from swiftkit.engine import Engine
from swiftkit.generate.decode import stream
from swiftkit.generate.sampling import Sampler
from tests import tiny

CPU = torch.device("cpu")
# gemma2, gemma3 and mistral look through a window of 8 tokens, which every prompt below outgrows.
FAMILIES = ["llama", "qwen3", "gemma2", "gemma3", "mistral", "granite"]


def load(family: str, folder: Path, *, seed: int) -> tuple[Any, Engine]:
    model = tiny.make(family, folder, seed=seed)
    return model, Engine.load(folder, dtype=torch.float32, device=CPU)


def prompts(lengths: Sequence[int], *, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, tiny.VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def answers(
    engine: Engine,
    asked: Sequence[Sequence[int]],
    *,
    new: int,
    stop_ids: Sequence[int] = (),
    sampler: Sampler | None = None,
) -> list[list[int]]:
    told: list[list[int]] = [[] for _ in asked]
    steps = stream(engine, asked, max_new_tokens=new, stop_ids=set(stop_ids), sampler=sampler or Sampler())
    for step in steps:
        for index, token in step:
            told[index].append(token)
    return told


@pytest.mark.compat
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_transformers(family: str, tmp_path: Path, seed: int) -> None:
    model, engine = load(family, tmp_path, seed=seed % 1000)
    for asked in prompts([1, 5, 21], seed=seed):
        whole = model.generate(
            torch.tensor([asked]),
            attention_mask=torch.ones(1, len(asked), dtype=torch.long),
            do_sample=False,
            max_new_tokens=24,
            min_new_tokens=24,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert answers(engine, [asked], new=24) == [whole[0, len(asked) :].tolist()]


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_batch_of_unlike_lengths_equals_one_by_one(family: str, tmp_path: Path, seed: int) -> None:
    _, engine = load(family, tmp_path, seed=seed % 1000)
    asked = prompts([3, 17, 1, 9], seed=seed)
    alone = [answers(engine, [prompt], new=16)[0] for prompt in asked]
    assert answers(engine, asked, new=16) == alone
    # With stops, sequences leave the batch one after another; the others go on undisturbed.
    stop = alone[1][4]
    cut = [answer[: answer.index(stop)] if stop in answer else answer for answer in alone]
    assert answers(engine, asked, new=16, stop_ids=[stop]) == cut
    assert len(cut[1]) <= 4


def test_lengths_at_their_limits(tmp_path: Path, seed: int) -> None:
    _, engine = load("llama", tmp_path, seed=seed % 1000)
    (asked,) = prompts([6], seed=seed)
    (full,) = answers(engine, [asked], new=8)
    assert len(full) == 8  # the cache has room for the prompt and the answer, to the last token
    assert answers(engine, [asked], new=1) == [full[:1]]
    assert answers(engine, [asked], new=8, stop_ids=[full[0]]) == [[]]
    first = stream(engine, [asked], max_new_tokens=8, stop_ids={full[0]}, sampler=Sampler())
    assert list(first) == []


def test_training_mode_comes_back_and_no_gradient_is_kept(tmp_path: Path, seed: int) -> None:
    _, engine = load("llama", tmp_path, seed=seed % 1000)
    (asked,) = prompts([4], seed=seed)
    for mode in (True, False):
        engine.model.train(mode)
        steps = stream(engine, [asked], max_new_tokens=3, stop_ids=(), sampler=Sampler())
        next(steps)
        assert not engine.model.training
        steps.close()
        assert engine.model.training is mode


def test_sampled_answers_repeat_with_their_seed(tmp_path: Path, seed: int) -> None:
    _, engine = load("llama", tmp_path, seed=seed % 1000)
    asked = prompts([4, 7], seed=seed)

    def drawn(of: int) -> list[list[int]]:
        return answers(engine, asked, new=24, sampler=Sampler(temperature=1.0, top_p=0.9, seed=of))

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)
