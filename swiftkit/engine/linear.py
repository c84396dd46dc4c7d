"""Our linear layers: a frozen base weight in one of several storages, and the same with a LoRA adapter."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swiftkit.engine.fused.base import Base, BaseKind, make_base
from swiftkit.engine.kernels.project import cast_project
from swiftkit.formats.peft import LoraSpec


class Linear(nn.Module):
    """A frozen linear layer: y = x W^T + b.

    Args:
        linear: the module it takes the place of; its parameters may still be on the meta device.
        kind: storage of the weight; other than `plain` it is quantized when it is loaded.
    """

    def __init__(self, linear: nn.Linear, kind: BaseKind = "plain"):
        super().__init__()
        self.out_features, self.in_features = linear.weight.shape
        self.kind: BaseKind = kind
        self.base: Base | None = None
        self.weight = linear.weight.requires_grad_(False)
        self.bias = linear.bias if linear.bias is None else linear.bias.requires_grad_(False)

    def load_weight(self, weight: Tensor) -> None:
        """Store [out_features, in_features], already of the compute type and on the device."""
        if self.kind == "plain":  # a tied parameter stays the same object
            shared = isinstance(weight, nn.Parameter)
            self.weight = weight if shared else nn.Parameter(weight, requires_grad=False)
            return
        base = make_base(
            self.kind, [self.out_features], self.in_features, dtype=weight.dtype, device=weight.device
        )
        base.load(0, weight)
        self.base = base
        self.weight = nn.Parameter(base.stored()["weight"], requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features]."""
        if self.base is None:
            return F.linear(x, self.weight, self.bias)
        y: Tensor = _QuantizedProduct.apply(x, self.base)
        return y if self.bias is None else y + self.bias


class LoraLinear(Linear):
    """y = x W^T + b + (alpha / rank) dropout(x) A^T B^T, with W and b frozen.

    A [rank, in] and B [out, rank] stay in float32, whatever the base's precision is: they are what the
    optimizer updates. They are cast to the input's type for the product.
    """

    def __init__(self, linear: nn.Linear, spec: LoraSpec, kind: BaseKind = "plain"):
        super().__init__(linear, kind)
        self.scaling = spec.alpha / spec.rank
        self.dropout = spec.dropout
        meta = torch.device("meta")
        self.lora_A = nn.Parameter(torch.empty(spec.rank, self.in_features, device=meta))
        self.lora_B = nn.Parameter(torch.empty(self.out_features, spec.rank, device=meta))

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features]."""
        inner = F.linear(F.dropout(x, self.dropout, self.training), self.lora_A.to(x.dtype))  # [..., rank]
        return super().forward(x) + F.linear(inner, self.lora_B.to(x.dtype)) * self.scaling

    def reset_adapter(self, *, name: str, seed: int, device: torch.device) -> None:
        """Give the adapter its first values; see `first_factor`."""
        first = first_factor(self.lora_A.shape, name=name, seed=seed)
        self.lora_A = nn.Parameter(first.to(device))
        self.lora_B = nn.Parameter(torch.zeros(self.lora_B.shape, device=device))


def first_factor(shape: tuple[int, ...], *, name: str, seed: int) -> Tensor:
    """A's first values [rank, in], as PEFT draws them (Kaiming uniform, a = sqrt 5); B starts at zero.

    The draw depends on the layer's name and the run's seed alone, so that every order of building and every
    number of processes starts from the same adapter.
    """
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    bound = 1 / math.sqrt(shape[1])
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


class _QuantizedProduct(torch.autograd.Function):
    """x W^T over a quantized base; both directions run in the base's own type."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, base: Base) -> Tensor:
        ctx.base = base
        rows, _ = cast_project(x.reshape(-1, x.shape[-1]), factor=None, fp8=base.fp8)
        return base.forward(rows).data.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        base, dy = ctx.base, upstream[0]
        g, _ = cast_project(
            dy.reshape(-1, dy.shape[-1]), factor=None, fp8=base.fp8_backward, col_scale=base.col_scale
        )
        return base.backward(g).view(*dy.shape[:-1], -1), None
