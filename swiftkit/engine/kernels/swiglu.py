"""SwiGLU between the merged gate/up product and the down product, forward and backward, with the casts."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from swiftkit.engine.kernels.rows import (
    Rows,
    block_width,
    cast_rows,
    low_rank,
    runs_triton,
    scaled,
    widen,
    with_room,
)


class SwigluGradient(NamedTuple):
    """What `swiglu_backward_cast` returns.

    Attributes:
        g: [tokens, 2 * inter], gradient of the gate/up product with its weight's channel scales folded in.
        u: [tokens, 2 * rank], gradient @ B of gate and of up, or None.
        dot: [tokens] fp32, sum over the columns of gradient * product.
        h: [tokens, inter], the activation again, or None where it was not asked for.
    """

    g: Rows
    u: Tensor | None
    dot: Tensor
    h: Tensor | None


def swiglu_cast(
    raw: Tensor,
    *,
    row_scale: Tensor | None,
    fp8: bool,
    t: Tensor | None = None,
    b: Tensor | None = None,
    a: Tensor | None = None,
    room: int = 0,
) -> tuple[Rows, Tensor | None]:
    """h = silu(gate) * up, cast, and h @ a^T.

    Args:
        raw: [tokens, 2 * inter], the base product, gate then up.
        row_scale: [tokens] fp32, of that product; None is one.
        fp8: whether h is cast to FP8.
        t, b: [tokens, 2 * rank] and [2 * inter, rank], the adapters of gate and up.
        a: [rank, inter], the A factor of down.
        room: columns behind each row of an FP8 result that are left for `outliers.carry`.

    Returns:
        h: [tokens, inter].
        t: [tokens, rank], h @ a^T, or None.
    """
    arguments = (raw, row_scale, fp8, t, b, a, room)
    if runs_triton(raw):
        from swiftkit.engine.kernels import swiglu_triton

        return swiglu_triton.swiglu_cast(*arguments)
    return swiglu_cast_reference(*arguments)


def swiglu_cast_reference(
    raw: Tensor, row_scale: Tensor | None, fp8: bool, t: Tensor | None, b: Tensor | None,
    a: Tensor | None, room: int = 0,
) -> tuple[Rows, Tensor | None]:  # fmt: skip
    """See `swiglu_cast`."""
    gate, up = _gate_up(raw, row_scale, t, b)
    h = torch.nn.functional.silu(gate) * up
    plain = h.to(raw.dtype)
    projected = None if a is None else (widen(plain) @ widen(a).T).to(raw.dtype)
    return with_room(cast_rows(h), room) if fp8 else Rows(plain, None), projected


def swiglu_backward_cast(
    dh: Tensor,
    *,
    u: Tensor | None,
    a: Tensor | None,
    raw: Tensor,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
    t: Tensor | None,
    b: Tensor | None,
    fp8: bool,
    wants_h: bool,
) -> SwigluGradient:
    """dh += u @ a; the gradients of gate and up, cast.

    Args:
        dh: [tokens, inter], gradient of h from down's base product.
        u, a: [tokens, rank] and [rank, inter], the part of down's adapter.
        raw, row_scale, t, b: as `swiglu_cast` had them.
        col_scale: [2 * inter] fp32, the channel scales of the gate/up weight; None is one.
        fp8: whether g is cast to FP8.
        wants_h: whether h is given again (for the gradient of down's A).
    """
    arguments = (dh, u, a, raw, row_scale, col_scale, t, b, fp8, wants_h)
    if runs_triton(raw):
        from swiftkit.engine.kernels import swiglu_triton

        return swiglu_triton.swiglu_backward_cast(*arguments)
    return swiglu_backward_cast_reference(*arguments)


def swiglu_backward_cast_reference(
    dh: Tensor, u: Tensor | None, a: Tensor | None, raw: Tensor, row_scale: Tensor | None,
    col_scale: Tensor | None, t: Tensor | None, b: Tensor | None, fp8: bool, wants_h: bool,
) -> SwigluGradient:  # fmt: skip
    """See `swiglu_backward_cast`."""
    dh = widen(dh) + low_rank(u, None if a is None else a.T)
    gate, up = _gate_up(raw, row_scale, t, b)
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    d_gate = dh * up * (sigmoid + silu * (1 - sigmoid))
    d_up = dh * silu
    dot = (d_gate * gate + d_up * up).sum(1)
    wide = torch.cat([d_gate, d_up], 1)
    plain = wide.to(raw.dtype)
    projected = None
    if b is not None:
        parts = zip(plain.chunk(2, 1), b.chunk(2, 0), strict=True)
        projected = torch.cat([widen(d) @ widen(factor) for d, factor in parts], 1).to(raw.dtype)
    h = (silu * up).to(raw.dtype) if wants_h else None
    if not fp8:
        return SwigluGradient(Rows(plain, None), projected, dot, h)
    wide = wide if col_scale is None else wide * col_scale
    block = block_width(gate.shape[1])
    first = torch.cat([wide[:, :block], wide[:, gate.shape[1] :][:, :block]], 1)
    return SwigluGradient(cast_rows(wide, first), projected, dot, h)


def _gate_up(
    raw: Tensor, row_scale: Tensor | None, t: Tensor | None, b: Tensor | None
) -> tuple[Tensor, Tensor]:
    gate, up = scaled(raw, row_scale).chunk(2, 1)
    if t is None or b is None:
        return gate, up
    (t_gate, t_up), (b_gate, b_up) = t.chunk(2, 1), b.chunk(2, 0)
    return gate + low_rank(t_gate, b_gate), up + low_rank(t_up, b_up)
