"""FP8: weights with a scale a channel, inputs with a scale a token that is found as they come."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from swiftkit.formats.compressed import FP8

TOP = 448.0  # the largest float8_e4m3fn
LEAST_SCALE = 2.0**-24


@dataclass(frozen=True, eq=False)
class Fp8Matrix:
    """w = data * scale: data float8_e4m3fn [out, in], scale [out, 1]."""

    data: Tensor
    scale: Tensor

    def dequantize(self) -> Tensor:
        """The matrix in float32."""
        return self.data.float() * self.scale.float()


def quantize(weight: Tensor, *, scale_dtype: torch.dtype) -> Fp8Matrix:
    """A matrix [out, in] in FP8; the scale is rounded to its stored type first."""
    weight = weight.float()
    scale = (weight.abs().amax(1, keepdim=True) / TOP).clamp(min=LEAST_SCALE).to(scale_dtype)
    return Fp8Matrix((weight / scale.float()).clamp(-TOP, TOP).to(FP8), scale)


def round_inputs(_: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """A forward hook in front of a linear layer: its input as FP8 with a scale a token holds it."""
    x = arguments[0]
    scale = (x.float().abs().amax(-1, keepdim=True) / TOP).clamp(min=LEAST_SCALE)
    rounded = (x.float() / scale).clamp(-TOP, TOP).to(FP8).float() * scale
    return (rounded.to(x.dtype), *arguments[1:])
