"""AutoAWQ's GEMM format, 4 bits.

Source: autoawq's `WQLinear_GEMM`: eight output channels share a word, in an order that its kernel unpacks
with few instructions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from swiftkit.formats.codes import Codes, pack, unpack

BITS = (4,)
PER_WORD = 8
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which channel stands at each place of a word, lowest bits first
SCALES = torch.float16


def pack_linear(codes: Codes) -> dict[str, Tensor]:
    """The tensors of one linear layer by the last part of their names.

    Returns:
        qweight int32 [in, out / 8], qzeros int32 [groups, out / 8], scales float16 [groups, out].
    """
    return {
        "qweight": pack(_ordered(codes.values.T, ORDER), codes.bits),
        "qzeros": pack(_ordered(codes.zeros.T, ORDER), codes.bits),
        "scales": codes.scales.T.contiguous().to(SCALES),
    }


def unpack_linear(tensors: Mapping[str, Tensor]) -> Codes:
    """The reverse of `pack_linear`."""
    back = tuple(ORDER.index(place) for place in range(PER_WORD))
    values = _ordered(unpack(tensors["qweight"], BITS[0]), back).T.contiguous()
    zeros = _ordered(unpack(tensors["qzeros"], BITS[0]), back).T.contiguous()
    scales = tensors["scales"].T.contiguous()
    return Codes(values, scales, zeros, BITS[0], values.shape[1] // scales.shape[1])


def _ordered(values: Tensor, order: tuple[int, ...]) -> Tensor:
    """Each eight of the last dimension, in another order."""
    return values.reshape(*values.shape[:-1], -1, PER_WORD)[..., list(order)].flatten(-2)


def shape_faults(rows: int, width: int, *, bits: int) -> list[str]:
    """Why a matrix [rows, width] cannot be packed; empty where it can."""
    return [f"its {rows} rows are no multiple of {PER_WORD}"] if rows % PER_WORD else []


def quantization_config(*, bits: int, group_size: int, symmetric: bool) -> dict[str, Any]:
    """What stands in config.json as `quantization_config`."""
    return {
        "quant_method": "awq",
        "version": "gemm",
        "bits": bits,
        "group_size": group_size,
        "zero_point": not symmetric,
        "modules_to_not_convert": ["lm_head"],
    }


def quantize_config(*, bits: int, group_size: int, symmetric: bool) -> dict[str, Any]:
    """What stands in quantize_config.json, under autoawq's names."""
    return {
        "zero_point": not symmetric,
        "q_group_size": group_size,
        "w_bit": bits,
        "version": "GEMM",
        "modules_to_not_convert": ["lm_head"],
    }
