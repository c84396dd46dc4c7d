"""GPTQ: columns are rounded one after another, and those to come make up for the error.

Frantar et al. 2022, https://arxiv.org/abs/2210.17323, algorithm 1; the order of columns and static groups are
those of the authors' later code. Matrices with one input are done at once, as they share a factorisation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from swiftkit.formats.codes import Codes
from swiftkit.quantize.gram import Gram
from swiftkit.quantize.grid import Grid

BLOCK = 128  # columns whose errors reach the rest in one product
MOST_DAMPING = 1.0  # of the mean of the diagonal; beyond it rounding is as good


@dataclass(frozen=True)
class Solved:
    """What became of a matrix.

    Args:
        codes: the quantized matrix.
        damping: that let the factorisation pass; None where columns were only rounded.
        dead: channels that were always zero.
    """

    codes: Codes
    damping: float | None
    dead: int


def solve(weight: Tensor, gram: Gram, grid: Grid, *, damping: float, act_order: bool) -> Solved:
    """Quantize a matrix so that its outputs on the calibration's inputs stay what they are.

    Never worse than rounding on those inputs: rows that rounding serves better are rounded.

    Args:
        weight: [out, in].
        gram: of its input.
        grid: scales and zero points, found beforehand: groups are static.
        damping: share of the mean of the Gram matrix's diagonal that is added to it; it doubles as long as
            the factorisation fails.
        act_order: columns with the largest inputs come first.
    """
    weight = weight.float()
    rounded = grid.round(weight)
    dead = int(gram.dead.sum())
    factor, used = _factor(gram, damping, act_order) if gram.rows else (None, None)
    if factor is None:
        return Solved(rounded, None, dead)
    upper, order = factor
    codes = grid.codes(_columns(weight, upper, order, grid))
    worse = gram.squares(weight - codes.dequantize()) > gram.squares(weight - rounded.dequantize())
    values = torch.where(worse[:, None], rounded.values, codes.values)
    return Solved(grid.codes(values), used, dead)


def _factor(gram: Gram, damping: float, act_order: bool) -> tuple[tuple[Tensor, Tensor] | None, float | None]:
    """The upper Cholesky factor of the inverse, the order of its columns, and the damping that it took."""
    hessian = gram.products / gram.rows
    diagonal = hessian.diagonal()
    if not torch.isfinite(hessian).all() or not diagonal.any():
        return None, None
    order = torch.argsort(diagonal, descending=True, stable=True) if act_order else None
    order = torch.arange(len(diagonal), device=hessian.device) if order is None else order
    hessian = hessian[order][:, order].clone()
    mean = hessian.diagonal().mean()
    hessian.diagonal()[hessian.diagonal() == 0] = mean  # a dead channel is rounded, and moves no other
    while damping <= MOST_DAMPING:
        damped = hessian.clone()
        damped.diagonal().add_(damping * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
        if not failed and torch.isfinite(upper).all():
            return (upper, order), damping
        damping = damping * 2 or 1e-4
    return None, None


def _columns(weight: Tensor, upper: Tensor, order: Tensor, grid: Grid) -> Tensor:
    """The codes [out, in], column by column in the given order."""
    weight = weight[:, order].clone()
    values = torch.empty_like(weight)
    scales, zeros = grid.columns(order)
    scales, zeros = scales.T.contiguous(), zeros.T.contiguous()  # [in, out]
    top = (1 << grid.bits) - 1
    width = weight.shape[1]
    for start in range(0, width, BLOCK):
        stop = min(start + BLOCK, width)
        block = weight[:, start:stop].T.contiguous()  # [columns, out]
        errors = torch.empty_like(block)
        factor = upper[start:stop, start:stop]
        for at in range(stop - start):
            scale, zero = scales[start + at], zeros[start + at]
            code = torch.round(block[at] / scale).add_(zero).clamp_(0, top)
            values[:, start + at] = code
            errors[at] = (block[at] - (code - zero) * scale) / factor[at, at]
            block[at:].addr_(factor[at, at:], errors[at], alpha=-1)
        weight[:, stop:] -= errors.T @ upper[start:stop, stop:]
    back = torch.empty_like(values)
    back[:, order] = values
    return back
