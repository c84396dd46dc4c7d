"""Activations and gradients as the frozen products read them: one scale a row, a power of two times it.

FP8 is e4m3: 448 is the largest value, 2**-9 the smallest. A scale is the smallest power of two that brings a
row's largest magnitude to 448 or below, so multiplying by it or its inverse is exact. The kernels cast while
they stream over a row; they take the first block's largest magnitude, times `HEADROOM`, as the first guess
and cast a block again only where a later one was larger. The rule is a function of the row alone, so the
reference gives the same scale.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
SCALE_FLOOR = 1e-30  # a floor of 1e-12 flushes real rows of gradients to zero
HEADROOM = 4.0
FIRST = 64  # columns of the first block
SLICES = 8  # partial sums of an adapter's gradient over the tokens


class Rows(NamedTuple):
    """A matrix whose value is `data * scale[:, None]`.

    Attributes:
        data: [tokens, width], float8_e4m3fn or the model's dtype.
        scale: [tokens] fp32, or None where every scale is one.
    """

    data: Tensor
    scale: Tensor | None

    def dense(self) -> Tensor:
        """The value in the widest type at hand (fp32, or fp64 where the data is)."""
        wide = widen(self.data)
        return wide if self.scale is None else wide * self.scale[:, None].to(wide.dtype)

    def first(self, columns: int) -> Rows:
        """The first columns, as a view: without those that `outliers` has put behind them."""
        return Rows(self.data[:, :columns], self.scale)


def widen(x: Tensor) -> Tensor:
    """`x` in the type that references compute in: fp32, or fp64 where x is."""
    return x if x.dtype == torch.float64 else x.float()


def runs_triton(x: Tensor) -> bool:
    """Whether a Triton kernel serves this tensor: on a GPU, or under Triton's interpreter."""
    return x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"


def block_width(width: int) -> int:
    """Columns that a kernel takes at a time: the first block of a row makes the first guess of its scale.

    Raises:
        ValueError: the width is not a multiple of 64.
    """
    if width % FIRST:
        raise ValueError(f"the fused kernels need widths that are multiples of {FIRST}, got {width}")
    return FIRST


def power_of_two_scale(amax: Tensor) -> Tensor:
    """The smallest power of two s with amax / s <= 448 (up to fp32 rounding of amax / 448)."""
    ratio = (amax.float() * (1.0 / FP8_MAX)).clamp_min(SCALE_FLOOR)
    exponent = (ratio.contiguous().view(torch.int32) + 0x7FFFFF) >> 23
    return (exponent << 23).view(torch.float32)


def cast_rows(x: Tensor, first: Tensor | None = None) -> Rows:
    """Reference of the streaming cast.

    Args:
        x: [tokens, width].
        first: the columns that make the first guess, if they are not the first block of `x`.
    """
    x = x.float()
    first = x[:, : block_width(x.shape[1])] if first is None else first.float()
    scale = torch.maximum(
        power_of_two_scale(x.abs().amax(1)), HEADROOM * power_of_two_scale(first.abs().amax(1))
    )
    data = (x / scale[:, None]).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    return Rows(data, scale)


def with_room(x: Rows, room: int) -> Rows:
    """A copy with `room` columns behind it, zero as yet; `x` itself where that is none."""
    if not room:
        return x
    data = x.data.new_zeros(x.data.shape[0], x.data.shape[1] + room)
    data[:, : x.data.shape[1]] = x.data
    return Rows(data, x.scale)


def cast_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A frozen weight in FP8 with one power-of-two scale per output channel.

    Args:
        weight: [out, in].

    Returns:
        bytes: [out, in] uint8, to be viewed as float8_e4m3fn.
        scale: [out] fp32.
    """
    wide = weight.float()
    scale = power_of_two_scale(wide.abs().amax(1))
    data = (wide / scale[:, None]).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    return data.view(torch.uint8), scale


def low_rank(t: Tensor | None, b: Tensor | None) -> Tensor | float:
    """t @ b^T in the wide type, 0 where there is no adapter."""
    if t is None or b is None:
        return 0.0
    return widen(t) @ widen(b).T


def scaled(raw: Tensor, row_scale: Tensor | None) -> Tensor:
    """A product with the scale of its rows."""
    value = widen(raw)
    return value if row_scale is None else value * row_scale[:, None].to(value.dtype)


def fp8_product(x: Rows, weight: Tensor, col_scale: Tensor, *, dtype: torch.dtype) -> Tensor:
    """(x * x.scale) @ (weight * col_scale)^T, the scales applied to the fp32 sums.

    Args:
        x: [tokens, in], FP8.
        weight: [out, in] uint8 or float8_e4m3fn.
        col_scale: [out] fp32.
        dtype: of the result.
    """
    assert x.scale is not None
    if not x.data.is_cuda:  # torch's own FP8 product takes seconds on a CPU without AMX
        raw = x.data.float() @ weight.view(FP8).float().T
        return (raw * x.scale[:, None] * col_scale).to(dtype)
    return torch._scaled_mm(
        x.data, weight.view(FP8).T, scale_a=x.scale[:, None], scale_b=col_scale[None], out_dtype=dtype,
        use_fast_accum=True,
    )  # fmt: skip
