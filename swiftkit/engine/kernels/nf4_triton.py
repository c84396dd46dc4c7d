"""Triton kernel of nf4.py: a program takes a tile of the weight, and transposes it on the way if asked to."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from swiftkit.engine.kernels.nf4 import CODES
from swiftkit.engine.kernels.rows import FP8
from swiftkit.engine.kernels.rows_triton import inverse

ROWS, COLUMNS = 64, 128


@triton.jit
def _dequantize(
    packed, absmax, codes, scale, out, rows_total,
    WIDTH: tl.constexpr, STRIDE: tl.constexpr, TRANSPOSED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    row_mask = rows < rows_total
    pairs = tl.program_id(1) * (BN // 2) + tl.arange(0, BN // 2)
    mask = row_mask[:, None] & (pairs[None, :] < WIDTH // 2)
    wide = rows.to(tl.int64)[:, None]
    byte = tl.load(packed + wide * (WIDTH // 2) + pairs[None, :], mask=mask, other=0).to(tl.int32)
    size = tl.load(absmax + wide * (WIDTH // 64) + pairs[None, :] // 32, mask=mask, other=0.0)
    if scale is not None:
        size = size * inverse(tl.load(scale + rows, mask=row_mask, other=1.0))[:, None]
    tile = tl.interleave(tl.load(codes + (byte >> 4)) * size, tl.load(codes + (byte & 15)) * size)
    tile = tile.to(out.dtype.element_ty)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    mask = row_mask[:, None] & (columns[None, :] < WIDTH)
    if TRANSPOSED:
        at = out + columns.to(tl.int64)[:, None] * rows_total + rows[None, :]
        tl.store(at, tl.trans(tile), mask=tl.trans(mask))
    else:
        tl.store(out + wide * STRIDE + columns[None, :], tile, mask=mask)


_TABLES: dict[torch.device, Tensor] = {}


def _launch(packed: Tensor, absmax: Tensor, scale: Tensor | None, out: Tensor, shape: tuple[int, int],
            transposed: bool) -> Tensor:  # fmt: skip
    rows, width = shape
    if packed.device not in _TABLES:
        _TABLES[packed.device] = torch.tensor(CODES, device=packed.device)
    _dequantize[(triton.cdiv(rows, ROWS), triton.cdiv(width, COLUMNS))](
        packed, absmax, _TABLES[packed.device], scale, out, rows,
        WIDTH=width, STRIDE=out.stride(0), TRANSPOSED=transposed, BM=ROWS, BN=COLUMNS, num_warps=4,
    )  # fmt: skip
    return out


def dequantize(packed: Tensor, absmax: Tensor, *, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """See nf4.dequantize."""
    out = torch.empty(shape, dtype=dtype, device=packed.device)
    return _launch(packed, absmax, None, out, shape, False)


def dequantize_to_fp8(
    packed: Tensor, absmax: Tensor, scale: Tensor, *, shape: tuple[int, int], transposed: bool, room: int
) -> Tensor:
    """See nf4.dequantize_to_fp8."""
    rows, width = shape[::-1] if transposed else shape
    out = torch.empty(rows, width + room, dtype=FP8, device=packed.device)
    return _launch(packed, absmax, scale, out, shape, transposed)
