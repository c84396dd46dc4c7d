"""What a quantized model's config.json says of its weights, and which of it can be trained over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from swiftkit.errors import UserError
from swiftkit.formats import awq, compressed, gptq
from swiftkit.formats.codes import WORD, Codes

NOT_CONVERTED = "give the model in bf16 or fp32 instead"
TRAINED_BITS = (3, 4, 8)


@dataclass(frozen=True)
class Packing:
    """The format of a folder's packed linear layers.

    Args:
        form: gptq, gptq_v2, awq or compressed-tensors.
        bits: of a weight.
        group_size: columns that share a scale; -1 is a whole row.
        symmetric: whether the config promises that there are no zero points.
    """

    form: str
    bits: int
    group_size: int
    symmetric: bool

    @property
    def precision(self) -> str:
        """Its name among those of `--base_precision`."""
        return f"int{self.bits}"

    def __str__(self) -> str:
        group = "a scale a row" if self.group_size == -1 else f"group {self.group_size}"
        return f"{self.form} {self.precision}, {group}, {'' if self.symmetric else 'a'}symmetric"

    @property
    def packed(self) -> str:
        """The last part of the name of a packed matrix."""
        return "weight_packed" if self.form == "compressed-tensors" else "qweight"

    def shape(self, packed: tuple[int, ...]) -> tuple[int, int]:
        """[out, in] of a matrix whose packed tensor has this shape."""
        if self.form == "compressed-tensors":
            return packed[0], packed[1] * WORD // self.bits
        if self.form == "awq":
            return packed[1] * awq.PER_WORD, packed[0]
        return packed[1], packed[0] * WORD // self.bits

    def codes(self, tensors: Mapping[str, Tensor]) -> Codes:
        """One linear layer.

        Args:
            tensors: by the last part of their names.
        """
        if self.form == "awq":
            return awq.unpack_linear(tensors)
        if self.form == "compressed-tensors":
            return compressed.unpack_linear(tensors, bits=self.bits)
        return gptq.unpack_linear(tensors, bits=self.bits, version=2 if self.form == "gptq_v2" else 1)


def packing_of(config: Any) -> Packing | None:
    """The packing of a transformers config's model; None for one that is not quantized.

    Raises:
        UserError: weights in a form that is not read here. Under the usual names they would load, and be
            wrong, without a word.
    """
    found = getattr(config, "quantization_config", None)
    if found is None:
        return None
    return read_packing(found if isinstance(found, Mapping) else found.to_dict())


def read_packing(settings: Mapping[str, Any]) -> Packing:
    """The packing that a `quantization_config` describes; errors as of `packing_of`."""
    method = settings.get("quant_method", "in an unknown way")
    if method == "gptq":
        return _gptq(settings)
    if method == "awq":
        return _awq(settings)
    if method == "compressed-tensors":
        return _compressed(settings)
    raise _refusal(method, "only gptq, awq and compressed-tensors (pack-quantized) are read")


def _refusal(method: str, why: str) -> UserError:
    return UserError(f"the weights are quantized ({method}): {why}; {NOT_CONVERTED}")


def _gptq(settings: Mapping[str, Any]) -> Packing:
    form, bits = settings.get("checkpoint_format") or "gptq", settings.get("bits")
    if form not in ("gptq", "gptq_v2"):
        raise _refusal("gptq", f"its checkpoint_format {form} is not read, gptq and gptq_v2 are")
    if bits not in TRAINED_BITS:
        raise _refusal("gptq", f"{bits} bits are not served, 3, 4 and 8 are")
    if settings.get("dynamic"):
        raise _refusal("gptq", "settings that differ from layer to layer (dynamic) are not read")
    if settings.get("pack_dtype", "int32") not in ("int32", None):
        raise _refusal("gptq", f"words of {settings['pack_dtype']} are not read, those of int32 are")
    return Packing(form, bits, int(settings.get("group_size", 128)), bool(settings.get("sym", True)))


def _awq(settings: Mapping[str, Any]) -> Packing:
    version, bits = str(settings.get("version", "gemm")).lower(), settings.get("bits")
    if version != "gemm":
        raise _refusal("awq", f"its version {version} is not read, gemm is")
    if bits not in awq.BITS:
        raise _refusal("awq", f"{bits} bits are not served, 4 are")
    return Packing("awq", bits, int(settings.get("group_size", 128)), not settings.get("zero_point", True))


def _compressed(settings: Mapping[str, Any]) -> Packing:
    name, form = "compressed-tensors", settings.get("format")
    if form != "pack-quantized":
        raise _refusal(name, f"its format {form} is not read, pack-quantized is")
    groups = list(settings.get("config_groups", {}).values())
    if len(groups) != 1:
        raise _refusal(name, f"it has {len(groups)} config_groups, and one is read")
    weights = groups[0].get("weights") or {}
    if groups[0].get("input_activations"):
        raise _refusal(name, "its inputs are quantized too, which no training does here")
    if weights.get("type") != "int" or weights.get("num_bits") not in compressed.BITS:
        raise _refusal(
            name, f"{weights.get('type')} of {weights.get('num_bits')} bits: int of 4 or 8 is read"
        )
    if not weights.get("symmetric", True):
        raise _refusal(name, "zero points are not read in this format, symmetric weights are")
    if weights.get("strategy") not in ("group", "channel"):
        raise _refusal(name, f"scales by {weights.get('strategy')} are not read, by group or channel are")
    if settings.get("transform_config") or (settings.get("sparsity_config") or {}).get("format") not in (
        None,
        "dense",
    ):
        raise _refusal(name, "rotated or sparse weights are not read")
    return Packing(name, weights["num_bits"], int(weights.get("group_size") or -1), True)
