"""Linear layers that share an input, merged: one frozen product, one A product, the checkpoint's names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from swiftkit.engine.fused.base import BaseKind, make_base
from swiftkit.engine.kernels.rows import SLICES
from swiftkit.engine.linear import first_factor
from swiftkit.formats.peft import LoraSpec
from swiftkit.parallel.collectives import Sharding


class FrozenLinear(nn.Module):
    """One linear layer's names: `weight` (a view of the merged storage), `lora_A`, `lora_B`, `bias`."""

    projection: Projection
    weight: nn.Parameter | None

    def __init__(self, in_features: int, out_features: int, spec: LoraSpec | None, device: torch.device):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.spec = spec
        self.lora_A: nn.Parameter | None = None
        self.lora_B: nn.Parameter | None = None
        self.bias: nn.Parameter | None = None
        if spec is not None:
            self.scaling = spec.alpha / spec.rank
            self.lora_A = nn.Parameter(torch.zeros(spec.rank, in_features, device=device))
            self.lora_B = nn.Parameter(torch.zeros(out_features, spec.rank, device=device))

    def point_to(self, stored: Mapping[str, Tensor]) -> None:
        """Name the tensors that hold the frozen weight."""
        for name, tensor in stored.items():
            if name == "weight":
                self.weight = nn.Parameter(tensor, requires_grad=False)
            else:
                self.register_buffer(name, tensor)

    def load_weight(self, weight: Tensor) -> None:
        """Store [out_features, in_features] at this layer's place in the merged storage."""
        self.projection.load(self, weight)

    def reset_adapter(self, *, name: str, seed: int, device: torch.device) -> None:
        """Give the adapter its first values; see `first_factor`."""
        if self.lora_A is None or self.lora_B is None:
            return
        own = self.projection.sharding
        row = own.shard if own is not None and own.row else None
        shape = tuple(self.lora_A.shape)
        first = first_factor(shape if row is None else row.whole_shape(shape), name=name, seed=seed)
        with torch.no_grad():
            self.lora_A.copy_((first if row is None else row.take(first)).to(device))
            self.lora_B.zero_()


class Factors(NamedTuple):
    """The adapters of a projection in the compute type, ranks padded, the scaling in B.

    Attributes:
        a: [linears * rank, in].
        b: [out, rank].
    """

    a: Tensor
    b: Tensor


class Projection:
    """Linear layers with one input, as one.

    Args:
        linears: the layers, in the order of the merged outputs; each needs `in_features` alike.
        kind, dtype, device, two_copies, sharding: of the frozen weight, see `base.make_base`.

    Raises:
        ValueError: the adapters differ in alpha / rank, or have dropout.
    """

    def __init__(
        self, linears: Sequence[FrozenLinear], *, kind: BaseKind, dtype: torch.dtype, device: torch.device,
        two_copies: bool, sharding: Sharding | None = None,
    ):  # fmt: skip
        self.linears = list(linears)
        self.sharding = sharding
        for linear in linears:
            linear.projection = self
        self.widths = tuple(linear.out_features for linear in linears)
        self.in_features = linears[0].in_features
        self.dtype = dtype
        self.base = make_base(
            kind, self.widths, self.in_features, dtype=dtype, device=device, two_copies=two_copies,
            sharding=sharding,
        )  # fmt: skip
        specs = [linear.spec for linear in linears if linear.spec is not None]
        if any(spec.dropout for spec in specs):
            raise ValueError("the fused layer has no LoRA dropout; the plain linears do")
        scalings = {spec.alpha / spec.rank for spec in specs}
        if len(scalings) > 1:
            raise ValueError(f"adapters of merged linears need one alpha / rank, got {sorted(scalings)}")
        self.scaling = scalings.pop() if scalings else 0.0
        largest = max((spec.rank for spec in specs), default=0)
        self.rank = max(16, 1 << (largest - 1).bit_length()) if largest else 0
        self.name_weights()

    @property
    def out_features(self) -> int:
        """Width of the merged output."""
        return sum(self.widths)

    @property
    def segments(self) -> tuple[int, ...] | None:
        """The widths, where there are several."""
        return self.widths if len(self.widths) > 1 else None

    def name_weights(self) -> None:
        """Make each linear's names views of the merged storage."""
        stored = self.base.stored()
        starts = [sum(self.widths[:n]) for n in range(len(self.widths) + 1)]
        for n, linear in enumerate(self.linears):
            own = {}
            for name, tensor in stored.items():
                per_row = tensor.shape[0] // self.out_features
                own[name] = tensor[starts[n] * per_row : starts[n + 1] * per_row]
            linear.point_to(own)

    def forget_names(self) -> None:
        """Take the names away again: what is stored is not always there."""
        for linear in self.linears:
            linear.weight = None
            linear._buffers.clear()

    def merge(self) -> None:
        """Take up the linears' tensors again after a move to another device."""
        names = self.base.stored()
        self.base.adopt(
            {name: torch.cat([getattr(linear, name).data for linear in self.linears]) for name in names}
        )
        self.name_weights()

    def load(self, linear: FrozenLinear, weight: Tensor) -> None:
        """Quantize and store one linear's weight [out, in]."""
        before = self.linears[: self.linears.index(linear)]
        self.base.load(sum(other.out_features for other in before), weight)

    def bias(self) -> Tensor | None:
        """[out], or None where no linear has one."""
        if all(linear.bias is None for linear in self.linears):
            return None
        own = self.linears[0].lora_A
        device = self.base.stored()["weight"].device if own is None else own.device
        return torch.cat(
            [
                torch.zeros(linear.out_features, dtype=self.dtype, device=device)
                if linear.bias is None
                else linear.bias.detach()
                for linear in self.linears
            ]
        )

    def adapted(self) -> Iterator[tuple[int, int, FrozenLinear]]:
        """(index, first output row, linear) of the linears with an adapter."""
        start = 0
        for index, linear in enumerate(self.linears):
            if linear.spec is not None:
                yield index, start, linear
            start += linear.out_features

    def parameters(self) -> list[Tensor]:
        """A and B of each adapted linear, in order."""
        return [p for _, _, linear in self.adapted() for p in (linear.lora_A, linear.lora_B) if p is not None]

    def plan_pack(self, sources: Sequence[Tensor], targets: list[Tensor]) -> Factors | None:
        """Room for the packed adapters; `targets` gets the place of each of `sources` in it."""
        if not self.rank:
            return None
        exact = all(linear.spec is not None and linear.spec.rank == self.rank for linear in self.linears)
        make = torch.empty if exact else torch.zeros
        device = sources[0].device
        a = make(len(self.linears) * self.rank, self.in_features, dtype=self.dtype, device=device)
        b = make(self.out_features, self.rank, dtype=self.dtype, device=device)
        for index, start, linear in self.adapted():
            assert linear.spec is not None
            rank = linear.spec.rank
            targets.append(a[index * self.rank : index * self.rank + rank])
            targets.append(b[start : start + linear.out_features, :rank])
        return Factors(a, b)

    def gradient_room(self, flat: Tensor, start: int) -> tuple[Tensor, Tensor, int]:
        """Views of [SLICES, total] partial sums for A [SLICES, ranks, in] and B^T [SLICES, rank, out]."""
        ranks = len(self.linears) * self.rank
        middle = start + ranks * self.in_features
        end = middle + self.out_features * self.rank
        of_a = flat[:, start:middle].view(SLICES, ranks, self.in_features)
        of_b = flat[:, middle:end].view(SLICES, self.out_features, self.rank).transpose(1, 2)
        return of_a, of_b, end

    def split_gradient(self, flat: Tensor, start: int) -> list[Tensor]:
        """The gradients of `parameters()` as views of the summed [total]."""
        ranks = len(self.linears) * self.rank
        middle = start + ranks * self.in_features
        of_a = flat[start:middle].view(ranks, self.in_features)
        of_b = flat[middle : middle + self.out_features * self.rank].view(self.out_features, self.rank)
        gradients = []
        for index, row, linear in self.adapted():
            assert linear.spec is not None
            rank = linear.spec.rank
            gradients.append(of_a[index * self.rank : index * self.rank + rank])
            gradients.append(of_b[row : row + linear.out_features, :rank])
        return gradients

    @property
    def gradient_size(self) -> int:
        """Numbers in the padded gradients."""
        return self.rank * (len(self.linears) * self.in_features + self.out_features)
