"""Triton kernel of columns.py: a warp owns whole rows of the block, so nothing goes through shared memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from swiftkit.engine.kernels.columns import BLOCK

ROWS, WARPS = 16, 4  # of a program
ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding it leaves no binary places, halves go to even


@triton.jit
def _round_columns(
    block, factor, scales, zeros, groups, codes, errors, rows_total, top,
    block_stride, factor_stride, groups_total, WIDTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.arange(0, BN)
    there = columns < WIDTH
    mask = (rows < rows_total)[:, None] & there[None, :]
    wide = rows.to(tl.int64)[:, None]
    left = tl.load(block + wide * block_stride + columns[None, :], mask=mask, other=0.0)
    group = tl.load(groups + columns, mask=there, other=0)
    places = wide * groups_total + group[None, :]
    scale = tl.load(scales + places, mask=mask, other=1.0).to(tl.float32)
    zero = tl.load(zeros + places, mask=mask, other=0).to(tl.float32)
    code = tl.zeros((BM, BN), tl.float32)
    error = tl.zeros((BM, BN), tl.float32)
    for at in range(WIDTH):
        here = (columns == at)[None, :]
        # The one column, [BM]: sums of which all other terms are 0.
        value = tl.sum(tl.where(here, left, 0.0), 1)
        own_scale = tl.sum(tl.where(here, scale, 0.0), 1)
        own_zero = tl.sum(tl.where(here, zero, 0.0), 1)
        # Clamped before it is rounded, where the bounds are whole numbers: so it is small enough for ROUNDER.
        steps = tl.minimum(tl.maximum(tl.div_rn(value, own_scale), -own_zero), top - own_zero)
        steps = (steps + ROUNDER) - ROUNDER
        line = tl.load(factor + at * factor_stride + columns, mask=there & (columns >= at), other=0.0)
        pivot = tl.load(factor + at * factor_stride + at)
        own_error = tl.div_rn(value - steps * own_scale, pivot)
        code = tl.where(here, (steps + own_zero)[:, None], code)
        error = tl.where(here, own_error[:, None], error)
        left -= own_error[:, None] * line[None, :]
    out = wide * WIDTH + columns[None, :]
    tl.store(codes + out, code.to(tl.int32).to(tl.uint8), mask=mask)
    tl.store(errors + out, error, mask=mask)


def round_columns(
    block: Tensor, factor: Tensor, scales: Tensor, zeros: Tensor, groups: Tensor, top: int
) -> tuple[Tensor, Tensor]:
    """See columns.round_columns."""
    rows, columns = block.shape
    assert columns <= BLOCK and block.stride(1) == factor.stride(1) == 1
    assert scales.is_contiguous() and zeros.is_contiguous() and groups.is_contiguous()
    codes = torch.empty(rows, columns, dtype=torch.uint8, device=block.device)
    errors = torch.empty(rows, columns, dtype=torch.float32, device=block.device)
    _round_columns[(triton.cdiv(rows, ROWS),)](
        block, factor, scales, zeros, groups, codes, errors, rows, float(top),
        block.stride(0), factor.stride(0), scales.shape[1], WIDTH=columns, BM=ROWS, BN=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return codes, errors
