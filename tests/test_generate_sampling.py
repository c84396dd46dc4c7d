"""Sampling keeps the nucleus, in its proportions, and repeats with its seed."""

from __future__ import annotations

import pytest
import torch

from swiftkit.generate.sampling import Sampler

PROBABILITIES = torch.tensor([0.05, 0.4, 0.1, 0.3, 0.15])  # by size: 1, 3, 4, 2, 0


def shares(sampler: Sampler, logits: torch.Tensor, draws: int = 20_000) -> torch.Tensor:
    return torch.bincount(sampler(logits.expand(draws, -1)), minlength=logits.shape[-1]) / draws


def test_greedy_takes_the_likeliest() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, -1.0, 1.9]])
    assert Sampler()(logits).tolist() == [1, 0]
    assert Sampler(temperature=0.0, top_p=0.1)(logits).tolist() == [1, 0]


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(1.0, [0, 1, 2, 3, 4]), (0.84, [1, 3, 4]), (0.69, [1, 3]), (0.5, [1, 3]), (0.39, [1]), (1e-9, [1])],
)
def test_top_p_keeps_the_nucleus(top_p: float, kept: list[int], seed: int) -> None:
    drawn = shares(Sampler(temperature=1.0, top_p=top_p, seed=seed), PROBABILITIES.log())
    expected = torch.zeros(5)
    expected[kept] = PROBABILITIES[kept] / PROBABILITIES[kept].sum()
    assert drawn.nonzero().flatten().tolist() == kept
    torch.testing.assert_close(drawn, expected, atol=0.02, rtol=0)  # 5 standard deviations


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_temperature_divides_the_logits(temperature: float, seed: int) -> None:
    logits = PROBABILITIES.log()
    drawn = shares(Sampler(temperature=temperature, seed=seed), logits)
    torch.testing.assert_close(drawn, (logits / temperature).softmax(-1), atol=0.02, rtol=0)


def test_rows_are_drawn_apart_and_repeat_with_the_seed(seed: int) -> None:
    logits = torch.randn(64, 50)
    one, same, other = (Sampler(temperature=1.0, seed=s) for s in (seed, seed, seed + 1))
    first = one(logits)
    assert torch.equal(first, same(logits))
    assert not torch.equal(first, other(logits))
    assert not torch.equal(first, one(logits))  # the second draw of one conversation is another one
    sure = torch.full((3, 4), -1e9).scatter(1, torch.tensor([[2], [0], [3]]), 0.0)
    assert one(sure).tolist() == [2, 0, 3]
