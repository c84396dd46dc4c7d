"""Triton kernels of outliers.py: a program takes BM rows, and all their carried channels at once."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from swiftkit.engine.kernels.rows import Rows
from swiftkit.engine.kernels.rows_triton import low_rank_tile, sigmoid

ROWS = 32


@triton.jit
def _write(x, x_scale, value, channel, k, rows, row_mask, mask, STRIDE: tl.constexpr, COUNT: tl.constexpr):
    """See outliers._write."""
    at = x + rows.to(tl.int64)[:, None] * STRIDE
    high = tl.load(at + channel[None, :], mask=mask, other=0.0)
    scale = tl.load(x_scale + rows, mask=row_mask, other=1.0)
    low = value / scale[:, None] - high.to(tl.float32)
    low = tl.minimum(tl.maximum(low, -448.0), 448.0)
    behind = at + STRIDE - 2 * COUNT + k[None, :]
    tl.store(behind, low.to(x.dtype.element_ty), mask=mask)
    tl.store(behind + COUNT, high, mask=mask)


@triton.jit
def _carry(
    x, x_scale, exact, channels, weight, rstd, tokens,
    WIDTH: tl.constexpr, STRIDE: tl.constexpr, COUNT: tl.constexpr, TILE: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    row_mask = rows < tokens
    k = tl.arange(0, TILE)
    channel = tl.load(channels + k, mask=k < COUNT, other=0)
    mask = row_mask[:, None] & (k < COUNT)[None, :]
    at = exact + rows.to(tl.int64)[:, None] * WIDTH + channel[None, :]
    value = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    if weight is not None:
        value = value * tl.load(weight + channel).to(tl.float32)[None, :]
        value = value * tl.load(rstd + rows, mask=row_mask, other=0.0)[:, None]
    _write(x, x_scale, value, channel, k, rows, row_mask, mask, STRIDE, COUNT)


@triton.jit
def _carry_swiglu(
    h, h_scale, raw, channels, t, b, tokens,
    INTER: tl.constexpr, RANK: tl.constexpr, STRIDE: tl.constexpr, COUNT: tl.constexpr, TILE: tl.constexpr,
    BM: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    row_mask = rows < tokens
    k = tl.arange(0, TILE)
    channel = tl.load(channels + k, mask=k < COUNT, other=0)
    mask = row_mask[:, None] & (k < COUNT)[None, :]
    at = raw + rows.to(tl.int64)[:, None] * (2 * INTER) + channel[None, :]
    gate = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(at + INTER, mask=mask, other=0.0).to(tl.float32)
    if t is not None:
        ranks = tl.arange(0, RANK)
        at_t = t + rows[:, None] * (2 * RANK) + ranks[None, :]
        t_gate = tl.load(at_t, mask=row_mask[:, None], other=0.0)
        t_up = tl.load(at_t + RANK, mask=row_mask[:, None], other=0.0)
        b_gate = low_rank_tile(b, channel, ranks, RANK, 1, RANK)
        b_up = low_rank_tile(b, channel + INTER, ranks, RANK, 1, RANK)
        gate = tl.dot(t_gate, tl.trans(b_gate), gate)
        up = tl.dot(t_up, tl.trans(b_up), up)
    value = gate * sigmoid(gate) * up
    _write(h, h_scale, value, channel, k, rows, row_mask, mask, STRIDE, COUNT)


def carry(x: Rows, exact: Tensor, channels: Tensor, weight: Tensor | None, rstd: Tensor | None) -> None:
    """See outliers.carry."""
    tokens, count = exact.shape[0], channels.shape[0]
    _carry[(triton.cdiv(tokens, ROWS),)](
        x.data, x.scale, exact, channels, weight, rstd, tokens,
        WIDTH=exact.shape[1], STRIDE=x.data.shape[1], COUNT=count, TILE=_tile(count), BM=ROWS, num_warps=4,
    )  # fmt: skip


def carry_swiglu(h: Rows, raw: Tensor, channels: Tensor, t: Tensor | None, b: Tensor | None) -> None:
    """See outliers.carry_swiglu."""
    tokens, count = raw.shape[0], channels.shape[0]
    _carry_swiglu[(triton.cdiv(tokens, ROWS),)](
        h.data, h.scale, raw, channels, t, b, tokens,
        INTER=raw.shape[1] // 2, RANK=16 if b is None else b.shape[1], STRIDE=h.data.shape[1], COUNT=count,
        TILE=_tile(count), BM=ROWS, num_warps=4,
    )  # fmt: skip


def _tile(count: int) -> int:
    """Channels of a tile: a power of two that products take."""
    return max(16, triton.next_power_of_2(count))
