"""Triton kernels of rope.py: forward a program takes one head of BM rows, backward all heads of BM rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from swiftkit.engine.kernels.rope import Heads, RopeGradient, head_block
from swiftkit.engine.kernels.rows import FP8, Rows
from swiftkit.engine.kernels.rows_triton import grow, inverse, low_rank_tile, settle, to_bf16
from swiftkit.engine.kernels.tiles import TILES


@triton.jit
def _half(raw, at, columns, mask, of_row, bias, t_tile, b, ranks, RANK: tl.constexpr):
    value = tl.load(raw + at, mask=mask, other=0.0).to(tl.float32)
    if of_row is not None:
        value = value * of_row
    if b is not None:
        b_tile = low_rank_tile(b, columns, ranks, RANK, 1, RANK)
        value += to_bf16(tl.dot(t_tile, tl.trans(b_tile))).to(tl.float32)
    if bias is not None:
        value += tl.load(bias + columns).to(tl.float32)[None, :]
    return value


@triton.jit
def _rope(
    raw, cos, sin, row_scale, bias, t, b, tokens,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, HALF: tl.constexpr, RANK: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    row_mask = rows < tokens
    mask = row_mask[:, None]
    ranks = tl.arange(0, RANK)
    lanes = tl.arange(0, HALF)
    columns = head * 2 * HALF + lanes
    at = rows.to(tl.int64)[:, None] * ((QUERIES + 2 * KEYS) * 2 * HALF) + columns[None, :]
    of_row = None
    if row_scale is not None:
        of_row = tl.load(row_scale + rows, mask=row_mask, other=0.0)[:, None]
    t_tile = None
    if t is not None:
        projection = tl.where(head >= QUERIES, 1, 0) + tl.where(head >= QUERIES + KEYS, 1, 0)
        at_t = t + rows[:, None] * (3 * RANK) + projection * RANK + ranks[None, :]
        t_tile = tl.load(at_t, mask=mask, other=0.0)
    low = _half(raw, at, columns, mask, of_row, bias, t_tile, b, ranks, RANK)
    high = _half(raw, at + HALF, columns + HALF, mask, of_row, bias, t_tile, b, ranks, RANK)
    if head < QUERIES + KEYS:
        angle = rows[:, None] * (2 * HALF) + lanes[None, :]
        c = tl.load(cos + angle, mask=mask, other=0.0).to(tl.float32)
        s = tl.load(sin + angle, mask=mask, other=0.0).to(tl.float32)
        turned = low * c - high * s
        high = high * c + low * s
        low = turned
    tl.store(raw + at, to_bf16(low), mask=mask)
    tl.store(raw + at + HALF, to_bf16(high), mask=mask)


@triton.jit
def _backward_heads(
    gradient, qkv, c, s, col_scale, bias, b, g, block_scale, scale, first, dot, projected, rows, row_mask,
    tokens, FROM: tl.constexpr, COUNT: tl.constexpr, TOTAL: tl.constexpr, TURNS: tl.constexpr,
    HALF: tl.constexpr, RANK: tl.constexpr, FP8: tl.constexpr, BM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    mask = row_mask[:, None]
    lanes = tl.arange(0, HALF)
    ranks = tl.arange(0, RANK)
    wide = rows.to(tl.int64)[:, None]
    for head in tl.range(0, COUNT, num_stages=STAGES):
        columns = (FROM + head) * 2 * HALF + lanes
        at_own = wide * (COUNT * 2 * HALF) + head * 2 * HALF + lanes[None, :]
        low = tl.load(gradient + at_own, mask=mask, other=0.0).to(tl.float32)
        high = tl.load(gradient + at_own + HALF, mask=mask, other=0.0).to(tl.float32)
        at = wide * (TOTAL * 2 * HALF) + columns[None, :]
        dot += tl.sum(low * tl.load(qkv + at, mask=mask, other=0.0).to(tl.float32), axis=1)
        dot += tl.sum(high * tl.load(qkv + at + HALF, mask=mask, other=0.0).to(tl.float32), axis=1)
        if TURNS:
            turned = low * c + high * s
            high = high * c - low * s
            low = turned
        if bias is not None:
            dot -= tl.sum(low * tl.load(bias + columns).to(tl.float32)[None, :], axis=1)
            dot -= tl.sum(high * tl.load(bias + columns + HALF).to(tl.float32)[None, :], axis=1)
        if b is not None:
            b_low = low_rank_tile(b, columns, ranks, RANK, 1, RANK)
            b_high = low_rank_tile(b, columns + HALF, ranks, RANK, 1, RANK)
            projected = tl.dot(to_bf16(low), b_low, projected)
            projected = tl.dot(to_bf16(high), b_high, projected)
        if FP8:
            low = low * tl.load(col_scale + columns)[None, :]
            high = high * tl.load(col_scale + columns + HALF)[None, :]
            amax = tl.maximum(tl.max(tl.abs(low), axis=1), tl.max(tl.abs(high), axis=1))
            is_first = FROM + head == 0
            scale = grow(scale, amax, is_first)
            first = tl.where(is_first, scale, first)
            tl.store(block_scale + (FROM + head) * tokens + rows, scale, mask=row_mask)
            of_scale = inverse(scale)[:, None]
            tl.store(g + at, (low * of_scale).to(g.dtype.element_ty), mask=mask)
            tl.store(g + at + HALF, (high * of_scale).to(g.dtype.element_ty), mask=mask)
        else:
            tl.store(g + at, to_bf16(low), mask=mask)
            tl.store(g + at + HALF, to_bf16(high), mask=mask)
    return scale, first, dot, projected


@triton.jit
def _rope_backward_cast(
    dq, dk, dv, qkv, cos, sin, col_scale, bias, b, g, g_scale, u, dot_out, block_scale, tokens,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, HALF: tl.constexpr, RANK: tl.constexpr,
    FP8: tl.constexpr, BM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    TOTAL: tl.constexpr = QUERIES + 2 * KEYS
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    row_mask = rows < tokens
    mask = row_mask[:, None]
    ranks = tl.arange(0, RANK)
    angle = rows[:, None] * (2 * HALF) + tl.arange(0, HALF)[None, :]
    c = tl.load(cos + angle, mask=mask, other=0.0).to(tl.float32)
    s = tl.load(sin + angle, mask=mask, other=0.0).to(tl.float32)
    scale = tl.zeros([BM], tl.float32)
    first = tl.zeros([BM], tl.float32)
    dot = tl.zeros([BM], tl.float32)
    at = rows[:, None] * (3 * RANK) + ranks[None, :]
    none = tl.zeros([BM, RANK], tl.float32)
    scale, first, dot, projected = _backward_heads(
        dq, qkv, c, s, col_scale, bias, b, g, block_scale, scale, first, dot, none, rows, row_mask, tokens,
        0, QUERIES, TOTAL, True, HALF, RANK, FP8, BM, STAGES,
    )  # fmt: skip
    if b is not None:
        tl.store(u + at, projected.to(u.dtype.element_ty), mask=mask)
    scale, first, dot, projected = _backward_heads(
        dk, qkv, c, s, col_scale, bias, b, g, block_scale, scale, first, dot, none, rows, row_mask, tokens,
        QUERIES, KEYS, TOTAL, True, HALF, RANK, FP8, BM, STAGES,
    )  # fmt: skip
    if b is not None:
        tl.store(u + at + RANK, projected.to(u.dtype.element_ty), mask=mask)
    scale, first, dot, projected = _backward_heads(
        dv, qkv, c, s, col_scale, bias, b, g, block_scale, scale, first, dot, none, rows, row_mask, tokens,
        QUERIES + KEYS, KEYS, TOTAL, False, HALF, RANK, FP8, BM, STAGES,
    )  # fmt: skip
    if b is not None:
        tl.store(u + at + 2 * RANK, projected.to(u.dtype.element_ty), mask=mask)
    tl.store(dot_out + rows, dot, mask=row_mask)
    if FP8:
        tl.store(g_scale + rows, scale, mask=row_mask)
        settle(
            g,
            block_scale,
            first,
            scale,
            rows,
            row_mask,
            tokens,
            TOTAL * 2 * HALF,
            TOTAL * 2 * HALF,
            2 * HALF,
            TOTAL,
        )


def rope(
    raw: Tensor, heads: Heads, cos: Tensor, sin: Tensor, row_scale: Tensor | None, bias: Tensor | None,
    t: Tensor | None, b: Tensor | None,
) -> Tensor:  # fmt: skip
    """See rope.rope."""
    tile = TILES["rope"]
    tokens = raw.shape[0]
    _rope[(heads.total, triton.cdiv(tokens, tile.rows))](
        raw, cos, sin, row_scale, bias, t, b, tokens,
        QUERIES=heads.queries, KEYS=heads.keys, HALF=head_block(heads),
        RANK=16 if b is None else b.shape[1], BM=tile.rows, num_warps=tile.warps, maxnreg=tile.registers,
    )  # fmt: skip
    return raw


def rope_backward_cast(
    dq: Tensor, dk: Tensor, dv: Tensor, qkv: Tensor, heads: Heads, cos: Tensor, sin: Tensor, fp8: bool,
    col_scale: Tensor | None, bias: Tensor | None, b: Tensor | None,
) -> RopeGradient:  # fmt: skip
    """See rope.rope_backward_cast."""
    tile = TILES["rope_backward_cast"]
    tokens = qkv.shape[0]
    g = torch.empty_like(qkv, dtype=FP8 if fp8 else qkv.dtype)
    dot = qkv.new_empty(tokens, dtype=torch.float32)
    g_scale = torch.empty_like(dot) if fp8 else None
    blocks = dot.new_empty(heads.total if fp8 else 0, tokens)
    u = None if b is None else qkv.new_empty(tokens, 3 * b.shape[1])
    _rope_backward_cast[(triton.cdiv(tokens, tile.rows),)](
        dq, dk, dv, qkv, cos, sin, col_scale, bias, b, g, g_scale, u, dot, blocks, tokens,
        QUERIES=heads.queries, KEYS=heads.keys, HALF=head_block(heads),
        RANK=16 if b is None else b.shape[1], FP8=fp8, BM=tile.rows, STAGES=tile.stages,
        num_warps=tile.warps, maxnreg=tile.registers,
    )  # fmt: skip
    return RopeGradient(Rows(g, g_scale), u, dot)
