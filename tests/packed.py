"""Quantized folders of every format, as others write them: plain rounding, columns in any order."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from swiftkit.formats import awq, compressed, gptq
from swiftkit.quantize.grid import Scheme, find_grid

GROUP = 32
SETTINGS: dict[str, Callable[[int], dict[str, Any]]] = {
    "gptq": lambda bits: gptq.quantization_config(
        bits=bits, group_size=GROUP, symmetric=True, damping=0.05, version=1, act_order=False
    ),
    "gptq_v2": lambda bits: gptq.quantization_config(
        bits=bits, group_size=GROUP, symmetric=False, damping=0.05, version=2, act_order=False
    ),
    "awq": lambda bits: awq.quantization_config(bits=bits, group_size=GROUP, symmetric=False),
    "compressed-tensors": lambda bits: compressed.quantization_config(
        bits=bits, group_size=GROUP, ignore=["lm_head"]
    ),
}


def pack_folder(
    base: Path, out: Path, form: str, bits: int, *, ordered: bool = True, seed: int = 0,
    leave: tuple[str, ...] = (),
) -> Path:  # fmt: skip
    """Write a model with its decoder layers' matrices rounded and packed.

    Args:
        base: a plain model's folder.
        form, bits: as `SETTINGS` has them.
        ordered: whether groups are made of columns from all over, where the format can tell of it.
        seed: of that order, another one in each layer.
        leave: ends of the names of layers that stay as they are.
    """
    shutil.copytree(base, out)
    generator = torch.Generator().manual_seed(seed)
    settings = SETTINGS[form](bits)
    scheme = Scheme(bits, GROUP, form in ("gptq", "compressed-tensors"))
    tensors = load_file(out / "model.safetensors")
    for name in sorted(tensors):
        owner = name.removesuffix(".weight")
        if ".layers." not in name or tensors[name].dim() != 2 or owner.endswith(leave or "?"):
            continue
        weight = tensors.pop(name).float()
        width = weight.shape[1]
        order = torch.randperm(width, generator=generator)  # columns, by the groups that they make
        order = order if ordered and form != "awq" else torch.arange(width)
        sorted_columns = weight[:, order]
        codes = find_grid(sorted_columns, scheme).round(sorted_columns)
        values, groups = torch.empty_like(codes.values), torch.empty(width, dtype=torch.int32)
        values[:, order] = codes.values
        groups[order] = torch.arange(width, dtype=torch.int32) // GROUP
        codes = replace(codes, values=values)
        if form == "awq":
            packed = awq.pack_linear(codes)
        elif form == "compressed-tensors":
            packed = {**compressed.pack_linear(codes), "weight_g_idx": groups}
        else:
            packed = {**gptq.pack_linear(codes, version=2 if form == "gptq_v2" else 1), "g_idx": groups}
        tensors |= {f"{owner}.{leaf}": tensor.contiguous() for leaf, tensor in packed.items()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    path = out / "config.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**content, "quantization_config": settings}), encoding="utf-8")
    return out
