"""Triton kernel of transpose.py."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

TILE = 128


@triton.jit
def _transpose(x, out, rows_total, columns_total, stride, TILE: tl.constexpr):
    rows = tl.program_id(1) * TILE + tl.arange(0, TILE)
    columns = tl.program_id(0) * TILE + tl.arange(0, TILE)
    mask = (rows < rows_total)[:, None] & (columns < columns_total)[None, :]
    tile = tl.load(x + rows.to(tl.int64)[:, None] * stride + columns[None, :], mask=mask, other=0)
    at = out + columns.to(tl.int64)[:, None] * rows_total + rows[None, :]
    tl.store(at, tl.trans(tile), mask=tl.trans(mask))


def transpose(x: Tensor) -> Tensor:
    """See transpose.transpose."""
    rows, columns = x.shape
    out = x.new_empty(columns, rows)
    grid = (triton.cdiv(columns, TILE), triton.cdiv(rows, TILE))
    _transpose[grid](x, out, rows, columns, x.stride(0), TILE=TILE, num_warps=8)
    return out
