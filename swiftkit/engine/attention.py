"""One attention for every family: who may look at whom is a plan, made once a batch for all layers.

Documents that share a row never see each other, whatever the family. transformers' own packed masks leak for
some families without a word: it makes none here, and `attend` below, which reads the plan, is its attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IMPLEMENTATION = "swiftkit"


class KeyValueStore(Protocol):
    """Keys and values of earlier tokens (`generate.cache` has one)."""

    def extend(self, layer: int, segment: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add [kv_heads, new, head_dim] to a segment of the plan; return all of its keys and values."""


@dataclass(frozen=True, eq=False)
class Apart:
    """A row whose segments share others', as kernels take it: each that goes on from one behind a copy of it.

    The copies cost little: attention is a small part of a layer, whose other work is done once.

    Args:
        rows: int64 [tokens and copies], the token of the row at each place.
        first: int64 [tokens], a place of each token.
        plan: the documents.
    """

    rows: Tensor
    first: Tensor
    plan: AttentionPlan

    @classmethod
    def of(cls, lengths: tuple[int, ...], prefixes: tuple[int, ...], device: torch.device) -> Apart:
        """Of segments of these lengths, of which some go on from earlier ones."""
        own = torch.arange(sum(lengths)).split(lengths)
        documents = [
            tokens if prefix < 0 else torch.cat([own[prefix], tokens])
            for segment, (tokens, prefix) in enumerate(zip(own, prefixes, strict=True))
            if segment not in prefixes
        ]
        rows = torch.cat(documents)
        first = torch.empty(sum(lengths), dtype=torch.int64)
        first[rows] = torch.arange(len(rows))  # any of them
        plan = AttentionPlan.of([len(tokens) for tokens in documents], device=device)
        return cls(rows.to(device, non_blocking=True), first.to(device, non_blocking=True), plan)

    def gather(self, x: Tensor) -> Tensor:
        """[tokens, ...] with the copies."""
        return x.index_select(0, self.rows)

    def pick(self, x: Tensor) -> Tensor:
        """One of each token, [tokens, ...]; copies are equal."""
        return x.index_select(0, self.first)


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """The segments of one row of tokens; queries see the keys of their own segment, causally.

    Args:
        lengths: query tokens of each segment, in order; they sum to the row's length.
        cu_seqlens: the same as running sums from 0, int32 [segments + 1], on the row's device.
        store: earlier keys and values, when the row continues documents that were already read.
        prefixes: for each segment an earlier one that it goes on from, whose keys its queries see besides, or
            -1: two answers that share a prompt. Empty where none does.
        apart: the same without any that share, for kernels.
    """

    lengths: tuple[int, ...]
    cu_seqlens: Tensor
    store: KeyValueStore | None = None
    prefixes: tuple[int, ...] = ()
    apart: Apart | None = None

    @classmethod
    def of(
        cls,
        lengths: list[int] | tuple[int, ...],
        *,
        device: torch.device,
        store: KeyValueStore | None = None,
        prefixes: tuple[int, ...] = (),
    ) -> AttentionPlan:
        """A plan for segments of these lengths."""
        assert store is None or not prefixes, "what is read in pieces shares nothing"
        lengths = tuple(lengths)
        apart = Apart.of(lengths, prefixes, device) if prefixes else None
        bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return cls(lengths, bounds.to(device, non_blocking=True), store, prefixes, apart)


@dataclass(frozen=True)
class Rules:
    """What a family asks of its attention, beside causality.

    Args:
        scaling: factor on query-key products.
        window: keys a query sees, itself included; None sees all.
        softcap: scores become softcap * tanh(score / softcap).
        sinks: a learned logit a head [heads] that takes part in the softmax and gives nothing.
    """

    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether fused kernels can serve: nothing but scaling and a window."""
        return self.softcap is None and self.sinks is None


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None = None,
    *,
    scaling: float,
    attention_plan: AttentionPlan,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The function that transformers' attention modules call.

    Args:
        module: the attention module; its `layer_idx` names the layer.
        query: [1, heads, tokens, head_dim].
        key, value: [1, kv_heads, tokens, head_dim].
        attention_plan: the batch's plan; it comes as a keyword of the model's forward.

    Returns:
        [1, tokens, heads, head_dim], and no attention weights.
    """
    rules = Rules(scaling, sliding_window, softcap, s_aux)
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    q, k, v = query[0], key[0], value[0]  # [heads, tokens, head_dim]
    if q.is_cuda and q.dtype == torch.bfloat16 and rules.plain and attention_plan.store is None:
        return _varlen(q, k, v, attention_plan, rules)[None], None
    return by_segment(q, k, v, attention_plan, rules, layer).transpose(0, 1)[None], None


def by_segment(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, rules: Rules, layer: int) -> Tensor:
    """Segment after segment, [heads, tokens, head_dim]: the reference, and the path of CPUs and decoding."""
    outputs = []
    queries, keys, values = (tensor.split(plan.lengths, 1) for tensor in (q, k, v))
    for segment, (q_own, k_own, v_own) in enumerate(zip(queries, keys, values, strict=True)):
        prefix = plan.prefixes[segment] if plan.prefixes else -1
        if prefix >= 0:
            k_own = torch.cat([keys[prefix], k_own], 1)
            v_own = torch.cat([values[prefix], v_own], 1)
        if plan.store is not None:
            k_own, v_own = plan.store.extend(layer, segment, k_own, v_own)
        outputs.append(segment_attention(q_own, k_own, v_own, rules))
    return torch.cat(outputs, 1)


def segment_attention(q: Tensor, k: Tensor, v: Tensor, rules: Rules) -> Tensor:
    """Causal attention of one document; its queries are the last of its keys.

    Args:
        q: [heads, queries, head_dim].
        k, v: [kv_heads, keys, head_dim], keys >= queries.

    Returns:
        [heads, queries, head_dim].
    """
    groups = q.shape[0] // k.shape[0]
    if groups > 1:
        k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
    queries, keys = q.shape[1], k.shape[1]
    windowed = rules.window is not None and keys > rules.window
    if rules.plain and not windowed and (queries == keys or queries == 1):
        # [1, ...]: the fused CPU and GPU kernels of torch take four dimensions only.
        return F.scaled_dot_product_attention(
            q[None], k[None], v[None], is_causal=queries > 1, scale=rules.scaling
        )[0]
    row = torch.arange(keys - queries, keys, device=q.device)[:, None]
    column = torch.arange(keys, device=q.device)[None]
    allowed = column <= row
    if rules.window is not None:
        allowed &= column > row - rules.window
    if rules.plain:
        return F.scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=allowed, scale=rules.scaling
        )[0]
    scores = (q @ k.transpose(1, 2)) * rules.scaling
    if rules.softcap is not None:
        scores = rules.softcap * torch.tanh(scores / rules.softcap)
    scores = scores.masked_fill(~allowed, float("-inf")).float()
    if rules.sinks is not None:
        sinks = rules.sinks.float()[:, None, None].expand(-1, queries, 1)
        return (torch.cat([scores, sinks], -1).softmax(-1)[..., :-1].to(q.dtype)) @ v
    return scores.softmax(-1).to(q.dtype) @ v


def _varlen(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, rules: Rules) -> Tensor:
    """All segments in one FlashAttention call. Gives [tokens, heads, head_dim]."""
    apart = plan.apart
    if apart is not None:
        q, k, v = (apart.gather(x.transpose(0, 1)).transpose(0, 1) for x in (q, k, v))
        return apart.pick(_varlen(q, k, v, apart.plan, rules))
    longest = max(plan.lengths)
    output, *_ = torch.ops.aten._flash_attention_forward(
        q.transpose(0, 1),
        k.transpose(0, 1),
        v.transpose(0, 1),
        plan.cu_seqlens,
        plan.cu_seqlens,
        longest,
        longest,
        0.0,
        True,
        False,
        scale=rules.scaling,
        window_size_left=None if rules.window is None else rules.window - 1,
        window_size_right=None if rules.window is None else 0,
    )
    return output


def register() -> None:
    """Make `attn_implementation="swiftkit"` known to transformers; calling it again changes nothing."""
    from transformers import AttentionInterface

    # Compiled blocks end before the attention and begin again behind it: what depends on the documents, whose
    # number and lengths change with every batch, stays out of them, so nothing is compiled twice.
    AttentionInterface.register(IMPLEMENTATION, torch.compiler.disable(attend))
    # No mask function goes with it: for a name that it does not know transformers makes no mask at all, where
    # for a known one it first looks for packed documents, which waits for the device.
