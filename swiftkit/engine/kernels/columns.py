"""GPTQ's inner loop: the columns of a block are rounded one after another, and the others make up for it.

Rows never meet, so the kernel gives some of them to each program, which holds them in registers from the
first column to the last: one launch a block, where the reference takes five operations a column.
"""

from __future__ import annotations

import torch
from torch import Tensor

from swiftkit.engine.kernels.rows import runs_triton

BLOCK = 128  # columns whose errors reach the rest in one product


def round_columns(
    block: Tensor, *, factor: Tensor, scales: Tensor, zeros: Tensor, groups: Tensor, top: int
) -> tuple[Tensor, Tensor]:
    """Round a block column by column, each column's error taken off those to come.

    Frantar et al. 2022, https://arxiv.org/abs/2210.17323, algorithm 1, inner loop.

    Args:
        block: float32 [out, columns], at most BLOCK columns, may be a part of a wider matrix.
        factor: float32 [columns, columns], upper triangular, likewise.
        scales: [out, groups], above 0.
        zeros: uint8 [out, groups].
        groups: int64 [columns], the group of each column.
        top: the largest code.

    Returns:
        codes: uint8 [out, columns].
        errors: float32 [out, columns], each divided by its column's entry on the factor's diagonal.
    """
    arguments = (block, factor, scales, zeros, groups, top)
    if runs_triton(block):
        from swiftkit.engine.kernels import columns_triton

        return columns_triton.round_columns(*arguments)
    return round_columns_reference(*arguments)


def round_columns_reference(
    block: Tensor, factor: Tensor, scales: Tensor, zeros: Tensor, groups: Tensor, top: int
) -> tuple[Tensor, Tensor]:
    """See `round_columns`; in the block's own type, so that it can be asked in float64."""
    left = block.T.clone(memory_format=torch.contiguous_format)  # [columns, out]
    scale, zero = (part.T[groups].to(left.dtype) for part in (scales, zeros))
    codes, errors = torch.empty_like(left, dtype=torch.uint8), torch.empty_like(left)
    for at in range(len(left)):
        code = torch.round(left[at] / scale[at]).add_(zero[at]).clamp_(0, top)
        codes[at] = code
        errors[at] = (left[at] - (code - zero[at]) * scale[at]) / factor[at, at]
        left[at:].addr_(factor[at, at:], errors[at], alpha=-1)
    return codes.T, errors.T
