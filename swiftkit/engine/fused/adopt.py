"""Decoder layers of transformers' models, exchanged whole for fused ones where they can serve."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from swiftkit.engine.attention import AttentionPlan
from swiftkit.engine.exchange import select_targets
from swiftkit.engine.fused.base import BaseKind, kind_of
from swiftkit.engine.fused.layer import LINEARS, FusedLlamaLayer, LayerShape
from swiftkit.engine.fused.memory import MemoryPolicy, choose
from swiftkit.engine.fused.passes import Surroundings
from swiftkit.engine.head import CHUNK_BYTES
from swiftkit.engine.kernels.rope import Heads
from swiftkit.engine.tensor_parallel import TensorParallel
from swiftkit.errors import UserError
from swiftkit.formats.peft import LoraSpec
from swiftkit.parallel.collectives import Sharding
from swiftkit.parallel.rules import Cuts, Rule, cuts
from swiftkit.support import why_plain

LAYERS = "model.layers"


class FusedDecoderLayer(FusedLlamaLayer):
    """A fused layer that is called as transformers calls its own."""

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        attention_plan: AttentionPlan,
        **_: Any,
    ) -> Tensor:
        """[1, tokens, hidden] to the same.

        Args:
            hidden_states: the residual stream.
            position_embeddings: cosine and sine, [1, tokens, head_dim] each.
            attention_plan: who may look at whom.
        """
        cos, sin = position_embeddings
        around = Surroundings(cos[0], sin[0], attention_plan)
        return super().forward(hidden_states[0], around)[None]


def fuse_layers(
    model: nn.Module,
    lora: LoraSpec | None,
    *,
    base: BaseKind,
    dtype: torch.dtype,
    device: torch.device,
    tokens: int = 0,
    required: bool = False,
    tp: TensorParallel | None = None,
    parts: int = 1,
) -> bool:
    """Exchange every decoder layer, on the meta device, for a fused one with room for its weights.

    Where they are to lie in parts on several ranks, room is made later, layer by layer.

    Args:
        model: as transformers describes it.
        lora: the adapter, or None.
        base: storage of the frozen weights.
        dtype, device: of the layers.
        tokens: of the largest micro-batch; the memory policy is chosen for it, where it is given.
        required: raise instead of leaving the model as it is.
        tp: how the model is cut over ranks, which all come to the same choice.
        parts: ranks that the layers' weights are to be parted over.

    Returns:
        Whether the layers were exchanged.

    Raises:
        UserError: when fused layers are required and cannot serve.
    """
    reason = why_not(model.config, lora) or (None if tp is None else _why_not_cut(model.config, tp))
    if reason is not None:
        if required:
            raise UserError(f"fused layers cannot serve here: {reason}")
        return False
    shape = layer_shape(model.config)
    shape = shape if tp is None else _part_of(shape, tp.cuts)
    targets = set() if lora is None else select_targets(model, lora.target_modules)
    layers = model.get_submodule(LAYERS)
    count = len(list(layers.children()))
    policy = _policy(model, shape, base, lora, tokens, device, parts)
    for index in range(count):
        adapters = {name: lora for name in LINEARS if lora and f"{LAYERS}.{index}.{name}" in targets}
        fused = FusedDecoderLayer(
            shape,
            base=kind_of(f"{LAYERS}.{index}.", base, count),
            lora=adapters,
            dtype=dtype,
            device=device if parts == 1 else torch.device("meta"),
            index=index,
            two_copies=policy.two_copies,
            recompute_mlp=policy.recompute_mlp,
            shardings=None if tp is None else _shardings(tp),
        )
        layers[index] = fused  # type: ignore[operator]
    return True


def _policy(
    model: nn.Module,
    shape: LayerShape,
    base: BaseKind,
    lora: LoraSpec | None,
    tokens: int,
    device: torch.device,
    parts: int,
) -> MemoryPolicy:
    if not tokens or device.type != "cuda":
        return MemoryPolicy()
    config: Any = model.config
    vocabulary = config.vocab_size * config.hidden_size
    head = 2 * vocabulary * (1 if config.tie_word_embeddings else 2) + (vocabulary if "fp8" in base else 0)
    rank = 0 if lora is None else lora.rank
    # float32: an adapter's values, gradient and two moments.
    adapters = 16 * config.num_hidden_layers * rank * sum(sum(shape.out_in(name)) for name in LINEARS)
    ends = set() if lora is None else {name.rpartition(".")[2] for name in lora.modules_to_save}
    # Beside its weight, what is trained whole has gradient, float32 value and moments.
    whole = 14 * vocabulary * len(ends)
    free, _ = torch.cuda.mem_get_info(device)
    return choose(
        shape,
        base,
        layers=config.num_hidden_layers,
        tokens=tokens,
        free=free,
        parts=parts,
        other=head + adapters + whole + 3 * CHUNK_BYTES["cuda"],
    )


def why_not(config: Any, lora: LoraSpec | None) -> str | None:
    """What keeps fused layers from serving a model, or None where they can."""
    family = config.model_type
    if family not in ("llama", "mistral", "qwen2"):
        return f"there are none for the family {family}"
    if family == "mistral" and config.sliding_window is not None:
        return "a sliding window"
    if family == "qwen2" and config.use_sliding_window:
        return "a sliding window"
    if getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False):
        return "biases"
    if config.hidden_act != "silu":
        return f"the activation {config.hidden_act}"
    if lora is not None and lora.dropout:
        return "LoRA dropout"
    if lora is not None and (lacking := why_plain(lora.features)) is not None:
        return lacking
    try:
        layer_shape(config).check()
    except ValueError as limit:
        return str(limit)
    return None


def _part_of(shape: LayerShape, cuts: Cuts) -> LayerShape:
    """One rank's part of a layer."""
    heads = Heads(cuts.heads, cuts.key_heads, shape.heads.width)
    return replace(shape, heads=heads, inter=cuts.parts["inter"].size)


def _shardings(tp: TensorParallel) -> dict[str, Sharding]:
    """Of the merged projections, as a family with fused checkpoints would have them."""
    table = {
        "qkv": Rule("column", ("query", "key", "key")),
        "o": Rule("row", ("query",)),
        "gate_up": Rule("column", ("inter", "inter")),
        "down": Rule("row", ("inter",)),
    }
    return {
        name: Sharding(rule.style == "row", tp.cuts.shard(rule), tp.ranks) for name, rule in table.items()
    }


def _why_not_cut(config: Any, tp: TensorParallel) -> str | None:
    """What keeps fused layers from serving any of the ranks."""
    for rank in range(tp.ranks.size):
        part = cuts(config, size=tp.ranks.size, rank=rank, rows=config.vocab_size)
        try:
            _part_of(layer_shape(config), part).check()
        except ValueError as limit:
            return f"on rank {rank} of {tp.ranks.size}, {limit}"
    return None


def layer_shape(config: Any) -> LayerShape:
    """The numbers of the family's decoder layers."""
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return LayerShape(
        hidden=config.hidden_size,
        inter=config.intermediate_size,
        heads=Heads(config.num_attention_heads, config.num_key_value_heads, width),
        eps=config.rms_norm_eps,
        qkv_bias=config.model_type == "qwen2",
    )
