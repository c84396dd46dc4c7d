"""Our linear layers: a base weight in one of several storages, alone or with a LoRA or DoRA adapter."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swiftkit.engine.cast_together import cast_together
from swiftkit.engine.fused.base import Base, BaseKind, make_base
from swiftkit.engine.integers import IntBase
from swiftkit.engine.kernels.outliers import carry
from swiftkit.engine.kernels.project import cast_project
from swiftkit.formats.codes import Codes
from swiftkit.formats.peft import LoraSpec
from swiftkit.parallel.collectives import Sharding


class Linear(nn.Module):
    """A linear layer, frozen unless the whole model is trained: y = x W^T + b.

    Args:
        linear: the module it takes the place of; its parameters may still be on the meta device.
        kind: storage of the weight; other than `plain` it is quantized when it is loaded, or comes as codes
            (`int`).
        sharding: where `linear` is one rank's part of a layer.
    """

    def __init__(self, linear: nn.Linear, kind: BaseKind = "plain", sharding: Sharding | None = None):
        super().__init__()
        self.out_features, self.in_features = linear.weight.shape
        self.kind: BaseKind = kind
        self.sharding = sharding
        self.base: Base | IntBase | None = None
        self.weight = linear.weight.requires_grad_(False)
        self.bias = linear.bias if linear.bias is None else linear.bias.requires_grad_(False)

    def load_weight(self, weight: Tensor) -> None:
        """Store [out_features, in_features], already of the compute type and on the device."""
        if self.kind == "plain":  # a tied parameter stays the same object
            shared = isinstance(weight, nn.Parameter)
            self.weight = weight if shared else nn.Parameter(weight, requires_grad=False)
            return
        base = make_base(
            self.kind, [self.out_features], self.in_features, dtype=weight.dtype, device=weight.device,
            sharding=self.sharding,
        )  # fmt: skip
        base.load(0, weight)
        self.base = base
        self.name_weights()

    def load_codes(self, codes: Codes, *, dtype: torch.dtype, device: torch.device) -> None:
        """Store a matrix that its file holds in whole numbers, as it is; products run in `dtype`."""
        self.base = IntBase(codes, dtype=dtype, device=device)
        self.name_weights()

    def name_weights(self) -> None:
        """Let `weight` be what is stored."""
        if self.base is not None:
            self.weight = nn.Parameter(self.base.stored()["weight"], requires_grad=False)

    def show_store(self) -> None:
        """Have what is stored as parameters of this module, in place of `weight`, so that it can be cut."""
        if self.base is not None:
            self.base.forget_copies()
            del self.weight
            self.stored = self.base.store

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features]."""
        if self.base is None and self.row is None:
            return F.linear(x, self.weight, self.bias)
        return self.finish(self.product(x))

    @property
    def row(self) -> Sharding | None:
        """The sharding of a layer whose outputs are partial sums."""
        return self.sharding if self.sharding is not None and self.sharding.row else None

    def product(self, x: Tensor) -> Tensor:
        """x W^T, over the inputs that are here."""
        if self.base is None:
            return F.linear(x, self.weight)
        y: Tensor = _QuantizedProduct.apply(x, self.base, self.sharding)
        return y

    def finish(self, y: Tensor) -> Tensor:
        """Add up what the ranks have, then the bias, once."""
        if self.row is not None:
            y = self.row.ranks.leave(y)
        return y if self.bias is None else y + self.bias


class LoraLinear(Linear):
    """y = x W^T + b + (alpha / rank) dropout(x) A^T B^T, with W and b frozen.

    A [rank, in] and B [out, rank] stay in float32, whatever the base's precision is: they are what the
    optimizer updates. They are cast to the input's type for the product.
    """

    def __init__(
        self,
        linear: nn.Linear,
        spec: LoraSpec,
        kind: BaseKind = "plain",
        sharding: Sharding | None = None,
    ):
        super().__init__(linear, kind, sharding)
        self.scaling = spec.scaling
        self.dropout = spec.dropout
        self.pissa, self.pissa_rounds = spec.pissa, spec.pissa_rounds
        self.start: tuple[Tensor, Tensor] | None = None  # of PiSSA, on the host
        meta = torch.device("meta")
        self.lora_A = nn.Parameter(torch.empty(spec.rank, self.in_features, device=meta))
        self.lora_B = nn.Parameter(torch.empty(self.out_features, spec.rank, device=meta))

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features]."""
        if self.row is None:
            return super().forward(x) + self.adapter(self.dropped(x))
        return self.finish(self.product(x) + self.adapter(self.dropped(x)))

    def dropped(self, x: Tensor) -> Tensor:
        """The adapter's input after dropout; ranks with parts of it draw for the whole, then take theirs.

        So every rank is at the same place of the random stream, and draws as one process does.
        """
        if self.row is None or not self.training or not self.dropout:
            return F.dropout(x, self.dropout, self.training)
        shard = self.row.shard.along(x.dim() - 1)
        return x * shard.take(F.dropout(x.new_ones(shard.whole_shape(x.shape)), self.dropout))

    def adapter(self, x: Tensor) -> Tensor:
        """What the adapter adds, of [..., in_features]."""
        inner = F.linear(x, self.lora_A.to(x.dtype))  # [..., rank]
        return F.linear(inner, self.lora_B.to(x.dtype)) * self.scaling

    def reset_adapter(self, *, name: str, seed: int, device: torch.device) -> None:
        """Give the adapter its first values, once the weight is there; see `first_factor`."""
        if self.pissa:
            with torch.random.fork_rng([] if device.type == "cpu" else [device]):
                torch.manual_seed(_seed_of(name, seed))
                self._take_principal_part()
            return
        row = self.row
        shape = tuple(self.lora_A.shape) if row is None else row.shard.whole_shape(self.lora_A.shape)
        first = first_factor(shape, name=name, seed=seed)
        self.lora_A = nn.Parameter((first if row is None else row.shard.take(first)).to(device))
        self.lora_B = nn.Parameter(torch.zeros(self.lora_B.shape, device=device))

    @torch.no_grad()
    def _take_principal_part(self) -> None:
        """Start as the largest singular values of the weight, which loses them (PiSSA, equations 2 to 4)."""
        weight, rank = self.weight.float(), self.lora_A.shape[0]
        if self.pissa_rounds is None:
            left, values, right = torch.linalg.svd(weight, full_matrices=False)
        else:  # Halko et al. 2009, https://arxiv.org/abs/0909.4061, algorithm 5.1
            left, values, columns = torch.svd_lowrank(weight, q=rank, niter=self.pissa_rounds)
            right = columns.T
        root = (values[:rank] / self.scaling).sqrt()
        a, b = (root[:, None] * right[:rank]).contiguous(), left[:, :rank] * root
        self.lora_A, self.lora_B = nn.Parameter(a), nn.Parameter(b)
        rest = (weight - self.scaling * b @ a).to(self.weight.dtype)
        self.weight = nn.Parameter(rest, requires_grad=False)
        self.start = a.to("cpu", copy=True), b.to("cpu", copy=True)


class DoraLinear(LoraLinear):
    """y = (m / n) (x W^T + s x A^T B^T) + b, where n is the length of each row of W + s B A (DoRA).

    The lengths m [out] are trained; n is constant for the gradient (section 4.3 of the paper).
    """

    _squares: Tensor

    def __init__(
        self,
        linear: nn.Linear,
        spec: LoraSpec,
        kind: BaseKind = "plain",
        sharding: Sharding | None = None,
    ):
        super().__init__(linear, spec, kind, sharding)
        meta = torch.device("meta")
        self.lora_magnitude_vector = nn.Parameter(torch.empty(self.out_features, device=meta))
        self.register_buffer("_squares", None, persistent=False)  # of the lengths of W's rows, [out]

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features]."""
        ratio = (self.lora_magnitude_vector / self.row_lengths()).to(x.dtype)  # [out]
        product = F.linear(x, self.weight)
        dropped = F.dropout(x, self.dropout, self.training)
        if self.dropout and self.training:  # as in PEFT: what dropout does not touch is the base alone
            y = product + (ratio - 1) * F.linear(dropped, self.weight)
        else:
            y = ratio * product
        y = y + ratio * self.adapter(dropped)
        return y if self.bias is None else y + self.bias

    @torch.no_grad()
    def row_lengths(self) -> Tensor:
        """The length of each row of W + s B A, [out], without making that matrix."""
        a, b, s = self.lora_A, self.lora_B, self.scaling
        mixed = F.linear(self.weight, a.to(self.weight.dtype)).float()  # W A^T, [out, rank]
        squares = self._squares + 2 * s * (mixed * b).sum(1) + s * s * ((b @ (a @ a.T)) * b).sum(1)
        return squares.sqrt()

    def reset_adapter(self, *, name: str, seed: int, device: torch.device) -> None:
        """Start as the base is: the lengths are those of the weight's rows."""
        super().reset_adapter(name=name, seed=seed, device=device)
        self._squares = self.weight.detach().float().square().sum(1)
        self.lora_magnitude_vector = nn.Parameter(self._squares.sqrt())


def first_factor(shape: tuple[int, ...], *, name: str, seed: int) -> Tensor:
    """A's first values [rank, in], as PEFT draws them (Kaiming uniform, a = sqrt 5); B starts at zero.

    The draw depends on the layer's name and the run's seed alone, so that every order of building and every
    number of processes starts from the same adapter.
    """
    generator = torch.Generator().manual_seed(_seed_of(name, seed))
    bound = 1 / math.sqrt(shape[1])
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def _seed_of(name: str, seed: int) -> int:
    """A layer's own seed."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


class _QuantizedProduct(torch.autograd.Function):
    """x W^T over a quantized base; both directions run in the base's own type."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, base: Base | IntBase, sharding: Sharding | None) -> Tensor:
        ctx.base, ctx.sharding = base, sharding
        flat = x.reshape(-1, x.shape[-1])
        if base.fp8 and sharding is not None and sharding.row:
            rows = cast_together(flat, sharding, room=base.carried.room)
        else:
            rows, _ = cast_project(flat, factor=None, fp8=base.fp8, room=base.carried.room)
        if base.carried.channels is not None:
            carry(rows, flat, base.carried.channels)
        return base.forward(rows).data.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None]:
        base, sharding, dy = ctx.base, ctx.sharding, upstream[0]
        flat = dy.reshape(-1, dy.shape[-1])
        if base.fp8_backward and sharding is not None and not sharding.row:
            g = cast_together(flat, sharding, col_scale=base.col_scale)
        else:
            g, _ = cast_project(flat, factor=None, fp8=base.fp8_backward, col_scale=base.col_scale)
        return base.backward(g).view(*dy.shape[:-1], -1), None, None
