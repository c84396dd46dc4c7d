"""Where AWQ's scales go: a channel that is multiplied in one layer is divided in the layer before it.

Which layer that is, a table says by family; tests hold that folding changes no output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

Kind = Literal["norm", "norm_plus_one", "linear", "second_half"]


@dataclass(frozen=True)
class Fold:
    """Layers that read one input, and the layer whose output it is.

    Args:
        before: a norm, or a linear layer whose outputs reach the others multiplied by something at most.
        after: linear layers, by their names in the block.
        kind: how `before` scales its output: by its weight, by 1 + its weight, by its rows, or by the second
            half of its rows.
    """

    before: str
    after: tuple[str, ...]
    kind: Kind


QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
VALUES = Fold("self_attn.v_proj", ("self_attn.o_proj",), "linear")
UP = Fold("mlp.up_proj", ("mlp.down_proj",), "linear")
FUSED_UP = Fold("mlp.gate_up_proj", ("mlp.down_proj",), "second_half")
LLAMA = (
    Fold("input_layernorm", QKV, "norm"),
    VALUES,
    Fold("post_attention_layernorm", GATE_UP, "norm"),
    UP,
)
GEMMA = (
    Fold("input_layernorm", QKV, "norm_plus_one"),
    VALUES,
    Fold("pre_feedforward_layernorm", GATE_UP, "norm_plus_one"),
    UP,
)
FOLDS: dict[str, tuple[Fold, ...]] = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "qwen3": LLAMA,
    "smollm3": LLAMA,
    "granite": LLAMA,
    "gemma2": GEMMA,
    "gemma3_text": GEMMA,
    "olmo2": (VALUES, UP),  # its norms stand behind its layers
    "phi3": (
        Fold("input_layernorm", ("self_attn.qkv_proj",), "norm"),
        Fold("post_attention_layernorm", ("mlp.gate_up_proj",), "norm"),
        FUSED_UP,
    ),
    "glm4": (
        Fold("input_layernorm", QKV, "norm"),
        VALUES,
        Fold("post_attention_layernorm", ("mlp.gate_up_proj",), "norm"),
        FUSED_UP,
    ),
    "cohere2": (Fold("input_layernorm", (*QKV, *GATE_UP), "norm"), VALUES, UP),
}


def applies(block: nn.Module, fold: Fold) -> bool:
    """Whether the channels are the same ones: with fewer value heads than query heads o_proj's are not."""
    if fold.kind not in ("linear", "second_half"):
        return True
    before, after = block.get_submodule(fold.before), block.get_submodule(fold.after[0])
    assert isinstance(before, nn.Linear) and isinstance(after, nn.Linear)
    outputs = before.out_features // (2 if fold.kind == "second_half" else 1)
    return outputs == after.in_features


@torch.no_grad()
def apply(block: nn.Module, fold: Fold, scales: Tensor, *, stored: torch.dtype) -> tuple[Tensor, list[str]]:
    """Divide the channels of `before` by the scales, and multiply them in `after`.

    Args:
        block: the decoder layer.
        scales: above 0, [channels].
        stored: type in which norms and biases are written. A norm is rounded to it first, and what it could
            not take is not multiplied either, so that nothing is lost.

    Returns:
        The scales as they came out, and the names of norms and biases that changed.
    """
    before = block.get_submodule(fold.before)
    changed = [f"{fold.before}.weight"]
    weight: Tensor = before.weight  # type: ignore[assignment]
    if fold.kind in ("norm", "norm_plus_one"):
        shift = 1.0 if fold.kind == "norm_plus_one" else 0.0
        old = weight.float() + shift
        rounded = (old / scales - shift).to(stored).float()
        new = rounded + shift
        scales = torch.where((old != 0) & (new != 0), old / new, torch.ones_like(old))
        weight.copy_(torch.where((old != 0) & (new != 0), rounded, old - shift))
    else:
        first = weight.shape[0] // 2 if fold.kind == "second_half" else 0
        weight[first:] /= scales[:, None].to(weight.dtype)
        changed = []
        bias: Tensor | None = before.bias  # type: ignore[assignment]
        if bias is not None:
            bias[first:] /= scales.to(bias.dtype)
            bias.copy_(bias.to(stored))
            changed = [f"{fold.before}.bias"]
    for name in fold.after:
        after = block.get_submodule(name)
        assert isinstance(after, nn.Linear)
        after.weight *= scales.to(after.weight.dtype)
    return scales, changed
