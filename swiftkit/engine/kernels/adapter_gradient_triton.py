"""Triton kernel of adapter_gradient.py: a program takes BN columns of one slice of the tokens."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from swiftkit.engine.kernels.rows import FP8, SLICES, Rows
from swiftkit.engine.kernels.rows_triton import fp8_to_bf16, to_bf16
from swiftkit.engine.kernels.tiles import tile_of


@triton.jit
def _adapter_gradient(
    narrow, wide, row_scale, col_factor, col_divisor, out, tokens, factor,
    slice_stride, rank_stride, column_stride, FIRST_END, SECOND_END,
    STRIDE: tl.constexpr, RANKS: tl.constexpr, RANKS_TILE: tl.constexpr, NARROW: tl.constexpr,
    SLICES: tl.constexpr, FP8: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0) * BN
    columns = start + tl.arange(0, BN)
    ranks = tl.arange(0, RANKS_TILE)
    rank_mask = ranks < RANKS
    segment = tl.where(start >= FIRST_END, 1, 0) + tl.where(start >= SECOND_END, 1, 0)
    narrow += segment * RANKS
    per_slice = tl.cdiv(tl.cdiv(tokens, SLICES), BM) * BM
    begin = tl.program_id(1) * per_slice
    end = tl.minimum(begin + per_slice, tokens)
    total = tl.zeros([RANKS_TILE, BN], tl.float32)
    for row in tl.range(begin, end, BM, num_stages=STAGES):
        rows = row + tl.arange(0, BM)
        row_mask = rows < end
        at_small = narrow + rows[None, :] * NARROW + ranks[:, None]
        small = tl.load(at_small, mask=row_mask[None, :] & rank_mask[:, None], other=0.0)
        if row_scale is not None:
            of_row = tl.load(row_scale + rows, mask=row_mask, other=0.0)
            small = to_bf16(small.to(tl.float32) * of_row[None, :])
        at = wide + rows.to(tl.int64)[:, None] * STRIDE + columns[None, :]
        tile = tl.load(at, mask=row_mask[:, None], other=0.0)
        if FP8:
            tile = fp8_to_bf16(tile)
        total = tl.dot(small, tile, total)
    if col_factor is not None:
        total = total * tl.load(col_factor + columns).to(tl.float32)[None, :]
    if col_divisor is not None:
        total = total / tl.load(col_divisor + columns)[None, :]
    at_out = out + tl.program_id(1) * slice_stride
    at_out += ranks[:, None] * rank_stride + columns[None, :] * column_stride
    tl.store(at_out, total * factor, mask=rank_mask[:, None])


def adapter_gradient(
    narrow: Tensor, wide: Rows, out: Tensor, factor: float, col_factor: Tensor | None,
    col_divisor: Tensor | None, segments: tuple[int, ...] | None,
) -> None:  # fmt: skip
    """See adapter_gradient.adapter_gradient."""
    tokens, width = wide.data.shape
    tile = tile_of("adapter_gradient", width)
    widths = segments or (width,)
    while any(size % tile.columns for size in widths):
        tile = tile._replace(columns=tile.columns // 2)
    ranks = narrow.shape[1] // len(widths)
    ends = [sum(widths[:n]) for n in (1, 2)]
    _adapter_gradient[(width // tile.columns, SLICES)](
        narrow, wide.data, wide.scale, col_factor, col_divisor, out, tokens, factor, *out.stride(), *ends,
        STRIDE=wide.data.stride(0), RANKS=ranks, RANKS_TILE=max(16, triton.next_power_of_2(ranks)),
        NARROW=narrow.shape[1], SLICES=SLICES, FP8=wide.data.dtype == FP8,
        BM=tile.rows, BN=tile.columns, STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
