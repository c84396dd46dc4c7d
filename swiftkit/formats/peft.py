"""Adapters on disk are PEFT's: its names and its config, so that PEFT, vLLM and others load what we save."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swiftkit.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
# Parts of PEFT's LoRA that change what an adapter computes or holds, and that we do not have.
REFUSED = (
    "alora_invocation_tokens",
    "alpha_pattern",
    "arrow_config",
    "fan_in_fan_out",
    "kasa_config",
    "layer_replication",
    "lora_bias",
    "modules_to_save",
    "monteclora_config",
    "rank_pattern",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_dora",
    "use_qalora",
    "velora_config",
)
# First values that leave the base as it is; others (PiSSA, OLoRA, LoftQ, ...) take them out of its weights.
PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class LoraSpec:
    """The shape of an adapter (Hu et al. 2021, https://arxiv.org/abs/2106.09685).

    Args:
        rank: inner width r of the two factors.
        alpha: the adapter's output is scaled by alpha / rank.
        dropout: probability on the adapter's input, in training only.
        target_modules: `all-linear`, or last parts (or whole names) of module names.
    """

    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    target_modules: tuple[str, ...] = ("all-linear",)


def save_adapter(
    folder: Path,
    tensors: Mapping[str, Tensor],
    *,
    spec: LoraSpec,
    base_model: str,
    linear_names: Iterable[str],
) -> None:
    """Write a PEFT adapter.

    Args:
        folder: exists already.
        tensors: `<module>.lora_A` [rank, in] and `<module>.lora_B` [out, rank].
        spec: rank, alpha and dropout.
        base_model: where the base comes from, a hub id or a folder.
        linear_names: all linear modules of the base, to tell whether last parts of names say the targets.
    """
    from safetensors.torch import save_file

    targets = {name.rpartition(".")[0] for name in tensors}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": spec.rank,
        "lora_alpha": int(spec.alpha) if spec.alpha == int(spec.alpha) else spec.alpha,
        "lora_dropout": spec.dropout,
        "target_modules": _shortest(targets, set(linear_names)),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "use_rslora": False,
        "use_dora": False,
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    named = {f"{PREFIX}{name}.weight": t.detach().cpu().contiguous() for name, t in tensors.items()}
    save_file(named, folder / WEIGHTS, metadata={"format": "pt"})


def load_adapter(folder: Path) -> tuple[LoraSpec, dict[str, Tensor]]:
    """Read a PEFT LoRA adapter: its shape, targets by whole name, and tensors named as in `save_adapter`.

    Raises:
        UserError: for a folder without one, with damaged files, or with an adapter that uses parts of PEFT's
            LoRA that we do not have.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise UserError(f"{folder} has no {name}: it is not an adapter")
    spec = _read_config(folder / CONFIG)
    try:
        found = load_file(folder / WEIGHTS)
    except SafetensorError as broken:
        raise UserError(f"{folder / WEIGHTS} is cut or damaged ({broken}); take another checkpoint") from None
    tensors = {name.removeprefix(PREFIX).removesuffix(".weight"): tensor for name, tensor in found.items()}
    odd = next((name for name in tensors if not name.endswith((".lora_A", ".lora_B"))), None)
    if odd is not None:
        raise UserError(f"{folder / WEIGHTS}: adapters with {odd} are not served")
    targets = sorted({name.rpartition(".")[0] for name in tensors})
    return replace(spec, target_modules=tuple(targets)), tensors


def _read_config(path: Path) -> LoraSpec:
    """Rank, alpha and dropout of PEFT's config, once it is sure that nothing else matters."""
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as broken:
        raise UserError(f"{path} is not JSON ({broken}); take another checkpoint") from None
    refused = [name for name in REFUSED if config.get(name)]
    if config.get("peft_type") != "LORA":
        refused.append(f"peft_type {config.get('peft_type')}")
    if config.get("bias", "none") != "none":
        refused.append(f"bias {config['bias']}")
    if config.get("init_lora_weights") not in PLAIN_STARTS:
        refused.append(f"init_lora_weights {config['init_lora_weights']}")
    if refused:
        raise UserError(f"{path}: adapters with {', '.join(refused)} are not served")
    rank, alpha = int(config["r"]), float(config["lora_alpha"])
    return LoraSpec(
        rank=rank,
        alpha=alpha * math.sqrt(rank) if config.get("use_rslora") else alpha,  # scaled by alpha / sqrt(rank)
        dropout=float(config.get("lora_dropout", 0.0)),
    )


def _shortest(targets: set[str], linear_names: set[str]) -> list[str]:
    leaves = {name.rpartition(".")[2] for name in targets}
    reached = {name for name in linear_names if name.rpartition(".")[2] in leaves}
    return sorted(leaves) if reached == targets else sorted(targets)
