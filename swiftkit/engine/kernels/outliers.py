"""The largest input channels of an FP8 product, carried to twice its precision.

A few channels of an activation are many times larger than the rest, and their rounding is most of the error
of a product. With x = high + low and W = high + low in FP8 (the same scales for both), high high^T + low
high^T + high low^T leaves out only low low^T. So behind the columns of x stand first the low parts of those
channels, then their high parts, behind those of W their high parts, then their low ones, and one product
gives the whole sum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from swiftkit.engine.kernels.rows import FP8, FP8_MAX, Rows, low_rank, runs_triton, widen

MOST = 64  # channels; a width of less than 512 has an eighth of it


def how_many(width: int) -> int:
    """Channels of a product over `width` inputs that are carried."""
    return min(MOST, width // 8)


def carry(
    x: Rows, exact: Tensor, channels: Tensor, *, weight: Tensor | None = None, rstd: Tensor | None = None
) -> None:
    """Fill the columns behind the first `width` ones of `x.data`.

    Args:
        x: [tokens, width + 2 * channels] FP8, the first columns cast.
        exact: [tokens, width], what was cast, before `weight` and `rstd`.
        channels: [channels] int32, which columns.
        weight, rstd: [width] and [tokens] of a norm in between.
    """
    assert x.scale is not None
    if runs_triton(exact):
        from swiftkit.engine.kernels import outliers_triton

        outliers_triton.carry(x, exact, channels, weight, rstd)
        return
    value = widen(exact[:, channels])
    if weight is not None and rstd is not None:
        value = value * widen(weight[channels]) * rstd[:, None]
    _write(x, value, channels)


def carry_swiglu(h: Rows, raw: Tensor, channels: Tensor, *, t: Tensor | None, b: Tensor | None) -> None:
    """As `carry`, for h = silu(gate) * up, which is not at hand any more and made again in these channels.

    Args:
        h: [tokens, inter + 2 * channels] FP8, the first columns cast.
        raw: [tokens, 2 * inter], the product that h was made of, gate then up.
        channels: [channels] int32, which columns of h.
        t, b: [tokens, 2 * rank] and [2 * inter, rank], the adapters of gate and up.
    """
    assert h.scale is not None
    if runs_triton(raw):
        from swiftkit.engine.kernels import outliers_triton

        outliers_triton.carry_swiglu(h, raw, channels, t, b)
        return
    gate, up = (widen(part[:, channels]) for part in raw.chunk(2, 1))
    if t is not None and b is not None:
        (t_gate, t_up), (b_gate, b_up) = t.chunk(2, 1), b.chunk(2, 0)
        gate, up = gate + low_rank(t_gate, b_gate[channels]), up + low_rank(t_up, b_up[channels])
    _write(h, torch.nn.functional.silu(gate) * up, channels)


def _write(x: Rows, value: Tensor, channels: Tensor) -> None:
    assert x.scale is not None
    count = channels.shape[0]
    width = x.data.shape[1] - 2 * count
    stored = x.data.view(torch.uint8)  # torch indexes no FP8 on a CPU
    high = stored[:, channels]
    low = value / x.scale[:, None] - high.view(FP8).to(value.dtype)
    stored[:, width : width + count] = low.clamp(-FP8_MAX, FP8_MAX).to(FP8).view(torch.uint8)
    stored[:, width + count :] = high


def low_part(weight: Tensor, high: Tensor, scale: Tensor) -> Tensor:
    """What a weight's FP8 values leave over, in FP8 of the same scale.

    Args:
        weight: [out, columns].
        high: [out, columns] uint8, its cast.
        scale: [out] fp32, of the cast.

    Returns:
        [out, columns] uint8.
    """
    rest = weight.float() / scale[:, None] - high.view(FP8).float()
    return rest.clamp(-FP8_MAX, FP8_MAX).to(FP8).view(torch.uint8)


def largest(squares: Tensor, weight: Tensor) -> Tensor:
    """The channels that contribute most to a product, [channels] int32.

    Args:
        squares: [width], sum of x ** 2 over some tokens.
        weight: [out, width].
    """
    contribution = squares.float().sqrt() * weight.float().norm(dim=0)
    return contribution.topk(how_many(weight.shape[1])).indices.sort().values.int()
