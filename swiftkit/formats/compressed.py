"""The format of compressed-tensors: packed symmetric whole numbers, and FP8 with a scale a channel.

Source: compressed-tensors' `pack_to_int32` and its schema of `quantization_config`; vLLM, SGLang and
transformers read it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from swiftkit.formats.codes import WORD, Codes, pack, unpack

BITS = (4, 8)
FP8 = torch.float8_e4m3fn


def pack_linear(codes: Codes) -> dict[str, Tensor]:
    """The tensors of one linear layer by the last part of their names.

    Returns:
        weight_packed int32 [out, in * bits / 32], weight_scale [out, groups], weight_shape int64 [2].
    """
    assert codes.symmetric, "packed whole numbers have no zero points"
    return {
        "weight_packed": pack(codes.values, codes.bits),
        "weight_scale": codes.scales.contiguous(),
        "weight_shape": torch.tensor(codes.values.shape, dtype=torch.int64),
    }


def unpack_linear(tensors: Mapping[str, Tensor], *, bits: int) -> Codes:
    """The reverse of `pack_linear`; where `weight_g_idx` says so, with groups of columns from all over."""
    values, scales = unpack(tensors["weight_packed"], bits), tensors["weight_scale"]
    zeros = torch.full(scales.shape, 1 << (bits - 1), dtype=torch.uint8)
    groups = tensors.get("weight_g_idx")
    known = groups if groups is not None and int(groups.min()) >= 0 else None  # -1 where nothing was ordered
    return Codes(values, scales, zeros, bits, values.shape[1] // scales.shape[1]).with_groups(known)


def shape_faults(rows: int, width: int, *, bits: int) -> list[str]:
    """Why a matrix [rows, width] cannot be packed; empty where it can."""
    per_word = WORD // bits
    return [f"its {width} columns are no multiple of {per_word}"] if width % per_word else []


def quantization_config(*, bits: int, group_size: int, ignore: Sequence[str]) -> dict[str, Any]:
    """What stands in config.json as `quantization_config` for packed whole numbers; -1 is a scale a row."""
    grouped = group_size > 0
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": True,
        "dynamic": False,
        "strategy": "group" if grouped else "channel",
        "group_size": group_size if grouped else None,
    }
    return _config("pack-quantized", weights, None, ignore)


def fp8_config(*, ignore: Sequence[str]) -> dict[str, Any]:
    """The same for FP8: weights have a scale a channel, inputs one a token, found as they come."""
    number = {"num_bits": 8, "type": "float", "symmetric": True}
    weights = {**number, "dynamic": False, "strategy": "channel"}
    return _config("float-quantized", weights, {**number, "dynamic": True, "strategy": "token"}, ignore)


def _config(
    form: str, weights: dict[str, Any], inputs: dict[str, Any] | None, ignore: Sequence[str]
) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {**group, "output_activations": None}},
        "ignore": list(ignore),
        "kv_cache_scheme": None,
    }
