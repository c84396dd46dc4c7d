"""NF4 (4-bit NormalFloat, https://arxiv.org/abs/2305.14314) in bitsandbytes' layout.

The weight is read row by row in blocks of 64; each block has its largest magnitude as an fp32 scale, each
value is the nearest of 16 codes, two codes a byte, the first in the high half.
"""

from __future__ import annotations

import torch
from torch import Tensor

from swiftkit.engine.kernels.rows import FP8, FP8_MAX, Rows, runs_triton, with_room

BLOCK = 64
CODES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight in NF4.

    Args:
        weight: [out, in], in a multiple of 64.

    Returns:
        packed: [out * in / 2, 1] uint8.
        absmax: [out * in / 64] fp32.
    """
    blocks = weight.float().reshape(-1, BLOCK)
    absmax = blocks.abs().amax(1)
    codes = torch.tensor(CODES, device=weight.device)
    middles = (codes[1:] + codes[:-1]) / 2
    inverse = torch.where(absmax > 0, 1 / absmax, torch.zeros_like(absmax))
    index = torch.bucketize(blocks * inverse[:, None], middles).to(torch.uint8).view(-1, 2)
    return (index[:, :1] << 4) | index[:, 1:], absmax


def dequantize(packed: Tensor, absmax: Tensor, *, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """The weight [out, in] in `dtype`.

    Args:
        packed, absmax: as `quantize` gave them.
        shape: (out, in).
        dtype: of the result.
    """
    if runs_triton(packed):
        from swiftkit.engine.kernels import nf4_triton

        return nf4_triton.dequantize(packed, absmax, shape=shape, dtype=dtype)
    return dequantize_reference(packed, absmax, shape=shape, dtype=dtype)


def dequantize_reference(
    packed: Tensor, absmax: Tensor, *, shape: tuple[int, int], dtype: torch.dtype
) -> Tensor:
    """See `dequantize`."""
    index = torch.cat([packed >> 4, packed & 15], 1).view(-1, BLOCK)
    codes = torch.tensor(CODES, device=packed.device)
    return (codes[index.int()] * absmax[:, None]).to(dtype).view(shape)


def dequantize_to_fp8(
    packed: Tensor, absmax: Tensor, scale: Tensor, *, shape: tuple[int, int], transposed: bool, room: int = 0
) -> Tensor:
    """The weight divided by its channels' scales, as FP8.

    Args:
        packed, absmax: as `quantize` gave them.
        scale: [out] fp32, powers of two.
        shape: (out, in).
        transposed: whether the result is [in, out] instead of [out, in], contiguous.
        room: columns behind each row that are left for those of `outliers`.
    """
    if runs_triton(packed):
        from swiftkit.engine.kernels import nf4_triton

        return nf4_triton.dequantize_to_fp8(
            packed, absmax, scale, shape=shape, transposed=transposed, room=room
        )
    dense = dequantize_reference(packed, absmax, shape=shape, dtype=torch.float32) / scale[:, None]
    data = dense.clamp(-FP8_MAX, FP8_MAX).to(FP8)
    data = data.T.contiguous() if transposed else data
    return with_room(Rows(data, None), room).data
