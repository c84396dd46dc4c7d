"""A decoder layer of the Llama shape with LoRA on its linears: one autograd node, checkpoint names kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from swiftkit.engine.fused import passes
from swiftkit.engine.fused.base import BaseKind
from swiftkit.engine.fused.passes import Surroundings
from swiftkit.engine.fused.projection import FrozenLinear, Projection
from swiftkit.engine.kernels.rope import Heads, head_block
from swiftkit.engine.kernels.rows import block_width
from swiftkit.formats.peft import LoraSpec
from swiftkit.parallel.collectives import Sharding

LINEARS = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip


@dataclass(frozen=True)
class LayerShape:
    """The numbers of a Llama decoder layer.

    Args:
        hidden: width of the residual stream.
        inter: width of the MLP.
        heads: query heads, key/value heads, width of a head.
        eps: of the norms.
        scaling: of the attention scores; None is head width ** -0.5.
        qkv_bias: whether q, k and v have a bias (Qwen2.5).
    """

    hidden: int
    inter: int
    heads: Heads
    eps: float = 1e-5
    softmax_scale: float | None = None
    qkv_bias: bool = False

    @property
    def scaling(self) -> float:
        """Factor on query-key products."""
        return self.heads.width**-0.5 if self.softmax_scale is None else self.softmax_scale

    def out_in(self, linear: str) -> tuple[int, int]:
        """Output and input features of one of `LINEARS`."""
        queries, keys = self.heads.queries * self.heads.width, self.heads.keys * self.heads.width
        return {
            "q_proj": (queries, self.hidden), "k_proj": (keys, self.hidden), "v_proj": (keys, self.hidden),
            "o_proj": (self.hidden, queries), "gate_proj": (self.inter, self.hidden),
            "up_proj": (self.inter, self.hidden), "down_proj": (self.hidden, self.inter),
        }[linear.rpartition(".")[2]]  # fmt: skip

    def check(self) -> None:
        """Refuse what the kernels cannot serve.

        Raises:
            ValueError: a width that is not a multiple of 64, or a head width that is not a power of two.
        """
        for width in (self.hidden, self.inter, self.heads.queries * self.heads.width):
            block_width(width)
        head_block(self.heads)


class Norm(nn.Module):
    """The frozen weight of an RMS norm."""

    def __init__(self, width: int, *, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, dtype=dtype, device=device), requires_grad=False)


class FusedLlamaLayer(nn.Module):
    """A decoder layer: norm, attention, norm, SwiGLU, with LoRA; everything but the adapters is frozen.

    Args:
        shape: the layer's numbers.
        base: storage of the frozen weights: `plain` (in `dtype`), `fp8`, `fp8-backward`, `nf4`, `nf4-fp8`.
        lora: the adapter of each adapted linear, by its name in `LINEARS`.
        dtype: of activations and norms.
        device: of all tensors.
        two_copies: whether FP8 weights keep a transposed copy (twice the memory) or make it on the fly.
        recompute_mlp: whether the gate/up product is made again in the backward instead of being kept.
        index: the layer's number in the model, its key in a store of keys and values.
        shardings: of `qkv`, `o`, `gate_up` and `down`, where `shape` is one rank's part of a layer.

    Raises:
        ValueError: the kernels do not serve this shape or adapter (see `LayerShape.check`, `Projection`).
    """

    def __init__(
        self,
        shape: LayerShape,
        *,
        base: BaseKind,
        lora: Mapping[str, LoraSpec],
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        two_copies: bool = True,
        recompute_mlp: bool = False,
        index: int = 0,
        shardings: Mapping[str, Sharding] | None = None,
    ):
        super().__init__()
        shape.check()
        self.shape = shape
        self.base, self.lora, self.dtype = base, lora, dtype
        self.two_copies = two_copies
        self.recompute_mlp = recompute_mlp
        self.index = index
        self.shardings = shardings or {}
        self.ranks = self.shardings["qkv"].ranks if self.shardings else None
        self.make_room(torch.device(device))

    def make_room(self, device: torch.device) -> None:
        """Make all tensors, without values; what was there before is gone."""
        shape, dtype = self.shape, self.dtype
        self.input_layernorm = Norm(shape.hidden, dtype=dtype, device=device)
        self.post_attention_layernorm = Norm(shape.hidden, dtype=dtype, device=device)
        self.self_attn, self.mlp = nn.Module(), nn.Module()
        linears = {}
        for name in LINEARS:
            room, leaf = name.split(".")
            out_features, in_features = shape.out_in(name)
            linears[leaf] = FrozenLinear(in_features, out_features, self.lora.get(name), device)
            if shape.qkv_bias and leaf in ("q_proj", "k_proj", "v_proj"):
                bias = torch.zeros(out_features, dtype=dtype, device=device)
                linears[leaf].bias = nn.Parameter(bias, requires_grad=False)
            getattr(self, room).add_module(leaf, linears[leaf])

        def merged(name: str, *leaves: str) -> Projection:
            return Projection(
                [linears[leaf] for leaf in leaves], kind=self.base, dtype=dtype, device=device,
                two_copies=self.two_copies, sharding=self.shardings.get(name),
            )  # fmt: skip

        self.qkv = merged("qkv", "q_proj", "k_proj", "v_proj")
        self.o = merged("o", "o_proj")
        self.gate_up = merged("gate_up", "gate_proj", "up_proj")
        self.down = merged("down", "down_proj")
        self.projections = (self.qkv, self.o, self.gate_up, self.down)
        self.fp8, self.fp8_backward = self.o.base.fp8, self.o.base.fp8_backward

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Store checkpoint tensors of this layer, quantizing on the way.

        Args:
            weights: by name below the layer (`self_attn.q_proj.weight`, `input_layernorm.weight`, ...).
        """
        of_linear = {linear: projection for projection in self.projections for linear in projection.linears}
        for name, tensor in weights.items():
            owner, _, leaf = name.rpartition(".")
            module = self.get_submodule(owner)
            if isinstance(module, FrozenLinear) and leaf == "weight":
                of_linear[module].load(module, tensor)
            else:
                with torch.no_grad():
                    getattr(module, leaf).copy_(tensor)

    def forward(self, residual: Tensor, around: Surroundings) -> Tensor:
        """[tokens, hidden] to [tokens, hidden].

        Args:
            residual: the layer's input.
            around: rotary tables and the attention plan, the same for all layers.
        """
        factors = [p for projection in self.projections for p in projection.parameters()]
        out: Tensor = _Layer.apply(residual, self, around, *factors)
        return out

    def name_weights(self) -> None:
        """Make the linears' names views of what is stored, after that has changed its place."""
        for projection in self.projections:
            projection.name_weights()

    def show_store(self) -> None:
        """Have what is stored as parameters of this layer instead of the linears, so that it can be cut."""
        for name in ("qkv", "o", "gate_up", "down"):
            projection: Projection = getattr(self, name)
            projection.base.forget_copies()
            projection.forget_names()
            self.add_module(f"{name}_stored", projection.base.store)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FusedLlamaLayer:
        super()._apply(fn, recurse)
        for projection in self.projections:
            projection.merge()
        return self


class _Layer(torch.autograd.Function):
    """Ties `passes.forward` and `passes.backward` into autograd."""

    @staticmethod
    def forward(
        ctx: Any, residual: Tensor, layer: FusedLlamaLayer, around: Surroundings, *factors: Tensor
    ) -> Tensor:
        packed = passes.pack(layer, factors)
        out, kept = passes.forward(layer, packed, residual.detach(), around)
        ctx.layer, ctx.around, ctx.packed = layer, around, packed
        ctx.kept = kept
        return out

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        kept, ctx.kept = ctx.kept, None
        if kept is None:
            raise RuntimeError("the fused layer's backward can run once: what it kept is released as it goes")
        d_input, d_factors = passes.backward(
            ctx.layer, ctx.packed, kept, ctx.around, upstream[0].contiguous(), ctx.needs_input_grad[0]
        )
        return d_input, None, None, *d_factors
