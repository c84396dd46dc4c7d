"""Causal attention inside the layer's own backward: the fastest kernel for the plan, forward and gradient.

On Hopper cuDNN's kernel is about 1.8 times as fast as FlashAttention 2. Documents of one length are a dense
batch for it; packed documents go through its ragged form or FlashAttention, whichever serves.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from swiftkit.engine.attention import Apart, AttentionPlan, Rules, by_segment
from swiftkit.engine.kernels.rope import Heads

aten = torch.ops.aten


class Attended(NamedTuple):
    """What the forward gives and the backward reads.

    Attributes:
        out: [tokens, queries * width].
        state: tensors of the kernel, logsumexp first; empty for the reference.
    """

    out: Tensor
    state: tuple[Tensor, ...]


def attention(qkv: Tensor, *, heads: Heads, plan: AttentionPlan, scaling: float, layer: int = 0) -> Attended:
    """Causal attention of each document with itself, and with the prompt that it shares.

    Args:
        qkv: [tokens, heads.total * heads.width], rotated.
        heads: of its columns.
        plan: the documents.
        scaling: of the scores.
        layer: the layer's number, for a plan that goes on from stored keys and values.
    """
    if plan.apart is not None:
        whole = attention(plan.apart.gather(qkv), heads=heads, plan=plan.apart.plan, scaling=scaling)
        return Attended(plan.apart.pick(whole.out), whole.state)
    if plan.store is not None or not qkv.is_cuda:
        return Attended(_reference(qkv, heads, plan, scaling, layer), ())
    q, k, v = _split(qkv, heads)
    if is_dense(plan):
        q, k, v = (_dense(x, plan) for x in (q, k, v))
        out, lse, _, _, _, _, seed, offset, _ = aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, True, False, scale=scaling
        )
        return Attended(out.transpose(1, 2).reshape(qkv.shape[0], -1), (lse, seed, offset))
    longest = max(plan.lengths)
    out, lse, seed, offset, _ = aten._flash_attention_forward(
        q, k, v, plan.cu_seqlens, plan.cu_seqlens, longest, longest, 0.0, True, False, scale=scaling
    )
    return Attended(out.reshape(qkv.shape[0], -1), (lse, seed, offset))


def attention_backward(
    d_out: Tensor, qkv: Tensor, attended: Attended, *, heads: Heads, plan: AttentionPlan, scaling: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the queries, keys and values, [tokens, columns] each, contiguous.

    Args:
        d_out: [tokens, queries * width].
        qkv, heads, plan, scaling: as the forward had them.
        attended: what it gave.
    """
    if plan.apart is not None:
        return _backward_apart(d_out, qkv, attended, heads=heads, apart=plan.apart, scaling=scaling)
    if not qkv.is_cuda:
        return _reference_backward(d_out, qkv, heads, plan, scaling)
    q, k, v = _split(qkv, heads)
    d, out = (x.view(-1, heads.queries, heads.width) for x in (d_out, attended.out))
    lse, seed, offset = attended.state
    gradients: tuple[Tensor, ...]
    longest = max(plan.lengths)
    if is_dense(plan):
        d, q, k, v, out = (_dense(x, plan) for x in (d, q, k, v, out))
        gradients = aten._scaled_dot_product_cudnn_attention_backward(
            d, q, k, v, out, lse, seed, offset, None, None, None, longest, longest, 0.0, True, scale=scaling
        )
        gradients = tuple(x.transpose(1, 2) for x in gradients)
    else:
        gradients = aten._flash_attention_backward(
            d, q, k, v, out, lse, plan.cu_seqlens, plan.cu_seqlens, longest, longest, 0.0, True, seed, offset,
            scale=scaling,
        )  # fmt: skip
    dq, dk, dv = (x.reshape(qkv.shape[0], -1) for x in gradients)
    return dq, dk, dv


def is_dense(plan: AttentionPlan) -> bool:
    """Whether the documents have one length."""
    return len(set(plan.lengths)) == 1


def _backward_apart(
    d_out: Tensor, qkv: Tensor, attended: Attended, *, heads: Heads, apart: Apart, scaling: float
) -> tuple[Tensor, Tensor, Tensor]:
    """One of each token's copies has its output's gradient; those of its key and value are sums over all.

    The sums are made in float32 at least, as they come in any order.
    """
    d = d_out.new_zeros(len(apart.rows), d_out.shape[1]).index_copy_(0, apart.first, d_out)
    whole = Attended(apart.gather(attended.out), attended.state)
    dq, *others = attention_backward(
        d, apart.gather(qkv), whole, heads=heads, plan=apart.plan, scaling=scaling
    )  # fmt: skip
    sums = []
    for slope in others:
        wide = torch.promote_types(slope.dtype, torch.float32)
        total = slope.new_zeros(len(d_out), slope.shape[1], dtype=wide)
        sums.append(total.index_add_(0, apart.rows, slope.to(wide)).to(slope.dtype))
    return apart.pick(dq), sums[0], sums[1]


def _split(qkv: Tensor, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    by_head = qkv.view(-1, heads.total, heads.width)
    q, k, v = by_head.split([heads.queries, heads.keys, heads.keys], 1)
    return q, k, v


def _dense(x: Tensor, plan: AttentionPlan) -> Tensor:
    """[tokens, heads, width] to [documents, heads, length, width], without a copy."""
    return x.unflatten(0, (len(plan.lengths), plan.lengths[0])).transpose(1, 2)


def _reference(qkv: Tensor, heads: Heads, plan: AttentionPlan, scaling: float, layer: int = 0) -> Tensor:
    q, k, v = (x.transpose(0, 1) for x in _split(qkv, heads))
    return by_segment(q, k, v, plan, Rules(scaling), layer).transpose(0, 1).flatten(1)


def _reference_backward(
    d_out: Tensor, qkv: Tensor, heads: Heads, plan: AttentionPlan, scaling: float
) -> tuple[Tensor, Tensor, Tensor]:
    with torch.enable_grad():
        leaf = qkv.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(_reference(leaf, heads, plan, scaling), leaf, d_out)
    by_head: Any = _split(gradient, heads)
    dq, dk, dv = (x.flatten(1) for x in by_head)
    return dq, dk, dv
