"""The base of a merge: the original weights, or those that an FP8 or NF4 training really held."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from swiftkit.engine.build import skeleton
from swiftkit.engine.fused.base import BaseKind, kind_of
from swiftkit.engine.kernels.nf4 import BLOCK, dequantize, dequantize_to_fp8, quantize
from swiftkit.engine.kernels.rows import FP8, cast_weight, power_of_two_scale
from swiftkit.engine.placement import place
from swiftkit.support import PACKED


@dataclass(frozen=True)
class TrainingBase:
    """How the frozen weights stood in memory while the adapter was trained.

    Args:
        precision: fp32, bf16, fp8, nf4, or int8 to int3.
        storage: of the linear layers in the blocks.
        dtype: of everything else, and of what was quantized.
    """

    precision: str
    storage: BaseKind
    dtype: torch.dtype

    @property
    def quantized(self) -> bool:
        """Whether the weights lost something on their way into memory; those of a quantized folder do not."""
        return self.storage not in ("plain", "int")


def training_base(args: Mapping[str, Any]) -> TrainingBase | None:
    """What the `args.json` of a run says about its base; None for an adapter that is not of a run."""
    config: Mapping[str, Any] = args.get("config", {})
    precision = config.get("base_precision")
    if precision not in ("fp32", "bf16", "fp8", "nf4", *PACKED):
        return None
    on_gpu = not str(args.get("machine", {}).get("device", "CPU")).startswith("CPU")
    storage = (
        "int" if precision in PACKED else place("cpu", precision, config.get("nf4_compute", "bf16")).base
    )
    is_bf16 = precision == "bf16" or (precision != "fp32" and on_gpu)
    return TrainingBase(precision, storage, torch.bfloat16 if is_bf16 else torch.float32)


class Held:
    """Weights as the training base held them.

    The few input channels that an FP8 product carries to twice its precision are chosen when a model is
    built, from rows that go through it; their columns are taken in FP8 like the others.

    Args:
        base: of the training.
        linears: names of the linear layers that it stored in its own way.
        layers: decoder layers of the model.
    """

    def __init__(self, base: TrainingBase, linears: frozenset[str], layers: int):
        self.base = base
        self._linears, self._layers = linears, layers

    def __call__(self, name: str, weight: Tensor) -> Tensor:
        """The values in float32 of rows of the parameter `name`, [rows, ...], given as the file has them."""
        owner, _, leaf = name.rpartition(".")
        is_linear = leaf == "weight" and owner in self._linears
        kind = kind_of(owner, self.base.storage, self._layers) if is_linear else "plain"
        return dequantized(weight.to(self.base.dtype), kind)


def dequantized(weight: Tensor, kind: BaseKind) -> Tensor:
    """What the forward product over this storage multiplies with, [rows, in] in float32.

    Each row is quantized by itself, so some rows give what the whole matrix would.

    Args:
        weight: [rows, in], in the type that the training computed in.
        kind: of the storage.
    """
    if kind in ("plain", "fp8-backward"):  # the latter's forward product reads the weight as it is
        return weight.float()
    if kind == "fp8":
        data, scale = cast_weight(weight)
        return data.view(FP8).float() * scale[:, None]
    packed, absmax = quantize(weight)
    rows, width = weight.shape
    if kind == "nf4":
        return dequantize(packed, absmax, shape=(rows, width), dtype=weight.dtype).float()
    scale = power_of_two_scale(absmax.view(rows, width // BLOCK).amax(1))
    data = dequantize_to_fp8(packed, absmax, scale, shape=(rows, width), transposed=False)
    return data.view(FP8).float() * scale[:, None]


def held_of(trained: TrainingBase | None, description: Any) -> Held | None:
    """The weights of a quantized training; None where nothing was quantized, or nobody knows.

    Args:
        trained: as `training_base` gives it.
        description: the base's transformers config.
    """
    if trained is None or not trained.quantized:
        return None
    linears = stored_linears(skeleton(description))
    return Held(trained, linears, description.num_hidden_layers)


def stored_linears(model: nn.Module) -> frozenset[str]:
    """Names of the linear layers that a quantized base quantizes: all but the output head."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    return frozenset(
        name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head
    )
