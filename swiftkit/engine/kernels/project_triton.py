"""Triton kernels of project.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from swiftkit.engine.kernels.rows import FP8, Rows
from swiftkit.engine.kernels.rows_triton import grow, inverse, low_rank_tile, settle, to_bf16
from swiftkit.engine.kernels.tiles import tile_of


@triton.jit
def _cast_project(
    x, factor, col_scale, out, out_scale, t_out, block_scale, tokens, column_stride, rank_stride,
    WIDTH: tl.constexpr, STRIDE: tl.constexpr, RANK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    row_mask = rows < tokens
    mask = row_mask[:, None]
    long_rows = rows.to(tl.int64)[:, None]
    ranks = tl.arange(0, RANK)
    projected = tl.zeros([BM, RANK], tl.float32)
    scale = tl.zeros([BM], tl.float32)
    first = tl.zeros([BM], tl.float32)
    for start in tl.range(0, WIDTH, BN, num_stages=STAGES):
        columns = start + tl.arange(0, BN)
        plain = tl.load(x + long_rows * WIDTH + columns[None, :], mask=mask, other=0.0)
        if factor is not None:
            tile = low_rank_tile(factor, columns, ranks, column_stride, rank_stride, RANK)
            projected = tl.dot(plain, tile, projected)
        value = plain.to(tl.float32)
        if col_scale is not None:
            value = value * tl.load(col_scale + columns)[None, :]
        scale = grow(scale, tl.max(tl.abs(value), axis=1), start == 0)
        first = tl.where(start == 0, scale, first)
        tl.store(block_scale + (start // BN) * tokens + rows, scale, mask=row_mask)
        at = out + long_rows * STRIDE + columns[None, :]
        tl.store(at, (value * inverse(scale)[:, None]).to(out.dtype.element_ty), mask=mask)
    if factor is not None:
        at_t = t_out + rows[:, None] * RANK + ranks[None, :]
        tl.store(at_t, projected.to(t_out.dtype.element_ty), mask=mask)
    tl.store(out_scale + rows, scale, mask=row_mask)
    settle(out, block_scale, first, scale, rows, row_mask, tokens, STRIDE, WIDTH, BN, WIDTH // BN)


@triton.jit
def _add_low_rank(
    y, t, b, residual, out, tokens, column_stride, rank_stride,
    WIDTH: tl.constexpr, RANKS: tl.constexpr, RANKS_TILE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    row_mask = rows < tokens
    mask = row_mask[:, None]
    columns = tl.program_id(0) * BN + tl.arange(0, BN)
    at = rows.to(tl.int64)[:, None] * WIDTH + columns[None, :]
    value = tl.load(y + at, mask=mask, other=0.0).to(tl.float32)
    if t is not None:
        ranks = tl.arange(0, RANKS_TILE)
        at_t = t + rows[:, None] * RANKS + ranks[None, :]
        t_tile = tl.load(at_t, mask=mask & (ranks[None, :] < RANKS), other=0.0)
        b_tile = low_rank_tile(b, columns, ranks, column_stride, rank_stride, RANKS)
        value += to_bf16(tl.dot(t_tile, tl.trans(b_tile))).to(tl.float32)
    if residual is not None:
        value += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, to_bf16(value), mask=mask)


def cast_project(
    x: Tensor, factor: Tensor | None, col_scale: Tensor | None, room: int
) -> tuple[Rows, Tensor | None]:
    """See project.cast_project."""
    tokens, width = x.shape
    tile = tile_of("cast_project", width)
    out = x.new_empty(tokens, width + room, dtype=FP8)
    scale = x.new_empty(tokens, dtype=torch.float32)
    blocks = scale.new_empty(width // tile.columns, tokens)
    projected = None if factor is None else x.new_empty(tokens, factor.shape[1])
    strides = (0, 0) if factor is None else factor.stride()
    _cast_project[(triton.cdiv(tokens, tile.rows),)](
        x, factor, col_scale, out, scale, projected, blocks, tokens, *strides,
        WIDTH=width, STRIDE=width + room, RANK=16 if factor is None else factor.shape[1],
        BM=tile.rows, BN=tile.columns, STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    return Rows(out, scale), projected


def add_low_rank(y: Tensor, t: Tensor | None, b: Tensor | None, residual: Tensor | None) -> Tensor:
    """See project.add_low_rank."""
    tokens, width = y.shape
    tile = tile_of("add_low_rank", width)
    out = torch.empty_like(y)
    ranks = 0 if t is None else t.shape[1]
    strides = (0, 0) if b is None else b.stride()
    _add_low_rank[(width // tile.columns, triton.cdiv(tokens, tile.rows))](
        y, t, b, residual, out, tokens, *strides,
        WIDTH=width, RANKS=ranks, RANKS_TILE=max(16, triton.next_power_of_2(ranks)),
        BM=tile.rows, BN=tile.columns, num_warps=tile.warps,
    )  # fmt: skip
    return out
