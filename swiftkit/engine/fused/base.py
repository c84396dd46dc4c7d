"""The frozen side of a projection: two products, forward and for the input's gradient, in three storages.

FP8 products apply both scales as they write (that costs nothing on Hopper). In the backward the channel
scales are on the summed side, so the kernel that casts a gradient multiplies it by `col_scale` first.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from swiftkit.engine.fused.carried import Carried
from swiftkit.engine.kernels.nf4 import BLOCK, dequantize, dequantize_to_fp8, quantize
from swiftkit.engine.kernels.outliers import low_part
from swiftkit.engine.kernels.rows import FP8, FP8_MAX, Rows, cast_weight, fp8_product, power_of_two_scale
from swiftkit.engine.kernels.transpose import transpose
from swiftkit.parallel.collectives import Sharding

BaseKind = Literal["plain", "fp8", "fp8-backward", "nf4", "nf4-fp8", "int"]
"""`int` is what a folder holds packed: no weight is quantized for it, see `engine.integers`."""


def kind_of(linear: str, base: BaseKind, layers: int) -> BaseKind:
    """The storage of a linear layer in a model with this base.

    Over FP8 the first and the last decoder layer keep their forward products in the model's dtype: they make
    a third of the rounding's effect on the loss.

    Args:
        linear: its name, `model.layers.<n>...`.
        base: of the model.
        layers: how many decoder layers the model has.
    """
    number = re.search(r"layers\.(\d+)\.", linear)
    at_an_end = number is not None and int(number[1]) in (0, layers - 1)
    return "fp8-backward" if base == "fp8" and at_an_end else base


class Store(nn.Module):
    """The tensors of a frozen weight by name, as parameters.

    A product looks them up here each time, so whoever has the store may exchange them meanwhile: FSDP has a
    part of each, and the whole while a layer computes.
    """

    def put(self, name: str, tensor: Tensor | None) -> None:
        """Hold a tensor; None takes it away."""
        held = None if tensor is None else nn.Parameter(tensor, requires_grad=False)
        self.register_parameter(name, held)


def held(name: str) -> Any:
    """A base's tensor that lies in its store."""
    return property(lambda base: getattr(base.store, name), lambda base, tensor: base.store.put(name, tensor))


class Base(Protocol):
    """A frozen weight [out, in], possibly of several projections, one above the other.

    Attributes:
        fp8: whether its forward product reads FP8 rows.
        fp8_backward: whether its backward product does.
        col_scale: [out] fp32, or None where every channel's scale is one.
        carried: which input channels its forward product reads twice (see `kernels.outliers`), or None.
        store: all that is large.
    """

    fp8: bool
    fp8_backward: bool
    col_scale: Tensor | None
    carried: Carried
    store: Store

    def stored(self) -> dict[str, Tensor]:
        """The stored tensors by name; each has `out * n` entries in its first dimension."""
        ...

    def load(self, start: int, weight: Tensor) -> None:
        """Store `weight` [rows, in] as rows from `start` on."""
        ...

    def adopt(self, stored: dict[str, Tensor]) -> None:
        """Replace the stored tensors (another device)."""
        ...

    def forget_copies(self) -> None:
        """Keep nothing large outside of the store from now on."""
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
    carried = Carried()
    weight = held("weight")

    def __init__(self, out_features: int, in_features: int, *, dtype: torch.dtype, device: torch.device):
        self.store = Store()
        self.weight = torch.empty(out_features, in_features, dtype=dtype, device=device)

    def stored(self) -> dict[str, Tensor]:
        return {"weight": self.weight}

    def load(self, start: int, weight: Tensor) -> None:
        self.weight[start : start + weight.shape[0]].copy_(weight)

    def adopt(self, stored: dict[str, Tensor]) -> None:
        self.weight = stored["weight"]

    def forget_copies(self) -> None:
        pass

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
    _wide = held("weight")  # with the carried columns behind it

    def __init__(
        self, out_features: int, in_features: int, *, dtype: torch.dtype, device: torch.device,
        two_copies: bool, sharding: Sharding | None = None,
    ):  # fmt: skip
        self.dtype = dtype
        self.two_copies = two_copies
        self._sharding = sharding
        self._width = in_features
        self.store = Store()
        self._wide = torch.empty(out_features, in_features, dtype=torch.uint8, device=device)
        self.col_scale: Tensor | None = torch.empty(out_features, dtype=torch.float32, device=device)
        self.carried = Carried(sharding)
        self._low: Tensor | None = None  # what FP8 left over, until it is known which of it is carried
        self._transposed: Tensor | None = None
        self._ones = torch.ones(in_features, dtype=torch.float32, device=device)

    @property
    def bytes(self) -> Tensor:
        """The weight [out, in]; a view."""
        return self._wide[:, : self._width]

    def stored(self) -> dict[str, Tensor]:
        assert self.col_scale is not None
        stored = {"weight": self.bytes, "weight_scale": self.col_scale}
        if self.carried.channels is not None:
            stored["weight_carried"] = self._wide[:, self._width :]
        return stored

    def load(self, start: int, weight: Tensor) -> None:
        assert self.col_scale is not None
        rows = slice(start, start + weight.shape[0])
        data, scale = _cast(weight.to(self.bytes.device), self._sharding)
        self.bytes[rows].copy_(data)
        self.col_scale[rows].copy_(scale)
        if self._low is None:
            self._low = torch.zeros_like(self.bytes, device=_where_it_fits(self.bytes))
        self._low[rows].copy_(low_part(weight.to(self.bytes.device), data, scale))
        self._transposed = None

    def adopt(self, stored: dict[str, Tensor]) -> None:
        self._wide, self.col_scale = stored["weight"], stored["weight_scale"]
        self._ones = self._ones.to(self.bytes.device)
        self._transposed = None
        self.carried.move(self.bytes.device)
        self._put_behind(stored.get("weight_carried"))

    def forget_copies(self) -> None:
        self.two_copies, self._transposed = False, None

    def carry(self) -> None:
        """Choose what is carried, from the rows that went through since `carried.observe`."""
        assert self._low is not None and self.col_scale is not None
        weight = self.bytes.view(FP8).float() * self.col_scale[:, None]
        channels = self.carried.choose(weight)
        if channels is not None:
            low = self._low[:, channels.to(self._low.device)].to(self.bytes.device)
            self._put_behind(self.carried.columns(self.bytes[:, channels], low))
        self._low = None

    def forward(self, x: Rows) -> Rows:
        assert self.col_scale is not None
        self.carried.see(x)
        return Rows(fp8_product(x, self._wide, self.col_scale, dtype=self.dtype), None)

    def backward(self, g: Rows) -> Tensor:
        transposed = self._transposed
        if transposed is None:
            transposed = transpose(self.bytes)
            if self.two_copies:
                self._transposed = transposed
        return fp8_product(g, transposed, self._ones, dtype=self.dtype)

    def _put_behind(self, columns: Tensor | None) -> None:
        if columns is not None:
            self._wide = torch.cat([self.bytes, columns], 1)


class SplitBase:
    """Forward in the model's dtype, backward in FP8 from a transposed copy: 3 bytes a parameter in all."""

    fp8, fp8_backward = False, True
    carried = Carried()
    weight = held("weight")

    def __init__(
        self, out_features: int, in_features: int, *, dtype: torch.dtype, device: torch.device,
        sharding: Sharding | None = None,
    ):  # fmt: skip
        self.dtype = dtype
        self._sharding = sharding
        self.store = Store()
        self.weight = torch.empty(out_features, in_features, dtype=dtype, device=device)
        self.col_scale: Tensor | None = torch.empty(out_features, dtype=torch.float32, device=device)
        self._transposed: Tensor | None = torch.empty(
            in_features, out_features, dtype=torch.uint8, device=device
        )
        self._ones = torch.ones(in_features, dtype=torch.float32, device=device)

    def stored(self) -> dict[str, Tensor]:
        assert self.col_scale is not None
        return {"weight": self.weight, "weight_scale": self.col_scale}

    def load(self, start: int, weight: Tensor) -> None:
        assert self.col_scale is not None
        rows = slice(start, start + weight.shape[0])
        self.weight[rows].copy_(weight)
        data, scale = _cast(self.weight[rows], self._sharding)
        assert self._transposed is not None
        self._transposed[:, rows] = data.T
        self.col_scale[rows].copy_(scale)

    def adopt(self, stored: dict[str, Tensor]) -> None:
        self.weight, self.col_scale = stored["weight"], stored["weight_scale"]
        self._transposed, self._ones = self._made_transposed(), self._ones.to(self.weight.device)

    def forget_copies(self) -> None:
        self._transposed = None

    def forward(self, x: Rows) -> Rows:
        return Rows(x.data @ self.weight.T, x.scale)

    def backward(self, g: Rows) -> Tensor:
        transposed = self._made_transposed() if self._transposed is None else self._transposed
        return fp8_product(g, transposed, self._ones, dtype=self.dtype)

    def _made_transposed(self) -> Tensor:
        data, _ = _cast(self.weight, self._sharding)
        return data.T.contiguous()


class Nf4Base:
    """Half a byte a parameter, in bitsandbytes' layout, dequantized for each product.

    Args:
        compute_fp8: whether products run in FP8, with channel scales from each row's largest block.
    """

    packed, absmax = held("packed"), held("absmax")
    _behind = held("behind")  # the carried columns, or None

    def __init__(
        self, out_features: int, in_features: int, *, dtype: torch.dtype, device: torch.device,
        compute_fp8: bool, sharding: Sharding | None = None,
    ):  # fmt: skip
        self.shape = (out_features, in_features)
        self.dtype = dtype
        self.fp8 = self.fp8_backward = compute_fp8
        self.carried = Carried(sharding)
        self._sharding = sharding
        self.store = Store()
        self._behind = None
        numel = out_features * in_features
        self.packed = torch.empty(numel // 2, 1, dtype=torch.uint8, device=device)
        self.absmax = torch.empty(numel // BLOCK, dtype=torch.float32, device=device)
        self.col_scale: Tensor | None = None
        if compute_fp8:
            self.col_scale = torch.empty(out_features, dtype=torch.float32, device=device)
            self._ones = torch.ones(in_features, dtype=torch.float32, device=device)

    def stored(self) -> dict[str, Tensor]:
        stored = {"weight": self.packed, "absmax": self.absmax}
        return stored if self._behind is None else {**stored, "weight_carried": self._behind}

    def load(self, start: int, weight: Tensor) -> None:
        packed, absmax = quantize(weight.to(self.packed.device))
        width = self.shape[1]
        self.packed[start * width // 2 :][: packed.shape[0]].copy_(packed)
        self.absmax[start * width // BLOCK :][: absmax.shape[0]].copy_(absmax)
        self._set_scale()

    def adopt(self, stored: dict[str, Tensor]) -> None:
        self.packed, self.absmax = stored["weight"], stored["absmax"]
        self._set_scale()
        self.carried.move(self.packed.device)
        self._behind = stored.get("weight_carried")

    def forget_copies(self) -> None:
        pass

    def carry(self) -> None:
        """See `Fp8Base.carry`; the weight is what NF4 stands for."""
        assert self.col_scale is not None
        weight = dequantize(self.packed, self.absmax, shape=self.shape, dtype=torch.float32)
        channels = self.carried.choose(weight)
        if channels is not None:
            high = self._fp8(transposed=False).view(torch.uint8)[:, channels]
            low = low_part(weight[:, channels], high, self.col_scale)
            self._behind = self.carried.columns(high, low)

    def forward(self, x: Rows) -> Rows:
        if self.col_scale is None:
            return Rows(x.data @ self._dense().T, x.scale)
        self.carried.see(x)
        weight = self._fp8(transposed=False, behind=self._behind)
        return Rows(fp8_product(x, weight, self.col_scale, dtype=self.dtype), None)

    def backward(self, g: Rows) -> Tensor:
        if self.col_scale is None:
            return g.data @ self._dense()
        return fp8_product(g, self._fp8(transposed=True), self._ones, dtype=self.dtype)

    def _dense(self) -> Tensor:
        return dequantize(self.packed, self.absmax, shape=self.shape, dtype=self.dtype)

    def _fp8(self, *, transposed: bool, behind: Tensor | None = None) -> Tensor:
        assert self.col_scale is not None
        room = 0 if behind is None else behind.shape[1]
        weight = dequantize_to_fp8(
            self.packed, self.absmax, self.col_scale, shape=self.shape, transposed=transposed, room=room
        )
        if behind is not None:
            weight.view(torch.uint8)[:, -room:] = behind
        return weight

    def _set_scale(self) -> None:
        if self.fp8:
            self._ones = self._ones.to(self.packed.device)
            largest = _over_ranks(self.absmax.view(self.shape[0], -1).amax(1), self._sharding)
            self.col_scale = power_of_two_scale(largest)


def _cast(weight: Tensor, sharding: Sharding | None) -> tuple[Tensor, Tensor]:
    """As `cast_weight`; a part of each row is cast as the whole row would be."""
    if sharding is None or not sharding.row:
        return cast_weight(weight)
    wide = weight.float()
    scale = power_of_two_scale(_over_ranks(wide.abs().amax(1), sharding))
    data = (wide / scale[:, None]).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    return data.view(torch.uint8), scale


def _over_ranks(amax: Tensor, sharding: Sharding | None) -> Tensor:
    """The largest magnitude of each whole row, [out]."""
    return amax if sharding is None or not sharding.row else sharding.ranks.max(amax)


def _where_it_fits(weight: Tensor) -> torch.device:
    """The weight's own device, or the host where a second model of this kind might not fit beside it."""
    if not weight.is_cuda:
        return weight.device
    free, total = torch.cuda.mem_get_info(weight.device)
    return weight.device if free > 0.3 * total else torch.device("cpu")


def make_base(
    kind: BaseKind, widths: Sequence[int], in_features: int, *, dtype: torch.dtype, device: torch.device,
    two_copies: bool = True, sharding: Sharding | None = None,
) -> Base:  # fmt: skip
    """Room for the frozen weight of projections that share an input.

    Args:
        kind: of the storage, but for `int`; `nf4-fp8` stores NF4 and computes in FP8, `fp8-backward` has only
            its backward product in FP8.
        widths: output features of each projection.
        in_features: of all.
        dtype: of plain weights and of every product.
        device: of all.
        two_copies: whether FP8 keeps the transpose.
        sharding: where this is a part of a weight that is cut over ranks; a part is quantized as the whole
            would be.
    """
    out = sum(widths)
    if kind == "plain":
        return PlainBase(out, in_features, dtype=dtype, device=device)
    if kind == "fp8-backward":
        return SplitBase(out, in_features, dtype=dtype, device=device, sharding=sharding)
    if kind == "fp8":
        return Fp8Base(out, in_features, dtype=dtype, device=device, two_copies=two_copies, sharding=sharding)
    return Nf4Base(
        out, in_features, dtype=dtype, device=device, compute_fp8=kind == "nf4-fp8", sharding=sharding
    )
