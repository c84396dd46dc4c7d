"""Triton kernels of swiglu.py: a program takes BM rows and streams over gate and up side by side."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from swiftkit.engine.kernels.rows import FP8, Rows
from swiftkit.engine.kernels.rows_triton import grow, inverse, low_rank_tile, settle, sigmoid, to_bf16
from swiftkit.engine.kernels.swiglu import SwigluGradient
from swiftkit.engine.kernels.tiles import tile_of, tiled


@triton.jit
def _output(raw, columns, of_row, t_tile, b, ranks, RANK: tl.constexpr):
    """A tile of a linear's output: the base product with its rows' scale and its adapter."""
    value = raw.to(tl.float32)
    if of_row is not None:
        value = value * of_row
    if b is not None:
        b_tile = low_rank_tile(b, columns, ranks, RANK, 1, RANK)
        value = tl.dot(t_tile, tl.trans(b_tile), value)
    return value


@triton.jit
def _low_rank_rows(t, rows, ranks, mask, PART: tl.constexpr, RANK: tl.constexpr):
    """A tile of the narrow side of gate's adapter (PART 0) or up's (1); None where there is none."""
    tile = None
    if t is not None:
        tile = tl.load(t + rows[:, None] * (2 * RANK) + PART * RANK + ranks[None, :], mask=mask, other=0.0)
    return tile


@triton.jit
def _store_low_rank(out, of_gate, of_up, rows, ranks, mask, RANK: tl.constexpr):
    """What `_low_rank_rows` reads, both parts."""
    at = out + rows[:, None] * (2 * RANK) + ranks[None, :]
    tl.store(at, of_gate.to(out.dtype.element_ty), mask=mask)
    tl.store(at + RANK, of_up.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _add_low_rank(d, u_tile, a, columns, ranks, WIDTH: tl.constexpr, RANK: tl.constexpr):
    """A tile of the gradient with the part of down's adapter."""
    if a is not None:
        a_tile = low_rank_tile(a, columns, ranks, 1, WIDTH, RANK)
        d = tl.dot(u_tile, tl.trans(a_tile), d)
    return d


@triton.jit
def _scale_of_rows(row_scale, rows, row_mask):
    """[BM, 1], or None where every scale is one."""
    of_row = None
    if row_scale is not None:
        of_row = tl.load(row_scale + rows, mask=row_mask, other=0.0)[:, None]
    return of_row


@triton.jit
def _store_cast(g, at, d_gate, d_up, gate_scale, up_scale, scale, first, is_first, mask, INTER: tl.constexpr):
    """Cast a tile of both gradients with their channels' scales; the running scales of the rows."""
    d_gate = d_gate * gate_scale[None, :]
    d_up = d_up * up_scale[None, :]
    amax = tl.max(tl.maximum(tl.abs(d_gate), tl.abs(d_up)), axis=1)
    scale = grow(scale, amax, is_first)
    first = tl.where(is_first, scale, first)
    of_scale = inverse(scale)[:, None]
    tl.store(g + at, (d_gate * of_scale).to(g.dtype.element_ty), mask=mask)
    tl.store(g + at + INTER, (d_up * of_scale).to(g.dtype.element_ty), mask=mask)
    return scale, first


@triton.jit
def _swiglu_cast(
    raw, row_scale, t, b, a, h, h_scale, t_out, block_scale, tokens,
    INTER: tl.constexpr, STRIDE: tl.constexpr, RANK: tl.constexpr, RANK_OUT: tl.constexpr, FP8: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BM
    rows = row + tl.arange(0, BM)
    row_mask = rows < tokens
    mask = row_mask[:, None]
    base = rows.to(tl.int64)[:, None] * STRIDE
    ranks = tl.arange(0, RANK)
    ranks_out = tl.arange(0, RANK_OUT)
    projected = tl.zeros([BM, RANK_OUT], tl.float32)
    scale = tl.zeros([BM], tl.float32)
    first = tl.zeros([BM], tl.float32)
    of_row = _scale_of_rows(row_scale, rows, row_mask)
    t_gate = _low_rank_rows(t, rows, ranks, mask, 0, RANK)
    t_up = _low_rank_rows(t, rows, ranks, mask, 1, RANK)
    for start in tl.range(0, INTER, BN, num_stages=STAGES):
        columns = start + tl.arange(0, BN)
        gate = _output(raw.load([row, start]), columns, of_row, t_gate, b, ranks, RANK)
        up = _output(raw.load([row, INTER + start]), columns + INTER, of_row, t_up, b, ranks, RANK)
        value = gate * sigmoid(gate) * up
        at = base + columns[None, :]
        if FP8:
            scale = grow(scale, tl.max(tl.abs(value), axis=1), start == 0)
            first = tl.where(start == 0, scale, first)
            tl.store(block_scale + (start // BN) * tokens + rows, scale, mask=row_mask)
            tl.store(h + at, (value * inverse(scale)[:, None]).to(h.dtype.element_ty), mask=mask)
        else:
            tl.store(h + at, to_bf16(value), mask=mask)
        if a is not None:
            a_tile = low_rank_tile(a, columns, ranks_out, 1, INTER, RANK_OUT)
            projected = tl.dot(to_bf16(value), a_tile, projected)
    if a is not None:
        at_t = t_out + rows[:, None] * RANK_OUT + ranks_out[None, :]
        tl.store(at_t, projected.to(t_out.dtype.element_ty), mask=mask)
    if FP8:
        tl.store(h_scale + rows, scale, mask=row_mask)
        settle(h, block_scale, first, scale, rows, row_mask, tokens, STRIDE, INTER, BN, INTER // BN)


@triton.jit
def _swiglu_backward_cast(
    dh, u, a, raw, row_scale, col_scale, t, b,
    g, g_scale, u_out, dot_out, h, block_scale, tokens,
    INTER: tl.constexpr, RANK_DOWN: tl.constexpr, RANK: tl.constexpr, FP8: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BM
    rows = row + tl.arange(0, BM)
    row_mask = rows < tokens
    mask = row_mask[:, None]
    base = rows.to(tl.int64)[:, None] * INTER
    ranks = tl.arange(0, RANK)
    ranks_down = tl.arange(0, RANK_DOWN)
    u_gate = tl.zeros([BM, RANK], tl.float32)
    u_up = tl.zeros([BM, RANK], tl.float32)
    dot = tl.zeros([BM], tl.float32)
    scale = tl.zeros([BM], tl.float32)
    first = tl.zeros([BM], tl.float32)
    of_row = _scale_of_rows(row_scale, rows, row_mask)
    t_gate = _low_rank_rows(t, rows, ranks, mask, 0, RANK)
    t_up = _low_rank_rows(t, rows, ranks, mask, 1, RANK)
    u_tile = None
    if u is not None:
        u_tile = tl.load(u + rows[:, None] * RANK_DOWN + ranks_down[None, :], mask=mask, other=0.0)
    for start in tl.range(0, INTER, BN, num_stages=STAGES):
        columns = start + tl.arange(0, BN)
        at = base + columns[None, :]
        at2 = base * 2 + columns[None, :]
        d = dh.load([row, start]).to(tl.float32)
        d = _add_low_rank(d, u_tile, a, columns, ranks_down, INTER, RANK_DOWN)
        gate = _output(raw.load([row, start]), columns, of_row, t_gate, b, ranks, RANK)
        up = _output(raw.load([row, INTER + start]), columns + INTER, of_row, t_up, b, ranks, RANK)
        slope = sigmoid(gate)
        silu = gate * slope
        d_gate = d * up * (slope + silu * (1 - slope))
        d_up = d * silu
        dot += tl.sum(d_gate * gate + d_up * up, axis=1)
        if h is not None:
            tl.store(h + at, to_bf16(silu * up), mask=mask)
        if b is not None:
            b_gate = low_rank_tile(b, columns, ranks, RANK, 1, RANK)
            b_up = low_rank_tile(b, columns + INTER, ranks, RANK, 1, RANK)
            u_gate = tl.dot(to_bf16(d_gate), b_gate, u_gate)
            u_up = tl.dot(to_bf16(d_up), b_up, u_up)
        if FP8:
            of_gate, of_up = tl.load(col_scale + columns), tl.load(col_scale + columns + INTER)
            scale, first = _store_cast(
                g, at2, d_gate, d_up, of_gate, of_up, scale, first, start == 0, mask, INTER
            )
            tl.store(block_scale + (start // BN) * tokens + rows, scale, mask=row_mask)
        else:
            tl.store(g + at2, to_bf16(d_gate), mask=mask)
            tl.store(g + at2 + INTER, to_bf16(d_up), mask=mask)
    tl.store(dot_out + rows, dot, mask=row_mask)
    if b is not None:
        _store_low_rank(u_out, u_gate, u_up, rows, ranks, mask, RANK)
    if FP8:
        tl.store(g_scale + rows, scale, mask=row_mask)
        settle(g, block_scale, first, scale, rows, row_mask, tokens, 2 * INTER, 2 * INTER, BN, INTER // BN)


def swiglu_cast(
    raw: Tensor, row_scale: Tensor | None, fp8: bool, t: Tensor | None, b: Tensor | None,
    a: Tensor | None, room: int,
) -> tuple[Rows, Tensor | None]:  # fmt: skip
    """See swiglu.swiglu_cast."""
    tokens, inter = raw.shape[0], raw.shape[1] // 2
    tile = tile_of("swiglu_cast", inter)
    h = raw.new_empty(tokens, inter + room, dtype=FP8 if fp8 else raw.dtype)
    h_scale = raw.new_empty(tokens, dtype=torch.float32) if fp8 else None
    blocks = raw.new_empty(inter // tile.columns if fp8 else 0, tokens, dtype=torch.float32)
    projected = None if a is None else raw.new_empty(tokens, a.shape[0])
    _swiglu_cast[(triton.cdiv(tokens, tile.rows),)](
        tiled(raw, tile), row_scale, t, b, a, h, h_scale, projected, blocks, tokens,
        INTER=inter, STRIDE=inter + room, RANK=16 if b is None else b.shape[1],
        RANK_OUT=16 if a is None else a.shape[0],
        FP8=fp8, BM=tile.rows, BN=tile.columns, STAGES=tile.stages,
        num_warps=tile.warps, maxnreg=tile.registers,
    )  # fmt: skip
    return Rows(h, h_scale), projected


def swiglu_backward_cast(
    dh: Tensor, u: Tensor | None, a: Tensor | None, raw: Tensor, row_scale: Tensor | None,
    col_scale: Tensor | None, t: Tensor | None, b: Tensor | None, fp8: bool, wants_h: bool,
) -> SwigluGradient:  # fmt: skip
    """See swiglu.swiglu_backward_cast."""
    tokens, inter = dh.shape
    tile = tile_of("swiglu_backward_cast", inter)
    g = torch.empty_like(raw, dtype=FP8 if fp8 else raw.dtype)
    dot = raw.new_empty(tokens, dtype=torch.float32)
    g_scale = torch.empty_like(dot) if fp8 else None
    blocks = dot.new_empty(inter // tile.columns if fp8 else 0, tokens)
    h = torch.empty_like(dh) if wants_h else None
    projected = None if b is None else raw.new_empty(tokens, 2 * b.shape[1])
    _swiglu_backward_cast[(triton.cdiv(tokens, tile.rows),)](
        tiled(dh, tile), u, a, tiled(raw, tile), row_scale, col_scale, t, b,
        g, g_scale, projected, dot, h, blocks, tokens,
        INTER=inter, RANK_DOWN=16 if a is None else a.shape[0], RANK=16 if b is None else b.shape[1],
        FP8=fp8, BM=tile.rows, BN=tile.columns, STAGES=tile.stages,
        num_warps=tile.warps, maxnreg=tile.registers,
    )  # fmt: skip
    return SwigluGradient(Rows(g, g_scale), projected, dot, h)
