"""How a family's decoder layers are cut over the ranks of tensor parallelism. One table, free of torch.

Heads go by groups: a key-value head and the query heads that read it stay together. With more ranks than
key-value heads, several ranks hold the same one, and share its query heads.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from swiftkit.errors import UserError
from swiftkit.parallel.shards import Range, Shard, evenly, fits

Style = Literal["column", "row", "norm", "partial"]
Part = Literal["query", "key", "inter"]

MOST_RANKS = 64  # up to which sizes are offered
VOCABULARY_UNIT = 16  # rows of the vocabulary that stay together: FP8 products sum over multiples of it
QUANTIZED_UNIT = 64  # blocks of NF4, and of the casts to FP8


@dataclass(frozen=True)
class Rule:
    """What becomes of a module.

    Args:
        style: `column` cuts a linear layer's outputs, `row` its inputs; `norm` is a norm over a width that
            is cut; `partial` is replicated, and each rank sees only its heads' share of its gradient.
        parts: what lies one after another in the dimension that is cut.
    """

    style: Style
    parts: tuple[Part, ...] = ()


_ATTENTION = {
    "self_attn.q_proj": Rule("column", ("query",)),
    "self_attn.k_proj": Rule("column", ("key",)),
    "self_attn.v_proj": Rule("column", ("key",)),
    "self_attn.o_proj": Rule("row", ("query",)),
}
_MLP = {
    "mlp.gate_proj": Rule("column", ("inter",)),
    "mlp.up_proj": Rule("column", ("inter",)),
    "mlp.down_proj": Rule("row", ("inter",)),
}
_FUSED_MLP = {
    "mlp.gate_up_proj": Rule("column", ("inter", "inter")),
    "mlp.down_proj": Rule("row", ("inter",)),
}
_FUSED_ATTENTION = {
    "self_attn.qkv_proj": Rule("column", ("query", "key", "key")),
    "self_attn.o_proj": Rule("row", ("query",)),
}
_HEAD_NORMS = {"self_attn.q_norm": Rule("partial"), "self_attn.k_norm": Rule("partial")}
_WIDE_NORMS = {
    "self_attn.q_norm": Rule("norm", ("query",)),
    "self_attn.k_norm": Rule("norm", ("key",)),
}

RULES: dict[str, dict[str, Rule]] = {
    "llama": {**_ATTENTION, **_MLP},
    "mistral": {**_ATTENTION, **_MLP},
    "qwen2": {**_ATTENTION, **_MLP},
    "qwen3": {**_ATTENTION, **_MLP, **_HEAD_NORMS},
    "smollm3": {**_ATTENTION, **_MLP},
    "olmo2": {**_ATTENTION, **_MLP, **_WIDE_NORMS},
    "phi3": {**_FUSED_ATTENTION, **_FUSED_MLP},
    "glm4": {**_ATTENTION, **_FUSED_MLP},
    "gemma2": {**_ATTENTION, **_MLP},
    "gemma3_text": {**_ATTENTION, **_MLP, **_HEAD_NORMS},
    "granite": {**_ATTENTION, **_MLP},
    "cohere2": {**_ATTENTION, **_MLP},
}


@dataclass(frozen=True)
class Cuts:
    """What one rank has of a decoder layer and of the vocabulary.

    Args:
        heads, key_heads: how many of each it computes.
        parts: the shard of each part, on dimension 0 of its own weight.
        vocabulary: the shard of the rows of embedding and head.
    """

    heads: int
    key_heads: int
    parts: dict[Part, Shard]
    vocabulary: Shard

    def shard(self, rule: Rule) -> Shard:
        """The shard of a module's weight."""
        ranges: list[Range] = []
        again: list[bool] = []
        offset = 0
        for name in rule.parts:
            part = self.parts[name]
            ranges += [(offset + start, offset + stop) for start, stop in part.ranges]
            again += part.again or (False,)
            offset += part.whole
        shared = any(self.parts[name].shared for name in rule.parts)
        return Shard(1 if rule.style == "row" else 0, tuple(ranges), offset, tuple(again), shared)


def cuts(config: Any, *, size: int, rank: int, rows: int) -> Cuts:
    """Cut a model, which `check` has found to fit.

    Args:
        config: of transformers.
        size, rank: of tensor parallelism.
        rows: of the vocabulary.
    """
    heads, key_heads, width = _heads(config)
    group = heads // key_heads
    if size <= key_heads:
        keys = evenly(key_heads, size, rank)
        queries = keys[0] * group, keys[1] * group
        shared, again = False, False
    else:
        copies = size // key_heads
        key, place = divmod(rank, copies)
        keys = key, key + 1
        start, stop = evenly(group, copies, place)
        queries = key * group + start, key * group + stop
        shared, again = copies > 1, place > 0
    inter = config.intermediate_size
    unit = VOCABULARY_UNIT if rows % VOCABULARY_UNIT == 0 and rows >= size * VOCABULARY_UNIT else 1
    return Cuts(
        heads=queries[1] - queries[0],
        key_heads=keys[1] - keys[0],
        parts={
            "query": Shard(0, ((queries[0] * width, queries[1] * width),), heads * width),
            "key": Shard(0, ((keys[0] * width, keys[1] * width),), key_heads * width, (again,), shared),
            "inter": Shard(0, (evenly(inter, size, rank),), inter),
        },
        vocabulary=Shard(0, (evenly(rows, size, rank, unit=unit),), rows),
    )


def check(config: Any, *, size: int, quantized: bool) -> None:
    """Refuse what cannot be cut, while nothing is loaded.

    Args:
        config: of transformers.
        size: of tensor parallelism.
        quantized: whether the frozen weights are stored in 8 or 4 bits.

    Raises:
        UserError: naming what does not divide, and the sizes that would do.
    """
    family = config.model_type
    if family not in RULES:
        raise UserError(
            f"--tensor_parallel_size {size}: there are no rules to cut {family!r} models; leave it at 1"
        )
    reason = _obstacle(config, size, quantized)
    if reason is None:
        return
    limit = min(MOST_RANKS, config.num_attention_heads)
    others = [other for other in range(1, limit + 1) if _obstacle(config, other, quantized) is None]
    if not others:
        raise UserError(
            f"--tensor_parallel_size {size}: {reason}; no size would do, take --base_precision bf16"
        )
    raise UserError(f"--tensor_parallel_size {size}: {reason}; sizes that would do: {_list(others)}")


def _obstacle(config: Any, size: int, quantized: bool) -> str | None:
    heads, key_heads, width = _heads(config)
    if size > key_heads and (size % key_heads or size // key_heads > heads // key_heads):
        return (
            f"{heads} query heads in {key_heads} groups cannot be cut over {size} ranks (fewer ranks than "
            "groups, or a multiple of them and no more than query heads)"
        )
    block = QUANTIZED_UNIT if quantized else 1
    inter = config.intermediate_size
    if not fits(inter, size, block):
        blocks = f" in blocks of {block}, which share a scale" if quantized else ""
        return f"the MLP's down_proj is {inter} wide and cannot be cut into {size} equal parts{blocks}"
    if not quantized:
        return None
    for rank in range(size):
        own = cuts(config, size=size, rank=rank, rows=size)
        for part, count in (("query", own.heads), ("key-value", own.key_heads)):
            if not fits(count * width, 1, block):
                return (
                    f"rank {rank} would have {count} {part} heads, {count * width} wide, no multiple "
                    f"of {block} (o_proj and its like: blocks of {block} share a scale)"
                )
    return None


def _heads(config: Any) -> tuple[int, int, int]:
    """Query heads, key-value heads, and the width of one."""
    heads = config.num_attention_heads
    return heads, config.num_key_value_heads, getattr(config, "head_dim", None) or config.hidden_size // heads


def _list(sizes: Iterable[int]) -> str:
    return ", ".join(map(str, sizes))
