"""GPTQ: columns are rounded one after another, and those to come make up for the error.

Frantar et al. 2022, https://arxiv.org/abs/2210.17323, algorithm 1; the order of columns and static groups are
those of the authors' later code. Matrices with one input are done at once, as they share a factorisation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from swiftkit.engine.kernels.columns import BLOCK, round_columns
from swiftkit.formats.codes import Codes
from swiftkit.quantize.gram import Gram
from swiftkit.quantize.grid import Grid

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
            return (upper.contiguous(), order), damping
        damping = damping * 2 or 1e-4
    return None, None


def _columns(weight: Tensor, upper: Tensor, order: Tensor, grid: Grid) -> Tensor:
    """The codes [out, in], column by column in the given order."""
    weight = weight[:, order].clone()
    values = torch.empty_like(weight, dtype=torch.uint8)
    groups = order // grid.group_size
    width = weight.shape[1]
    for start in range(0, width, BLOCK):
        stop = min(start + BLOCK, width)
        values[:, start:stop], errors = round_columns(
            weight[:, start:stop],
            factor=upper[start:stop, start:stop],
            scales=grid.scales,
            zeros=grid.zeros,
            groups=groups[start:stop],
            top=(1 << grid.bits) - 1,
        )
        weight[:, stop:] -= errors @ upper[start:stop, stop:]
    back = torch.empty_like(values)
    back[:, order] = values
    return back
