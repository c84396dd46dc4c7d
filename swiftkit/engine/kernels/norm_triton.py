"""Triton kernels of norm.py: a program takes BM rows and streams over their columns."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from swiftkit.engine.kernels.norm import Normed, NormGradient
from swiftkit.engine.kernels.rows import FP8, Rows
from swiftkit.engine.kernels.rows_triton import grow, inverse, low_rank_tile, settle, to_bf16
from swiftkit.engine.kernels.tiles import tile_of, tiled


@triton.jit
def _norm_cast(
    residual, weight, eps, y, t, b, a,
    residual_out, x, x_scale, t_out, rstd_out, block_scale, tokens,
    WIDTH: tl.constexpr, STRIDE: tl.constexpr, RANK_IN: tl.constexpr, RANKS: tl.constexpr,
    RANKS_TILE: tl.constexpr,
    ADDS: tl.constexpr, FP8: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BM
    rows = row + tl.arange(0, BM)
    row_mask = rows < tokens
    mask = row_mask[:, None]
    base = rows.to(tl.int64)[:, None] * STRIDE
    ranks = tl.arange(0, RANKS_TILE)
    sum_of_squares = tl.zeros([BM], tl.float32)
    projected = tl.zeros([BM, RANKS_TILE], tl.float32)
    scale = tl.zeros([BM], tl.float32)
    first = tl.zeros([BM], tl.float32)
    if t is not None:
        ranks_in = tl.arange(0, RANK_IN)
        t_tile = tl.load(t + rows[:, None] * RANK_IN + ranks_in[None, :], mask=mask, other=0.0)
    for start in tl.range(0, WIDTH, BN, num_stages=STAGES):
        columns = start + tl.arange(0, BN)
        at = base + columns[None, :]
        value = residual.load([row, start]).to(tl.float32)
        if ADDS:
            value += y.load([row, start]).to(tl.float32)
            if t is not None:
                b_tile = low_rank_tile(b, columns, ranks_in, RANK_IN, 1, RANK_IN)
                value = tl.dot(t_tile, tl.trans(b_tile), value)
            rounded = to_bf16(value)
            residual_out.store([row, start], rounded)
            value = rounded.to(tl.float32)
        sum_of_squares += tl.sum(value * value, axis=1)
        value = value * tl.load(weight + columns).to(tl.float32)[None, :]
        if FP8:
            scale = grow(scale, tl.max(tl.abs(value), axis=1), start == 0)
            first = tl.where(start == 0, scale, first)
            tl.store(block_scale + (start // BN) * tokens + rows, scale, mask=row_mask)
            tl.store(x + at, (value * inverse(scale)[:, None]).to(x.dtype.element_ty), mask=mask)
        else:
            tl.store(x + at, to_bf16(value), mask=mask)
        if a is not None:
            a_tile = low_rank_tile(a, columns, ranks, 1, WIDTH, RANKS)
            projected = tl.dot(to_bf16(value), a_tile, projected)
    rstd = tl.rsqrt(sum_of_squares / WIDTH + eps)
    tl.store(rstd_out + rows, rstd, mask=row_mask)
    if a is not None:
        at_t = t_out + rows[:, None] * RANKS + ranks[None, :]
        projected = (projected * rstd[:, None]).to(t_out.dtype.element_ty)
        tl.store(at_t, projected, mask=mask & (ranks[None, :] < RANKS))
    if FP8:
        tl.store(x_scale + rows, scale * rstd, mask=row_mask)
        settle(x, block_scale, first, scale, rows, row_mask, tokens, STRIDE, WIDTH, BN, WIDTH // BN)


@triton.jit
def _norm_backward_cast(
    d_residual, dx, u, a, residual, rstd, weight, dot, col_scale, b,
    out, g, g_scale, u_out, block_scale, tokens,
    WIDTH: tl.constexpr, RANKS: tl.constexpr, RANKS_TILE: tl.constexpr, RANK_OUT: tl.constexpr,
    FP8: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BM
    rows = row + tl.arange(0, BM)
    row_mask = rows < tokens
    mask = row_mask[:, None]
    base = rows.to(tl.int64)[:, None] * WIDTH
    ranks = tl.arange(0, RANKS_TILE)
    ranks_out = tl.arange(0, RANK_OUT)
    projected = tl.zeros([BM, RANK_OUT], tl.float32)
    scale = tl.zeros([BM], tl.float32)
    first = tl.zeros([BM], tl.float32)
    of_row = tl.load(rstd + rows, mask=row_mask, other=0.0)
    mean = of_row * of_row * tl.load(dot + rows, mask=row_mask, other=0.0) / WIDTH
    if u is not None:
        at_u = u + rows[:, None] * RANKS + ranks[None, :]
        u_tile = tl.load(at_u, mask=mask & (ranks[None, :] < RANKS), other=0.0)
    for start in tl.range(0, WIDTH, BN, num_stages=STAGES):
        columns = start + tl.arange(0, BN)
        at = base + columns[None, :]
        d = dx.load([row, start]).to(tl.float32)
        if u is not None:
            a_tile = low_rank_tile(a, columns, ranks, 1, WIDTH, RANKS)
            d = tl.dot(u_tile, tl.trans(a_tile), d)
        d = d * of_row[:, None] * tl.load(weight + columns).to(tl.float32)[None, :]
        d += d_residual.load([row, start]).to(tl.float32)
        rounded = to_bf16(d - residual.load([row, start]).to(tl.float32) * mean[:, None])
        out.store([row, start], rounded)
        if b is not None:
            b_tile = low_rank_tile(b, columns, ranks_out, RANK_OUT, 1, RANK_OUT)
            projected = tl.dot(rounded, b_tile, projected)
        if FP8:
            d = rounded.to(tl.float32) * tl.load(col_scale + columns)[None, :]
            scale = grow(scale, tl.max(tl.abs(d), axis=1), start == 0)
            first = tl.where(start == 0, scale, first)
            tl.store(block_scale + (start // BN) * tokens + rows, scale, mask=row_mask)
            tl.store(g + at, (d * inverse(scale)[:, None]).to(g.dtype.element_ty), mask=mask)
    if b is not None:
        at_u = u_out + rows[:, None] * RANK_OUT + ranks_out[None, :]
        tl.store(at_u, projected.to(u_out.dtype.element_ty), mask=mask)
    if FP8:
        tl.store(g_scale + rows, scale, mask=row_mask)
        settle(g, block_scale, first, scale, rows, row_mask, tokens, WIDTH, WIDTH, BN, WIDTH // BN)


def norm_cast(
    residual: Tensor, weight: Tensor, eps: float, fp8: bool, y: Tensor | None, t: Tensor | None,
    b: Tensor | None, a: Tensor | None, room: int,
) -> Normed:  # fmt: skip
    """See norm.norm_cast."""
    tokens, width = residual.shape
    tile = tile_of("norm_cast", width)
    x = residual.new_empty(tokens, width + room, dtype=FP8 if fp8 else residual.dtype)
    rstd = residual.new_empty(tokens, dtype=torch.float32)
    x_scale = torch.empty_like(rstd) if fp8 else rstd
    blocks = rstd.new_empty(width // tile.columns if fp8 else 0, tokens)
    total = residual if y is None else torch.empty_like(residual)
    ranks = 0 if a is None else a.shape[0]
    projected = None if a is None else residual.new_empty(tokens, ranks)
    _norm_cast[(triton.cdiv(tokens, tile.rows),)](
        tiled(residual, tile), weight, eps, tiled(y, tile), t, b, a,
        tiled(total, tile), x, x_scale, projected, rstd, blocks, tokens,
        WIDTH=width, STRIDE=width + room, RANK_IN=1 if t is None else t.shape[1],
        RANKS=ranks, RANKS_TILE=max(16, triton.next_power_of_2(ranks)),
        ADDS=y is not None, FP8=fp8, BM=tile.rows, BN=tile.columns, STAGES=tile.stages,
        num_warps=tile.warps, maxnreg=tile.registers,
    )  # fmt: skip
    return Normed(total, Rows(x, x_scale), projected, rstd)


def norm_backward_cast(
    d_residual: Tensor, dx: Tensor, u: Tensor | None, a: Tensor | None,
    residual: Tensor, rstd: Tensor, weight: Tensor, dot: Tensor, fp8: bool, wants_g: bool,
    col_scale: Tensor | None, b: Tensor | None,
) -> NormGradient:  # fmt: skip
    """See norm.norm_backward_cast."""
    tokens, width = residual.shape
    casts = fp8 and wants_g
    tile = tile_of("norm_backward_cast", width)
    out = torch.empty_like(residual)
    g = torch.empty_like(residual, dtype=FP8) if casts else None
    g_scale = torch.empty_like(rstd) if casts else None
    blocks = rstd.new_empty(width // tile.columns if casts else 0, tokens)
    b = b if wants_g else None
    projected = None if b is None else residual.new_empty(tokens, b.shape[1])
    ranks = 0 if u is None else u.shape[1]
    _norm_backward_cast[(triton.cdiv(tokens, tile.rows),)](
        tiled(d_residual, tile), tiled(dx, tile), u, a, tiled(residual, tile), rstd, weight, dot,
        col_scale, b, tiled(out, tile), g, g_scale, projected, blocks, tokens,
        WIDTH=width, RANKS=ranks, RANKS_TILE=max(16, triton.next_power_of_2(ranks)),
        RANK_OUT=16 if b is None else b.shape[1],
        FP8=casts, BM=tile.rows, BN=tile.columns, STAGES=tile.stages,
        num_warps=tile.warps, maxnreg=tile.registers,
    )  # fmt: skip
    if not wants_g:
        return NormGradient(out, None, None)
    return NormGradient(out, Rows(out, None) if g is None else Rows(g, g_scale), projected)
