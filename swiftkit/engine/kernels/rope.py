"""From the raw q/k/v product to what attention reads, and back: scales, adapter, bias, rotary embedding."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from swiftkit.engine.kernels.rows import Rows, block_width, cast_rows, runs_triton, scaled, widen


class Heads(NamedTuple):
    """How the columns of a q/k/v product are divided: query heads, then key heads, then value heads."""

    queries: int
    keys: int
    width: int

    @property
    def total(self) -> int:
        """Heads in all."""
        return self.queries + 2 * self.keys


class RopeGradient(NamedTuple):
    """What `rope_backward_cast` returns.

    Attributes:
        g: [tokens, total * width], gradient of the product with its weight's channel scales folded in.
        u: [tokens, 3 * rank], gradient @ B of each projection, or None.
        dot: [tokens] fp32, sum over the columns of gradient * product (without bias).
    """

    g: Rows
    u: Tensor | None
    dot: Tensor


def rope(
    raw: Tensor,
    *,
    heads: Heads,
    cos: Tensor,
    sin: Tensor,
    row_scale: Tensor | None,
    bias: Tensor | None = None,
    t: Tensor | None = None,
    b: Tensor | None = None,
) -> Tensor:
    """rotate(raw * row_scale + t @ b^T + bias), written over `raw`.

    Args:
        raw: [tokens, heads.total * heads.width], overwritten.
        heads: of its columns; values are not rotated.
        cos, sin: [tokens, heads.width], halves equal, as transformers' Llama has them.
        row_scale: [tokens] fp32, of the product; None is one.
        bias: [heads.total * heads.width] or None.
        t, b: [tokens, 3 * rank] and [heads.total * heads.width, rank], the adapters.
    """
    if runs_triton(raw):
        from swiftkit.engine.kernels import rope_triton

        return rope_triton.rope(raw, heads, cos, sin, row_scale, bias, t, b)
    raw.copy_(rope_reference(raw, heads, cos, sin, row_scale, bias, t, b))
    return raw


def rope_reference(
    raw: Tensor, heads: Heads, cos: Tensor, sin: Tensor, row_scale: Tensor | None, bias: Tensor | None,
    t: Tensor | None, b: Tensor | None,
) -> Tensor:  # fmt: skip
    """See `rope`; returns a new tensor."""
    value = scaled(raw, row_scale)
    if t is not None and b is not None:
        value = value + _low_rank_by_projection(t, b, heads)
    if bias is not None:
        value = value + widen(bias)
    return _rotate(value, heads, widen(cos), widen(sin)).to(raw.dtype)


def rope_backward_cast(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    *,
    qkv: Tensor,
    heads: Heads,
    cos: Tensor,
    sin: Tensor,
    fp8: bool,
    col_scale: Tensor | None,
    bias: Tensor | None = None,
    b: Tensor | None = None,
) -> RopeGradient:
    """Gradient of the raw product of `rope`, cast.

    Args:
        dq, dk, dv: [tokens, queries * width], [tokens, keys * width] twice, contiguous.
        qkv: what `rope` returned.
        heads, cos, sin, bias, b: as `rope` had them.
        fp8: whether g is cast to FP8.
        col_scale: fp32, the channel scales of the product's weight; None is one.
    """
    arguments = (dq, dk, dv, qkv, heads, cos, sin, fp8, col_scale, bias, b)
    if runs_triton(dq):
        from swiftkit.engine.kernels import rope_triton

        return rope_triton.rope_backward_cast(*arguments)
    return rope_backward_cast_reference(*arguments)


def rope_backward_cast_reference(
    dq: Tensor, dk: Tensor, dv: Tensor, qkv: Tensor, heads: Heads, cos: Tensor, sin: Tensor, fp8: bool,
    col_scale: Tensor | None, bias: Tensor | None, b: Tensor | None,
) -> RopeGradient:  # fmt: skip
    """See `rope_backward_cast`."""
    rotated = widen(torch.cat([dq, dk, dv], 1))
    dot = (rotated * widen(qkv)).sum(1)
    gradient = _rotate(rotated, heads, widen(cos), -widen(sin))
    if bias is not None:
        dot = dot - gradient @ widen(bias)
    plain = gradient.to(dq.dtype)
    u = None
    if b is not None:
        ends = heads.queries * heads.width, (heads.queries + heads.keys) * heads.width
        parts = zip(plain.tensor_split(ends, 1), b.tensor_split(ends, 0), strict=True)
        u = torch.cat([widen(d) @ widen(factor) for d, factor in parts], 1).to(dq.dtype)
    if not fp8:
        return RopeGradient(Rows(plain, None), u, dot)
    folded = gradient if col_scale is None else gradient * col_scale
    return RopeGradient(cast_rows(folded, folded[:, : heads.width]), u, dot)


def _rotate(x: Tensor, heads: Heads, cos: Tensor, sin: Tensor) -> Tensor:
    by_head = x.view(-1, heads.total, heads.width)
    turning, still = by_head.tensor_split([heads.queries + heads.keys], 1)
    low, high = turning.chunk(2, -1)
    turned = turning * cos[:, None] + torch.cat([-high, low], -1) * sin[:, None]
    return torch.cat([turned, still], 1).reshape(x.shape)


def _low_rank_by_projection(t: Tensor, b: Tensor, heads: Heads) -> Tensor:
    ends = heads.queries * heads.width, (heads.queries + heads.keys) * heads.width
    parts = zip(widen(t).chunk(3, 1), widen(b).tensor_split(ends, 0), strict=True)
    return torch.cat([small @ factor.T for small, factor in parts], 1)


def head_block(heads: Heads) -> int:
    """Half a head's columns, checked.

    Raises:
        ValueError: the kernels need a head width that is a power of two, at least 32.
    """
    half = heads.width // 2
    if half < 16 or half & (half - 1):
        raise ValueError(f"the fused kernels need a head width of 32, 64, 128 or 256, got {heads.width}")
    block_width(heads.total * heads.width)
    return half
