"""The frozen side of a projection: two products, forward and for the input's gradient, in three storages.

FP8 products apply both scales as they write (that costs nothing on Hopper). In the backward the channel
scales are on the summed side, so the kernel that casts a gradient multiplies it by `col_scale` first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

from swiftkit.engine.kernels.nf4 import BLOCK, dequantize, dequantize_to_fp8, quantize
from swiftkit.engine.kernels.rows import Rows, cast_weight, fp8_product, power_of_two_scale
from swiftkit.engine.kernels.transpose import transpose

BaseKind = Literal["plain", "fp8", "fp8-backward", "nf4", "nf4-fp8"]

# Attention scores amplify rounding errors of these. With every product in FP8 the loss of SmolLM2-135M on
# GSM8K is 2.8 % above that of fp32; with the forward product of q, k and v in the model's dtype, 0.2 % above.
ATTENTION_INPUTS = ("q_proj", "k_proj", "v_proj", "qkv_proj")


def kind_of(linear: str, base: BaseKind) -> BaseKind:
    """The storage of one linear layer, by the last part of its name, in a model with this base."""
    return "fp8-backward" if base == "fp8" and linear in ATTENTION_INPUTS else base


class Base(Protocol):
    """A frozen weight [out, in], possibly of several projections, one above the other.

    Attributes:
        fp8: whether its forward product reads FP8 rows.
        fp8_backward: whether its backward product does.
        col_scale: [out] fp32, or None where every channel's scale is one.
    """

    fp8: bool
    fp8_backward: bool
    col_scale: Tensor | None

    def stored(self) -> dict[str, Tensor]:
        """The stored tensors by name; each has `out * n` entries in its first dimension."""
        ...

    def load(self, start: int, weight: Tensor) -> None:
        """Store `weight` [rows, in] as rows from `start` on."""
        ...

    def adopt(self, stored: dict[str, Tensor]) -> None:
        """Replace the stored tensors (another device)."""
        ...

    def forward(self, x: Rows) -> Rows:
        """x @ weight^T; the scale that is left to the reader is None for FP8."""
        ...

    def backward(self, g: Rows) -> Tensor:
        """(g / col_scale) @ weight, g as its kernel cast it, channel scales folded in."""
        ...


class PlainBase:
    """The weight in the model's dtype."""

    fp8 = fp8_backward = False
    col_scale: Tensor | None = None

    def __init__(self, out_features: int, in_features: int, *, dtype: torch.dtype, device: torch.device):
        self.weight = torch.empty(out_features, in_features, dtype=dtype, device=device)

    def stored(self) -> dict[str, Tensor]:
        return {"weight": self.weight}

    def load(self, start: int, weight: Tensor) -> None:
        self.weight[start : start + weight.shape[0]].copy_(weight)

    def adopt(self, stored: dict[str, Tensor]) -> None:
        self.weight = stored["weight"]

    def forward(self, x: Rows) -> Rows:
        return Rows(x.data @ self.weight.T, x.scale)

    def backward(self, g: Rows) -> Tensor:
        return g.data @ self.weight


class Fp8Base:
    """One byte a parameter, and a transposed copy of it where `two_copies`.

    Hopper's FP8 product wants both operands contiguous along the sum, so the backward product reads the
    transpose: a second copy that is kept, or one made on the fly (4 % slower at the 8B shape).
    """

    fp8 = fp8_backward = True

    def __init__(
        self, out_features: int, in_features: int, *, dtype: torch.dtype, device: torch.device,
        two_copies: bool,
    ):  # fmt: skip
        self.dtype = dtype
        self.two_copies = two_copies
        self.bytes = torch.empty(out_features, in_features, dtype=torch.uint8, device=device)
        self.col_scale: Tensor | None = torch.empty(out_features, dtype=torch.float32, device=device)
        self._transposed: Tensor | None = None
        self._ones = torch.ones(in_features, dtype=torch.float32, device=device)

    def stored(self) -> dict[str, Tensor]:
        assert self.col_scale is not None
        return {"weight": self.bytes, "weight_scale": self.col_scale}

    def load(self, start: int, weight: Tensor) -> None:
        assert self.col_scale is not None
        rows = slice(start, start + weight.shape[0])
        data, scale = cast_weight(weight.to(self.bytes.device))
        self.bytes[rows].copy_(data)
        self.col_scale[rows].copy_(scale)
        self._transposed = None

    def adopt(self, stored: dict[str, Tensor]) -> None:
        self.bytes, self.col_scale = stored["weight"], stored["weight_scale"]
        self._ones = self._ones.to(self.bytes.device)
        self._transposed = None

    def forward(self, x: Rows) -> Rows:
        assert self.col_scale is not None
        return Rows(fp8_product(x, self.bytes, self.col_scale, dtype=self.dtype), None)

    def backward(self, g: Rows) -> Tensor:
        transposed = self._transposed
        if transposed is None:
            transposed = transpose(self.bytes)
            if self.two_copies:
                self._transposed = transposed
        return fp8_product(g, transposed, self._ones, dtype=self.dtype)


class SplitBase:
    """Forward in the model's dtype, backward in FP8 from a transposed copy: 3 bytes a parameter in all."""

    fp8, fp8_backward = False, True

    def __init__(self, out_features: int, in_features: int, *, dtype: torch.dtype, device: torch.device):
        self.dtype = dtype
        self.weight = torch.empty(out_features, in_features, dtype=dtype, device=device)
        self.col_scale: Tensor | None = torch.empty(out_features, dtype=torch.float32, device=device)
        self._transposed = torch.empty(in_features, out_features, dtype=torch.uint8, device=device)
        self._ones = torch.ones(in_features, dtype=torch.float32, device=device)

    def stored(self) -> dict[str, Tensor]:
        assert self.col_scale is not None
        return {"weight": self.weight, "weight_scale": self.col_scale}

    def load(self, start: int, weight: Tensor) -> None:
        assert self.col_scale is not None
        rows = slice(start, start + weight.shape[0])
        self.weight[rows].copy_(weight)
        data, scale = cast_weight(self.weight[rows])
        self._transposed[:, rows] = data.T
        self.col_scale[rows].copy_(scale)

    def adopt(self, stored: dict[str, Tensor]) -> None:
        self.weight, self.col_scale = stored["weight"], stored["weight_scale"]
        data, _ = cast_weight(self.weight)
        self._transposed, self._ones = data.T.contiguous(), self._ones.to(self.weight.device)

    def forward(self, x: Rows) -> Rows:
        return Rows(x.data @ self.weight.T, x.scale)

    def backward(self, g: Rows) -> Tensor:
        return fp8_product(g, self._transposed, self._ones, dtype=self.dtype)


class Nf4Base:
    """Half a byte a parameter, in bitsandbytes' layout, dequantized for each product.

    Args:
        compute_fp8: whether products run in FP8, with channel scales from each row's largest block.
    """

    def __init__(
        self, out_features: int, in_features: int, *, dtype: torch.dtype, device: torch.device,
        compute_fp8: bool,
    ):  # fmt: skip
        self.shape = (out_features, in_features)
        self.dtype = dtype
        self.fp8 = self.fp8_backward = compute_fp8
        numel = out_features * in_features
        self.packed = torch.empty(numel // 2, 1, dtype=torch.uint8, device=device)
        self.absmax = torch.empty(numel // BLOCK, dtype=torch.float32, device=device)
        self.col_scale: Tensor | None = None
        if compute_fp8:
            self.col_scale = torch.empty(out_features, dtype=torch.float32, device=device)
            self._ones = torch.ones(in_features, dtype=torch.float32, device=device)

    def stored(self) -> dict[str, Tensor]:
        return {"weight": self.packed, "absmax": self.absmax}

    def load(self, start: int, weight: Tensor) -> None:
        packed, absmax = quantize(weight.to(self.packed.device))
        width = self.shape[1]
        self.packed[start * width // 2 :][: packed.shape[0]].copy_(packed)
        self.absmax[start * width // BLOCK :][: absmax.shape[0]].copy_(absmax)
        self._set_scale()

    def adopt(self, stored: dict[str, Tensor]) -> None:
        self.packed, self.absmax = stored["weight"], stored["absmax"]
        self._set_scale()

    def forward(self, x: Rows) -> Rows:
        if self.col_scale is None:
            return Rows(x.data @ self._dense().T, x.scale)
        return Rows(fp8_product(x, self._fp8(transposed=False), self.col_scale, dtype=self.dtype), None)

    def backward(self, g: Rows) -> Tensor:
        if self.col_scale is None:
            return g.data @ self._dense()
        return fp8_product(g, self._fp8(transposed=True), self._ones, dtype=self.dtype)

    def _dense(self) -> Tensor:
        return dequantize(self.packed, self.absmax, shape=self.shape, dtype=self.dtype)

    def _fp8(self, *, transposed: bool) -> Tensor:
        assert self.col_scale is not None
        return dequantize_to_fp8(
            self.packed, self.absmax, self.col_scale, shape=self.shape, transposed=transposed
        )

    def _set_scale(self) -> None:
        if self.fp8:
            self._ones = self._ones.to(self.packed.device)
            self.col_scale = power_of_two_scale(self.absmax.view(self.shape[0], -1).amax(1))


def make_base(
    kind: BaseKind, widths: Sequence[int], in_features: int, *, dtype: torch.dtype, device: torch.device,
    two_copies: bool = True,
) -> Base:  # fmt: skip
    """Room for the frozen weight of projections that share an input.

    Args:
        kind: of the storage; `nf4-fp8` stores NF4 and computes in FP8, `fp8-backward` has only its backward
            product in FP8.
        widths: output features of each projection.
        in_features: of all.
        dtype: of plain weights and of every product.
        device: of all.
        two_copies: whether FP8 keeps the transpose.
    """
    out = sum(widths)
    if kind == "plain":
        return PlainBase(out, in_features, dtype=dtype, device=device)
    if kind == "fp8-backward":
        return SplitBase(out, in_features, dtype=dtype, device=device)
    if kind == "fp8":
        return Fp8Base(out, in_features, dtype=dtype, device=device, two_copies=two_copies)
    return Nf4Base(out, in_features, dtype=dtype, device=device, compute_fp8=kind == "nf4-fp8")
