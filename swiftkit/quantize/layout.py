"""The formats by name: what each can hold, how it packs a matrix, and what it writes into config.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from swiftkit.errors import UserError
from swiftkit.formats import awq, compressed, gptq
from swiftkit.formats.codes import Codes
from swiftkit.quantize.grid import Scheme

Form = Literal["gptq", "gptq_v2", "awq", "compressed-tensors"]
BY_METHOD: dict[str, Form] = {
    "gptq": "gptq",
    "awq": "awq",
    "rtn": "compressed-tensors",
    "fp8": "compressed-tensors",
}
BITS = {"gptq": (3, 4, 8), "gptq_v2": (3, 4, 8), "awq": awq.BITS, "compressed-tensors": compressed.BITS}


@dataclass(frozen=True)
class Layout:
    """A format with its settings.

    Args:
        form: its name.
        method: that finds the codes.
        scheme: of every matrix; None for FP8.
        damping, act_order: of GPTQ, which its format records.
    """

    form: Form
    method: str
    scheme: Scheme | None
    damping: float
    act_order: bool

    def pack(self, codes: Codes) -> dict[str, Tensor]:
        """The tensors of one linear layer by the last part of their names; they read back as the codes."""
        if self.form == "awq":
            packed, back = awq.pack_linear(codes), awq.unpack_linear
            again = back(packed)
        elif self.form == "compressed-tensors":
            packed = compressed.pack_linear(codes)
            again = compressed.unpack_linear(packed, bits=codes.bits)
        else:
            version = 2 if self.form == "gptq_v2" else 1
            packed = gptq.pack_linear(codes, version=version)
            again = gptq.unpack_linear(packed, bits=codes.bits, version=version)
        same = torch.equal(again.values, codes.values) and torch.equal(again.zeros, codes.zeros)
        if not same or not torch.equal(again.scales, codes.scales):
            raise RuntimeError(f"a matrix {list(codes.values.shape)} does not read back as it was packed")
        return packed

    def faults(self, rows: int, width: int) -> list[str]:
        """Why a matrix [rows, width] cannot be stored; empty where it can."""
        if self.scheme is None:
            return []
        size, bits = self.scheme.group(width), self.scheme.bits
        ungrouped = [f"its {width} columns are no multiple of --group_size {size}"] if width % size else []
        checks = {"awq": awq.shape_faults, "compressed-tensors": compressed.shape_faults}
        return ungrouped + checks.get(self.form, gptq.shape_faults)(rows, width, bits=bits)

    def quantization_config(self, ignore: list[str]) -> dict[str, Any]:
        """The entry of config.json.

        Args:
            ignore: names of the linear layers that are left as they are.
        """
        scheme = self.scheme
        if scheme is None:
            return compressed.fp8_config(ignore=ignore)
        sizes = {"bits": scheme.bits, "group_size": scheme.group_size}
        if self.form == "awq":
            return awq.quantization_config(**sizes, symmetric=scheme.symmetric)
        if self.form == "compressed-tensors":
            return compressed.quantization_config(**sizes, ignore=ignore)
        return gptq.quantization_config(
            **sizes,
            symmetric=scheme.symmetric,
            damping=self.damping,
            version=2 if self.form == "gptq_v2" else 1,
            act_order=self.act_order and self.method == "gptq",
        )

    def quantize_config(self) -> dict[str, Any] | None:
        """The content of quantize_config.json; None where the format has no such file."""
        if self.scheme is None or self.form == "compressed-tensors":
            return None
        if self.form == "awq":
            scheme = self.scheme
            return awq.quantize_config(
                bits=scheme.bits, group_size=scheme.group_size, symmetric=scheme.symmetric
            )
        return self.quantization_config([])


def choose(
    *,
    method: str,
    form: str,
    bits: int | Literal["auto"],
    group_size: int,
    symmetric: bool | Literal["auto"],
    damping: float,
    act_order: bool,
    dtype: torch.dtype,
) -> Layout:
    """Settle what was left on `auto`.

    Args:
        dtype: of the model's own weights, in which compressed-tensors keeps scales.

    Raises:
        UserError: a format cannot hold what is asked for.
    """
    chosen: Any = BY_METHOD[method] if form == "auto" else form
    if method == "fp8":
        if chosen != "compressed-tensors" or bits not in ("auto", 8):
            raise UserError("--method fp8 has 8 bits and --format compressed-tensors; leave both on auto")
        return Layout(chosen, method, None, damping, act_order)
    bits = 4 if bits == "auto" else bits
    symmetric = chosen != "awq" if symmetric == "auto" else bool(symmetric)
    if bits not in BITS[chosen]:
        known = " or ".join(map(str, BITS[chosen]))
        raise UserError(f"--format {chosen} holds {known} bits, not --bits {bits}")
    if bits == 3 and method != "gptq":
        raise UserError(f"--bits 3 is for --method gptq: {method} loses too much there; take 4 or 8")
    if chosen == "compressed-tensors" and not symmetric:
        raise UserError("--format compressed-tensors has no zero points here; leave --sym on auto, or true")
    scale = dtype if chosen == "compressed-tensors" else torch.float16
    least = gptq.LEAST_ZERO if chosen == "gptq" else 0
    return Layout(chosen, method, Scheme(bits, group_size, bool(symmetric), scale, least), damping, act_order)
