"""What every row of align_throughput.py computes: random prompts, each with two random answers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from peers.workload import SHAPES, SPECIAL_TOKENS, Workload

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class PairWorkload(Workload):
    """A benchmark run over pairs; `documents` are the pairs of a step, `length` a prompt with one answer.

    Args:
        prompt: tokens of a prompt; the rest of `length` is each answer.
        beta: of DPO.
    """

    prompt: int = 512
    beta: float = 0.1

    @property
    def pair_tokens(self) -> int:
        """Tokens of a pair in two rows."""
        return 2 * self.length

    @property
    def step_tokens(self) -> int:
        """Tokens of an optimizer step, every answer with its own prompt."""
        return self.documents * self.pair_tokens

    def pairs(self) -> Iterator[tuple[Ids, Ids, Ids]]:
        """Of each step prompts [pairs, prompt], chosen and rejected answers [pairs, length - prompt]."""
        rng = np.random.default_rng(self.seed)
        vocabulary, answer = SHAPES[self.shape].vocabulary, self.length - self.prompt
        for _ in range(self.total_steps):
            prompts, chosen, rejected = (
                rng.integers(SPECIAL_TOKENS, vocabulary, (self.documents, size))
                for size in (self.prompt, answer, answer)
            )
            yield prompts, chosen, rejected
