"""Residual sum, RMS norm, cast and the next adapters' A product in one pass, and its mirror.

The norm's 1/rms is known only at the end of a row, so it is not applied to the row but becomes part of its
scale: x = (residual * weight) * rstd[row]. That holds for bf16 too, where `Rows.scale` is rstd alone.
"""

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
    widen,
    with_room,
)


class Normed(NamedTuple):
    """What `norm_cast` returns.

    Attributes:
        residual: [tokens, hidden], the sum.
        x: the normalized rows, as the next product reads them.
        t: [tokens, ranks], x @ a^T, or None.
        rstd: [tokens] fp32.
    """

    residual: Tensor
    x: Rows
    t: Tensor | None
    rstd: Tensor


class NormGradient(NamedTuple):
    """What `norm_backward_cast` returns.

    Attributes:
        d_residual: [tokens, hidden].
        g: d_residual * col_scale as the backward product of the linear before the sum reads it, or None.
        u: [tokens, ranks], d_residual @ b, or None.
    """

    d_residual: Tensor
    g: Rows | None
    u: Tensor | None


def norm_cast(
    residual: Tensor,
    *,
    weight: Tensor,
    eps: float,
    fp8: bool,
    y: Tensor | None = None,
    t: Tensor | None = None,
    b: Tensor | None = None,
    a: Tensor | None = None,
    room: int = 0,
) -> Normed:
    """residual += y + t @ b^T; x = rms_norm(residual) * weight, cast; x @ a^T.

    Args:
        residual: [tokens, hidden].
        weight: [hidden], of the norm.
        eps: of the norm.
        fp8: whether x is cast to FP8.
        y: [tokens, hidden], the base product of the linear before; None adds nothing.
        t, b: [tokens, rank] and [hidden, rank], that linear's adapter.
        a: [ranks, hidden], the A factors of the linears that read x.
        room: columns behind each row of an FP8 result that are left for `outliers.carry`.
    """
    arguments = (residual, weight, eps, fp8, y, t, b, a, room)
    if runs_triton(residual):
        from swiftkit.engine.kernels import norm_triton

        return norm_triton.norm_cast(*arguments)
    return norm_cast_reference(*arguments)


def norm_cast_reference(
    residual: Tensor, weight: Tensor, eps: float, fp8: bool, y: Tensor | None, t: Tensor | None,
    b: Tensor | None, a: Tensor | None, room: int = 0,
) -> Normed:  # fmt: skip
    """See `norm_cast`."""
    if y is not None:
        residual = (widen(residual) + widen(y) + low_rank(t, b)).to(residual.dtype)
    wide = widen(residual)
    rstd = torch.rsqrt(wide.square().mean(1) + eps)
    unscaled = wide * widen(weight)
    if fp8:
        x = with_room(cast_rows(unscaled), room)
        assert x.scale is not None
        x = Rows(x.data, x.scale * rstd)
    else:
        x = Rows(unscaled.to(residual.dtype), rstd)
    projected = None
    if a is not None:
        exact = widen(unscaled.to(residual.dtype))
        projected = ((exact @ widen(a).T) * rstd[:, None]).to(residual.dtype)
    return Normed(residual, x, projected, rstd)


def norm_backward_cast(
    d_residual: Tensor,
    *,
    dx: Tensor,
    u: Tensor | None,
    a: Tensor | None,
    residual: Tensor,
    rstd: Tensor,
    weight: Tensor,
    dot: Tensor,
    fp8: bool,
    wants_g: bool,
    col_scale: Tensor | None = None,
    b: Tensor | None = None,
) -> NormGradient:
    """dx += u @ a; the norm's gradient is added to d_residual; cast for the linear before.

    The norm's backward needs sum_j dx_j x_j of each row before it writes anything. That sum equals
    sum_n dy_n y_n over the outputs of the linears that read x (without bias), so the kernel that had dy and y
    in registers made it.

    Args:
        d_residual: [tokens, hidden], gradient of the sum that does not come through the norm.
        dx: [tokens, hidden], gradient of the norm's output from the base product.
        u, a: [tokens, ranks] and [ranks, hidden], the adapters' part of that gradient.
        residual: [tokens, hidden], input of the norm.
        rstd, weight: of the norm.
        dot: [tokens] fp32, sum_j dx_j x_j.
        fp8: whether g is cast to FP8.
        wants_g: whether a linear before the sum wants g and u.
        col_scale: [hidden] fp32, of that linear's weight.
        b: [hidden, rank], that linear's B.
    """
    arguments = (
        d_residual, dx, u, a, residual, rstd, weight, dot, fp8, wants_g, col_scale, b
    )  # fmt: skip
    if runs_triton(residual):
        from swiftkit.engine.kernels import norm_triton

        return norm_triton.norm_backward_cast(*arguments)
    return norm_backward_cast_reference(*arguments)


def norm_backward_cast_reference(
    d_residual: Tensor, dx: Tensor, u: Tensor | None, a: Tensor | None,
    residual: Tensor, rstd: Tensor, weight: Tensor, dot: Tensor, fp8: bool, wants_g: bool,
    col_scale: Tensor | None, b: Tensor | None,
) -> NormGradient:  # fmt: skip
    """See `norm_backward_cast`."""
    whole = widen(dx) + low_rank(u, None if a is None else a.T)
    through = rstd[:, None] * widen(weight) * whole
    mean = (rstd.square() * dot / residual.shape[1])[:, None]
    out = (widen(d_residual) + through - widen(residual) * mean).to(d_residual.dtype)
    if not wants_g:
        return NormGradient(out, None, None)
    g, projected = cast_project_parts(widen(out), out, col_scale, b, fp8)
    return NormGradient(out, g, projected)


def cast_project_parts(
    wide: Tensor, plain: Tensor, col_scale: Tensor | None, b: Tensor | None, fp8: bool
) -> tuple[Rows, Tensor | None]:
    """A gradient's cast with its weight's channel scales folded in, and its product with B."""
    folded = wide if col_scale is None else wide * col_scale
    g = cast_rows(folded, folded[:, : block_width(folded.shape[1])]) if fp8 else Rows(plain, None)
    projected = None if b is None else (widen(plain) @ widen(b)).to(plain.dtype)
    return g, projected
