"""AutoGPTQ's format, versions 1 and 2.

Source: the packing of auto-gptq 0.7.1 (`QuantLinear.pack`) and of gptqmodel, whose `gptq_v2` differs from the
first in one thing: version 1 stores each zero point less one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from swiftkit.formats.codes import WORD, Codes, pack, unpack

BITS = (2, 3, 4, 8)
MULTIPLE = 32  # of both sizes of a matrix, whatever the bits: its kernels refuse others
SCALES = torch.float16
LEAST_ZERO = 1  # in version 1: readers disagree on what one of 0, stored as -1, means


def pack_linear(codes: Codes, *, version: int = 1) -> dict[str, Tensor]:
    """The tensors of one linear layer by the last part of their names.

    Returns:
        qweight int32 [in * bits / 32, out], qzeros int32 [groups, out * bits / 32], scales float16
        [groups, out], g_idx int32 [in].
    """
    assert version == 2 or int(codes.zeros.min()) >= LEAST_ZERO, "version 1 has no zero point of 0"
    zeros = codes.zeros if version == 2 else codes.zeros - 1
    width = codes.values.shape[1]
    return {
        "qweight": pack(codes.values, codes.bits).T.contiguous(),
        "qzeros": pack(zeros.T.contiguous(), codes.bits),
        "scales": codes.scales.T.contiguous().to(SCALES),
        "g_idx": torch.arange(width, dtype=torch.int32) // codes.group_size,
    }


def unpack_linear(tensors: Mapping[str, Tensor], *, bits: int, version: int = 1) -> Codes:
    """The reverse of `pack_linear`; where `g_idx` says so, with groups of columns from all over."""
    values = unpack(tensors["qweight"].T.contiguous(), bits)
    zeros = unpack(tensors["qzeros"], bits).T.contiguous()
    if version == 1:
        zeros = zeros + 1
    scales = tensors["scales"].T.contiguous()
    size = -(-values.shape[1] // scales.shape[1])
    return Codes(values, scales, zeros, bits, size).with_groups(tensors.get("g_idx"))


def shape_faults(rows: int, width: int, *, bits: int) -> list[str]:
    """Why a matrix [rows, width] cannot be packed; empty where it can."""
    return [
        f"its {size} {name} are no multiple of {MULTIPLE}"
        for size, name in ((rows, "rows"), (width, "columns"))
        if size % MULTIPLE or size * bits % WORD
    ]


def quantization_config(
    *, bits: int, group_size: int, symmetric: bool, damping: float, version: int, act_order: bool
) -> dict[str, Any]:
    """What stands in config.json as `quantization_config`, and in quantize_config.json.

    `desc_act` is false also where columns were taken by their activations: groups are static, so readers need
    no order.
    """
    return {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group_size,
        "desc_act": False,
        "static_groups": act_order,
        "sym": symmetric,
        "lm_head": False,
        "damp_percent": damping,
        "true_sequential": False,
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
        "model_file_base_name": "model",
        "model_name_or_path": "",
    }
