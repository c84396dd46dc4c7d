"""Forward and backward of a decoder layer, written out: about a dozen launches forward, two dozen backward.

Every element-wise pass does all there is to do while its rows are on the chip: the adapter's B product of the
linear before, the function itself, the cast for the product after, and that one's A product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from swiftkit.engine.attention import AttentionPlan
from swiftkit.engine.fused.attention import Attended, attention, attention_backward
from swiftkit.engine.fused.projection import Factors, Projection
from swiftkit.engine.kernels.adapter_gradient import adapter_gradient
from swiftkit.engine.kernels.norm import Normed, norm_backward_cast, norm_cast
from swiftkit.engine.kernels.outliers import carry, carry_swiglu
from swiftkit.engine.kernels.project import add_low_rank, cast_project
from swiftkit.engine.kernels.rope import rope, rope_backward_cast
from swiftkit.engine.kernels.rows import SLICES, Rows
from swiftkit.engine.kernels.swiglu import swiglu_backward_cast, swiglu_cast

if TYPE_CHECKING:
    from swiftkit.engine.fused.layer import FusedLlamaLayer


class Packed(NamedTuple):
    """The adapters of a layer's four projections; None where a projection has none."""

    qkv: Factors | None
    o: Factors | None
    gate_up: Factors | None
    down: Factors | None


@dataclass(frozen=True)
class Surroundings:
    """What a layer reads beside its input: the same for all layers of a batch.

    Args:
        cos, sin: [tokens, head_dim] of the rotary embedding.
        plan: the documents.
    """

    cos: Tensor
    sin: Tensor
    plan: AttentionPlan


@dataclass
class Kept:
    """What the forward keeps for the backward. Fields that a memory policy drops are None and made again."""

    residual: Tensor
    rstd: Tensor
    x: Rows | None
    t_qkv: Tensor | None
    qkv: Tensor
    attended: Attended
    t_o: Tensor | None
    residual_mlp: Tensor
    rstd_mlp: Tensor
    x_mlp: Rows | None
    t_gate_up: Tensor | None
    gate_up: Rows | None
    h: Rows | None
    t_down: Tensor | None


def pack(layer: FusedLlamaLayer, factors: tuple[Tensor, ...]) -> Packed:
    """The adapters in the compute type, in two launches a layer."""
    places: list[Tensor] = []
    start = 0
    packed: list[Factors | None] = []
    scaled: list[Tensor] = []
    for projection in layer.projections:
        count = len(projection.parameters())
        packed.append(projection.plan_pack(factors[start : start + count], places))
        start += count
        made = packed[-1]
        if made is not None and projection.scaling != 1.0:
            scaled.append(made.b)
    if places:
        torch._foreach_copy_(places, [factor.detach() for factor in factors])
    if scaled:
        scalings = [p.scaling for p in layer.projections if p.rank and p.scaling != 1.0]
        torch._foreach_mul_(scaled, scalings)
    return Packed(*packed)


def forward(
    layer: FusedLlamaLayer, packed: Packed, residual: Tensor, around: Surroundings
) -> tuple[Tensor, Kept]:
    """The layer's output [tokens, hidden], and what the backward needs."""
    normed = norm_cast(
        residual, weight=layer.input_layernorm.weight, eps=layer.shape.eps, fp8=layer.fp8, a=_a(packed.qkv),
        room=layer.qkv.base.carried.room,
    )  # fmt: skip
    _carry_norm(layer.qkv, normed, layer.input_layernorm.weight)
    projected = layer.qkv.base.forward(normed.x)
    qkv = rope(
        projected.data, heads=layer.shape.heads, cos=around.cos, sin=around.sin, row_scale=projected.scale,
        bias=layer.qkv.bias(), t=normed.t, b=_b(packed.qkv),
    )  # fmt: skip
    attended = attention(
        qkv, heads=layer.shape.heads, plan=around.plan, scaling=layer.shape.scaling, layer=layer.index
    )
    o_rows, t_o = cast_project(
        attended.out, factor=_a_transposed(packed.o), fp8=layer.fp8, room=layer.o.base.carried.room
    )
    if layer.o.base.carried.channels is not None:
        carry(o_rows, attended.out, layer.o.base.carried.channels)
    attention_out, t_o_whole = _sum(layer, layer.o.base.forward(o_rows).data, t_o)
    mlp = norm_cast(
        residual, weight=layer.post_attention_layernorm.weight, eps=layer.shape.eps, fp8=layer.fp8,
        y=attention_out, t=t_o_whole, b=_b(packed.o), a=_a(packed.gate_up),
        room=layer.gate_up.base.carried.room,
    )  # fmt: skip
    del o_rows, attention_out
    _carry_norm(layer.gate_up, mlp, layer.post_attention_layernorm.weight)
    gate_up = layer.gate_up.base.forward(mlp.x)
    h, t_down = swiglu_cast(
        gate_up.data, row_scale=gate_up.scale, fp8=layer.fp8, t=mlp.t, b=_b(packed.gate_up),
        a=_a(packed.down), room=layer.down.base.carried.room,
    )  # fmt: skip
    if layer.down.base.carried.channels is not None:
        carry_swiglu(h, gate_up.data, layer.down.base.carried.channels, t=mlp.t, b=_b(packed.gate_up))
    mlp_out, t_down_whole = _sum(layer, layer.down.base.forward(h).data, t_down)
    out = add_low_rank(mlp_out, t=t_down_whole, b=_b(packed.down), residual=mlp.residual)
    again = layer.recompute_mlp
    kept = Kept(
        residual, normed.rstd, normed.x if layer.fp8 else None, normed.t, qkv, attended, t_o,
        mlp.residual, mlp.rstd, mlp.x if layer.fp8 else None, mlp.t, None if again else gate_up,
        h if layer.fp8 and not again else None, t_down,
    )  # fmt: skip
    return out, kept


def backward(
    layer: FusedLlamaLayer, packed: Packed, kept: Kept, around: Surroundings, d_out: Tensor, wants_input: bool
) -> tuple[Tensor | None, list[Tensor]]:
    """Gradients of the layer's input (None if not wanted) and of its adapters, in order."""
    gradients = _Gradients(layer, kept)
    d_residual, g_o, u_o = _mlp_backward(layer, packed, kept, d_out, gradients)
    gradients.add(layer.o, u_o, Rows(kept.attended.out, None), kept.t_o, g_o)
    d_attended = add_low_rank(layer.o.base.backward(g_o), t=u_o, b=_a_transposed(packed.o))
    dq, dk, dv = attention_backward(
        d_attended, kept.qkv, kept.attended, heads=layer.shape.heads, plan=around.plan,
        scaling=layer.shape.scaling,
    )  # fmt: skip
    turned = rope_backward_cast(
        dq, dk, dv, qkv=kept.qkv, heads=layer.shape.heads, cos=around.cos, sin=around.sin,
        fp8=layer.fp8_backward, col_scale=layer.qkv.base.col_scale, bias=layer.qkv.bias(),
        b=_b(packed.qkv),
    )  # fmt: skip
    del dq, dk, dv, d_attended
    x = kept.x or Rows(kept.residual, kept.rstd)
    col_factor = layer.input_layernorm.weight if kept.x is None else None
    gradients.add(layer.qkv, turned.u, x, kept.t_qkv, turned.g, col_factor)
    if not wants_input:
        return None, gradients.finish()
    dx, u = _sum(layer, layer.qkv.base.backward(turned.g), turned.u)
    dot, _ = _sum(layer, turned.dot)
    normed = norm_backward_cast(
        d_residual, dx=dx, u=u, a=_a(packed.qkv),
        residual=kept.residual, rstd=kept.rstd, weight=layer.input_layernorm.weight, dot=dot,
        fp8=layer.fp8_backward, wants_g=False,
    )  # fmt: skip
    return normed.d_residual, gradients.finish()


def _mlp_backward(
    layer: FusedLlamaLayer, packed: Packed, kept: Kept, d_out: Tensor, gradients: _Gradients
) -> tuple[Tensor, Rows, Tensor | None]:
    """Gradient of the residual between attention and MLP; its cast for o, and its product with o's B."""
    g_down, u_down = cast_project(
        d_out, factor=_b(packed.down), fp8=layer.fp8_backward, col_scale=layer.down.base.col_scale
    )
    gate_up = kept.gate_up or layer.gate_up.base.forward(_mlp_input(layer, kept))
    inner = swiglu_backward_cast(
        layer.down.base.backward(g_down), u=u_down, a=_a(packed.down), raw=gate_up.data,
        row_scale=gate_up.scale, col_scale=layer.gate_up.base.col_scale, t=kept.t_gate_up,
        b=_b(packed.gate_up), fp8=layer.fp8_backward, wants_h=kept.h is None and packed.down is not None,
    )  # fmt: skip
    del gate_up
    kept.gate_up = None
    if packed.down is not None:
        h = kept.h if inner.h is None else Rows(inner.h, None)
        assert h is not None
        gradients.add(layer.down, u_down, h, kept.t_down, g_down)
    dx, u = _sum(layer, layer.gate_up.base.backward(inner.g), inner.u)
    dot, _ = _sum(layer, inner.dot)
    normed = norm_backward_cast(
        d_out, dx=dx, u=u, a=_a(packed.gate_up),
        residual=kept.residual_mlp, rstd=kept.rstd_mlp,
        weight=layer.post_attention_layernorm.weight, dot=dot, fp8=layer.fp8_backward, wants_g=True,
        col_scale=layer.o.base.col_scale, b=_b(packed.o),
    )  # fmt: skip
    x = kept.x_mlp or Rows(kept.residual_mlp, kept.rstd_mlp)
    weight = layer.post_attention_layernorm.weight
    gradients.add(layer.gate_up, inner.u, x, kept.t_gate_up, inner.g, None if layer.fp8 else weight)
    assert normed.g is not None
    return normed.d_residual, normed.g, normed.u


def _sum(
    layer: FusedLlamaLayer, part: Tensor, low_rank: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """What the ranks of a cut layer have, added up: a product, and the adapter's inner one beside it.

    Sums are kept apart from the ranks' own parts: gradients of A and B are made of those, and added up once
    a step.
    """
    if layer.ranks is None:
        return part, low_rank
    return layer.ranks.sum(part), None if low_rank is None else layer.ranks.sum(low_rank)


def _carry_norm(projection: Projection, normed: Normed, weight: Tensor) -> None:
    """Put the carried channels of a norm's output behind its rows, where the product reads them."""
    channels = projection.base.carried.channels
    if channels is not None:
        carry(normed.x, normed.residual, channels, weight=weight, rstd=normed.rstd)


def _mlp_input(layer: FusedLlamaLayer, kept: Kept) -> Rows:
    """The MLP's normalized input, made again where it was not kept."""
    if kept.x_mlp is not None:
        return kept.x_mlp
    weight = layer.post_attention_layernorm.weight
    return norm_cast(kept.residual_mlp, weight=weight, eps=layer.shape.eps, fp8=layer.fp8).x


class _Gradients:
    """Partial sums of all adapter gradients of a layer, side by side, summed in one launch."""

    def __init__(self, layer: FusedLlamaLayer, kept: Kept):
        self.projections = layer.projections
        self.starts: dict[int, int] = {}
        total = 0
        for projection in self.projections:
            self.starts[id(projection)] = total
            total += projection.gradient_size
        dtype = torch.float64 if kept.residual.dtype == torch.float64 else torch.float32
        self.partial = torch.empty(SLICES, total, dtype=dtype, device=kept.residual.device)

    def add(
        self, projection: Projection, u: Tensor | None, x: Rows, t: Tensor | None, g: Rows,
        col_factor: Tensor | None = None,
    ) -> None:  # fmt: skip
        """dA = u^T x * col_factor, dB = g^T t / channel scale * alpha / rank."""
        if u is None or t is None:
            return
        of_a, of_b, _ = projection.gradient_room(self.partial, self.starts[id(projection)])
        adapter_gradient(u, x.first(projection.in_features), out=of_a, col_factor=col_factor)
        adapter_gradient(
            t, g, out=of_b, factor=projection.scaling, col_divisor=projection.base.col_scale,
            segments=projection.segments,
        )  # fmt: skip

    def finish(self) -> list[Tensor]:
        """The gradients, in the order of the layer's adapter parameters, as views of one flat tensor."""
        flat = self.partial.sum(0)
        return [
            gradient
            for projection in self.projections
            if projection.rank
            for gradient in projection.split_gradient(flat, self.starts[id(projection)])
        ]


def _a(factors: Factors | None) -> Tensor | None:
    return None if factors is None else factors.a


def _a_transposed(factors: Factors | None) -> Tensor | None:
    return None if factors is None else factors.a.T


def _b(factors: Factors | None) -> Tensor | None:
    return None if factors is None else factors.b
