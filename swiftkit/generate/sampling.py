"""From logits to the next token."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Sampler:
    """Greedy at temperature 0, otherwise a draw from the nucleus (Holtzman et al. 2019, arXiv 1904.09751).

    Args:
        temperature: logits are divided by it.
        top_p: the fewest likeliest tokens whose probabilities reach this sum are kept.
        seed: of the draws.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 42
    _generator: torch.Generator | None = field(default=None, repr=False)

    def __call__(self, logits: Tensor) -> Tensor:
        """float32 [sequences, vocabulary] to int64 [sequences]."""
        if self.temperature == 0:
            return logits.argmax(-1)
        if self._generator is None:
            self._generator = torch.Generator(logits.device).manual_seed(self.seed)
        probabilities = (logits / self.temperature).softmax(-1)
        if self.top_p < 1:
            ordered, order = probabilities.sort(-1, descending=True)
            before = ordered.cumsum(-1) - ordered
            ordered = ordered.masked_fill(before >= self.top_p, 0.0)
            probabilities = torch.zeros_like(probabilities).scatter_(-1, order, ordered)
        return torch.multinomial(probabilities, 1, generator=self._generator)[:, 0]
