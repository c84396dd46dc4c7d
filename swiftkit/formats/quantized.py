"""A quantized model's folder read back: every packed matrix as the plain one that it stands for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from swiftkit.errors import UserError
from swiftkit.formats import awq, compressed, gptq
from swiftkit.formats.shards import Stored, shards, write_shards
from swiftkit.formats.weights import Weights

PACKED = ("qweight", "qzeros", "scales", "g_idx", "weight_packed", "weight_scale", "weight_shape")
SHARD = 5 * 10**9


def matrix(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Tensor:
    """The matrix [out, in] of one linear layer, in float32.

    Args:
        config: the `quantization_config` of its model.
        tensors: of the layer, by the last part of their names.

    Raises:
        UserError: a format that is not known here.
    """
    method = config.get("quant_method")
    if method == "gptq":
        version = 2 if config.get("checkpoint_format") == "gptq_v2" else 1
        return gptq.unpack_linear(tensors, bits=config["bits"], version=version).dequantize()
    if method == "awq":
        return awq.unpack_linear(tensors).dequantize()
    if method == "compressed-tensors" and config.get("format") == "pack-quantized":
        bits = config["config_groups"]["group_0"]["weights"]["num_bits"]
        return compressed.unpack_linear(tensors, bits=bits).dequantize()
    if method == "compressed-tensors" and config.get("format") == "float-quantized":
        return tensors["weight"].float() * tensors["weight_scale"].float()
    raise UserError(f"weights quantized as {method} ({config.get('format')}) are not read here")


def dequantized_copy(folder: Path, out: Path) -> None:
    """Write a plain float32 model with the weights that a quantized one stands for.

    Inputs are not quantized in it: of an FP8 model it is the weights alone.

    Raises:
        UserError: the folder is not quantized, or in a format that is not known here.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    quantization = config.pop("quantization_config", None)
    if quantization is None:
        raise UserError(f"{folder} is not quantized")
    weights = Weights(folder)
    packed = {name.rpartition(".")[0] for name in weights.names() if name.rpartition(".")[2] in PACKED}
    plain = {name for name in weights.names() if name.rpartition(".")[0] not in packed}
    biases = {name for name in weights.names() if name.endswith(".bias")}

    def value(name: str) -> Tensor:
        owner, _, leaf = name.rpartition(".")
        if owner not in packed or leaf == "bias":
            return weights.read(name).float()
        names = [each for each in weights.names() if each.rpartition(".")[0] == owner]
        own = {each.rpartition(".")[2]: weights.read(each) for each in names}
        return matrix(quantization, own)

    def pieces(tensor: Stored) -> Iterator[Tensor]:
        yield value(tensor.name).contiguous()

    names = sorted({f"{owner}.weight" for owner in packed} | plain | biases)
    tensors = [Stored(name, torch.float32, tuple(value(name).shape)) for name in names]
    out.mkdir(parents=True)
    write_shards(out, shards(tensors, max_bytes=SHARD), pieces)
    config["dtype"] = "float32"
    config.pop("torch_dtype", None)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for path in folder.glob("*token*"):
        shutil.copyfile(path, out / path.name)
