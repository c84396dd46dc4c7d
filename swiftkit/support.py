"""What can be combined: one table, which refuses before anything is loaded and which the docs show.

`python -m swiftkit.support` prints it as Markdown; docs/tuning.md holds the same lines.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from swiftkit.config import DpoConfig, RewardConfig
from swiftkit.errors import UserError

if TYPE_CHECKING:
    from swiftkit.config import RunConfig

OUTSIDE_LAYERS = ("embed_tokens", "lm_head")  # modules that no decoder layer holds
SHAPE = ("lora_rank", "lora_alpha", "target_modules")
PACKED = ("int8", "int4", "int3")  # what a quantized folder holds
QUANTIZED = ("fp8", "nf4", *PACKED)
_UNQUANTIZED = "take --base_precision bf16 (on a CPU fp32), or leave it on auto"
_UNPACKED = "take --base_precision bf16 (on a CPU fp32), which unpacks the folder's weights"
_ADAPTER = "it belongs to an adapter, and the whole model is trained"


@dataclass(frozen=True)
class Feature:
    """One way to train, and what keeps it from others.

    Args:
        flag: as a user writes it.
        quantized: why it cannot be had over a base in 8 bits or fewer; None where it can.
        fused: why fused layers leave it to plain ones; None where they serve it.
        never_with: names of features that exclude it, with the reason.
    """

    flag: str
    quantized: str | None = None
    fused: str | None = None
    never_with: tuple[tuple[str, str], ...] = ()


_NOT_FULL = (("full", _ADAPTER),)

FEATURES: dict[str, Feature] = {
    "lora": Feature("--tuner_type lora"),
    "shape": Feature("--lora_rank, --lora_alpha, --target_modules", never_with=_NOT_FULL),
    "dropout": Feature("--lora_dropout", fused="they have no dropout", never_with=_NOT_FULL),
    "rslora": Feature("--use_rslora", never_with=_NOT_FULL),
    "loraplus": Feature("--loraplus_lr_ratio", never_with=_NOT_FULL),
    "dora": Feature(
        "--use_dora",
        quantized="the lengths of a quantized weight's rows would be those of its rounding",
        fused="they have no place for a row's length",
        never_with=_NOT_FULL,
    ),
    "pissa": Feature(
        "--init_lora_weights pissa",
        quantized="the rest of the weight would be rounded, and what is saved not fit the original base",
        fused="their merged weights are not taken apart",
        never_with=(
            *_NOT_FULL,
            ("init_adapter", "both say with which values the adapter starts"),
            ("dora", "the lengths of the rows are those of the whole weight, not of its rest"),
        ),
    ),
    "modules": Feature("--modules_to_save embed_tokens lm_head", never_with=_NOT_FULL),
    "inner_modules": Feature(
        "--modules_to_save with others",
        quantized="what is trained whole is not stored in 8 or 4 bits",
        fused="all but the adapters is frozen in them",
        never_with=_NOT_FULL,
    ),
    "new_tokens": Feature("--new_tokens"),
    "init_adapter": Feature(
        "--init_adapter",
        never_with=(*_NOT_FULL, ("new_tokens", "the vocabulary comes with the adapter")),
    ),
    "full": Feature(
        "--tuner_type full",
        quantized="what is trained is not stored in 8 or 4 bits",
        fused="all but the adapters is frozen in them",
    ),
    "adamw_8bit": Feature("--optim adamw_8bit"),
    "dpo": Feature("swiftkit dpo"),
    "reward": Feature("swiftkit reward"),
}


def asked(config: RunConfig) -> set[str]:
    """The features that a config uses."""
    full = config.tuner_type == "full"
    inner = [name for name in config.modules_to_save if name.rpartition(".")[2] not in OUTSIDE_LAYERS]
    fields = type(config).model_fields
    uses = {
        "full": full,
        "lora": not full,
        "shape": any(getattr(config, name) != fields[name].default for name in SHAPE),
        "dropout": config.lora_dropout > 0,
        "rslora": config.use_rslora,
        "loraplus": config.loraplus_lr_ratio is not None,
        "dora": config.use_dora,
        "pissa": config.init_lora_weights.startswith("pissa"),
        "modules": len(inner) < len(config.modules_to_save),
        "inner_modules": bool(inner),
        "new_tokens": bool(config.new_tokens),
        "init_adapter": config.init_adapter is not None,
        "adamw_8bit": config.optim == "adamw_8bit",
        "dpo": isinstance(config, DpoConfig),
        "reward": isinstance(config, RewardConfig),
    }
    return {name for name, used in uses.items() if used}


def check(features: Collection[str], base_precision: str) -> None:
    """Refuse what cannot be combined.

    Args:
        features: names of `FEATURES`.
        base_precision: fp32, bf16, fp8, nf4, int8 to int3, or auto, which chooses one that fits.

    Raises:
        UserError: naming both, the reason and the mend.
    """
    for name, feature in FEATURES.items():
        if name not in features:
            continue
        for other, reason in feature.never_with:
            if other in features:
                raise UserError(f"{feature.flag} and {FEATURES[other].flag}: {reason}; leave one of them out")
        if feature.quantized is not None and base_precision in QUANTIZED:
            mend = _UNPACKED if base_precision in PACKED else _UNQUANTIZED
            raise UserError(
                f"{feature.flag} and --base_precision {base_precision}: {feature.quantized}; {mend}"
            )


def check_optimizer(optim: str) -> None:
    """Refuse an optimizer whose package is not there.

    Raises:
        UserError: with the command that installs it.
    """
    if optim == "adamw_8bit" and find_spec("bitsandbytes") is None:
        raise UserError(
            "--optim adamw_8bit needs bitsandbytes, which is not installed: pip install 'swiftkit[8bit]', or "
            "take --optim adamw_torch"
        )


def why_plain(features: Collection[str]) -> str | None:
    """What of these fused layers do not have, or None where they serve them all."""
    return next(
        (
            f"{feature.flag} ({feature.fused})"
            for name, feature in FEATURES.items()
            if name in features and feature.fused is not None
        ),
        None,
    )


def table() -> str:
    """The table as Markdown, and below it the reason of every cell that is not a plain yes."""
    lines = ["| | fp32, bf16 | fp8, nf4, int8 to int3 | fused layers | not with |", "|---|---|---|---|---|"]
    notes: list[str] = []
    for feature in FEATURES.values():
        rivals = ", ".join(f"`{FEATURES[other].flag}`" for other, _ in feature.never_with)
        cells = [
            "yes",
            "no" if feature.quantized else "yes",
            "plain ones" if feature.fused else "yes",
            rivals,
        ]
        lines.append(f"| `{feature.flag}` | {' | '.join(cells)} |")
        if feature.quantized:
            notes.append(
                f"- `{feature.flag}` over fp8, nf4 or a quantized folder: {feature.quantized}; "
                f"{_UNQUANTIZED}."
            )
        if feature.fused:
            notes.append(
                f"- `{feature.flag}` in fused layers: {feature.fused}; plain layers are taken instead."
            )
        notes += [
            f"- `{feature.flag}` with `{FEATURES[other].flag}`: {reason}."
            for other, reason in feature.never_with
            if reason != _ADAPTER
        ]
    adapter = f"- What is not with `{FEATURES['full'].flag}`: {_ADAPTER}."
    return "\n".join([*lines, "", *notes, adapter])


if __name__ == "__main__":
    print(table())
