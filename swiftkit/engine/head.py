"""The loss head: only trained positions are projected, in chunks; the logits never stand whole in memory."""

from __future__ import annotations

from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from swiftkit.engine.families import LogitRule
from swiftkit.engine.kernels.cross_entropy import Fp8Head, cross_entropy

CHUNK_BYTES = {"cuda": 1 << 30}  # of logits at once; products of fewer rows leave a GPU half idle
SMALL_CHUNK_BYTES = 1 << 28


class Head:
    """The frozen output projection with its family's logit rule.

    Args:
        weight: [vocabulary, hidden].
        rule: scale and soft cap.
        chunk: positions projected at once; None fills CHUNK_BYTES.
        fp8: keep an FP8 copy, which makes the gradient's product twice as fast; the logits stay exact.
    """

    def __init__(self, weight: Tensor, rule: LogitRule, *, chunk: int | None = None, fp8: bool = False):
        self.weight = weight
        self.rule = rule
        room = CHUNK_BYTES.get(weight.device.type, SMALL_CHUNK_BYTES)
        self.chunk = chunk or max(16, room // (weight.element_size() * weight.shape[0]))
        self._takes_fp8 = fp8 and all(size % 16 == 0 for size in weight.shape)  # else there is no kernel

    @cached_property
    def _fp8(self) -> Fp8Head | None:
        """Made when the first gradient is: a model that only answers needs no copy."""
        return Fp8Head.of(self.weight.detach()) if self._takes_fp8 else None

    def logits(self, hidden: Tensor) -> Tensor:
        """[positions, hidden] to float32 [positions, vocabulary]."""
        scores = F.linear(hidden, self.weight).float() * self.rule.scale
        cap = self.rule.softcap
        return scores if cap is None else cap * torch.tanh(scores / cap)

    def cross_entropy(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Sum of -log p(target) over positions, in float32; differentiable in `hidden`.

        Args:
            hidden: [positions, hidden], the trained positions only.
            targets: int64 [positions].
        """
        return cross_entropy(
            hidden,
            self.weight,
            targets,
            scale=self.rule.scale,
            softcap=self.rule.softcap,
            chunk=self.chunk,
            fp8=self._fp8 if hidden.requires_grad else None,
        )
