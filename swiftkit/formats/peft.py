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
# Parts of PEFT's LoRA that change what an adapter computes and that we do not have.
REFUSED = (
    "use_dora",
    "rank_pattern",
    "alpha_pattern",
    "modules_to_save",
    "layer_replication",
    "fan_in_fan_out",
)


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
        UserError: for a folder without one, or one that uses parts of PEFT's LoRA that we do not have.
    """
    from safetensors.torch import load_file

    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise UserError(f"{folder} has no {name}: it is not an adapter")
    config: dict[str, Any] = json.loads((folder / CONFIG).read_text())
    unknown = [name for name in REFUSED if config.get(name)]
    if config.get("peft_type") != "LORA" or unknown or config.get("bias", "none") != "none":
        what = ", ".join(unknown) or f"{config.get('peft_type')} with bias {config.get('bias')}"
        raise UserError(f"{folder / CONFIG}: adapters with {what} are not served")
    tensors = {
        name.removeprefix(PREFIX).removesuffix(".weight"): tensor
        for name, tensor in load_file(folder / WEIGHTS).items()
    }
    rank, alpha = int(config["r"]), float(config["lora_alpha"])
    spec = LoraSpec(
        rank=rank,
        alpha=alpha * math.sqrt(rank) if config.get("use_rslora") else alpha,
        dropout=float(config.get("lora_dropout", 0.0)),
    )
    targets = sorted({name.rpartition(".")[0] for name in tensors})
    return replace(spec, target_modules=tuple(targets)), tensors


def _shortest(targets: set[str], linear_names: set[str]) -> list[str]:
    leaves = {name.rpartition(".")[2] for name in targets}
    reached = {name for name in linear_names if name.rpartition(".")[2] in leaves}
    return sorted(leaves) if reached == targets else sorted(targets)
