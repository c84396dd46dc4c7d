"""The rows of the benchmark: which peer, over which base, with or without gradient checkpointing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Row:
    """One row.

    Args:
        peer: a module of this package with `run(meter, *, base, checkpointing, liger, **options)`.
        packages: the folder under `--packages` that its libraries are in.
        title: what the table says.
        base: bf16, fp8, nf4 or nf4-fp8.
        checkpointing: False, True, or the peer's own word for a kind of it.
        liger: whether Liger's kernels are switched on.
        options: what else the peer takes.
    """

    peer: str
    packages: str
    title: str
    base: str = "bf16"
    checkpointing: bool | str = False
    liger: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


# Ours and the strongest peers come first: a run that is cut short has them.
ROWS = {
    "ours-fp8": Row("ours", "ours", "swiftkit, FP8 base", "fp8"),
    "unsloth-bf16": Row("unsloth_lora", "unsloth", "unsloth, bf16 base"),
    "ours-bf16": Row("ours", "ours", "swiftkit, bf16 base"),
    "ours-nf4": Row("ours", "ours", "swiftkit, NF4 base, bf16 products", "nf4"),
    "ours-nf4-fp8": Row("ours", "ours", "swiftkit, NF4 base, FP8 products", "nf4-fp8"),
    "unsloth-nf4": Row("unsloth_lora", "unsloth", "unsloth, NF4 base", "nf4"),
    "unsloth-fp8-offload": Row("unsloth_lora", "unsloth", "unsloth, FP8 base", "fp8", "unsloth"),
    "ms-swift-liger": Row("ms_swift", "swift", "ms-swift + Liger", checkpointing=True, liger=True),
    "trl-liger": Row("trl_sft", "peers", "TRL SFTTrainer + Liger", checkpointing=True, liger=True),
    "unsloth-bf16-offload": Row("unsloth_lora", "unsloth", "unsloth, bf16 base", checkpointing="unsloth"),
    "unsloth-nf4-offload": Row("unsloth_lora", "unsloth", "unsloth, NF4 base", "nf4", "unsloth"),
    "ms-swift": Row("ms_swift", "swift", "ms-swift", checkpointing=True),
    "trl": Row("trl_sft", "peers", "TRL SFTTrainer", checkpointing=True),
    "bnb-peft": Row("trl_sft", "peers", "bitsandbytes NF4 + PEFT, by SFTTrainer", "nf4", checkpointing=True),
    "hf-peft": Row("hf_peft", "peers", "transformers + PEFT, plain loop", checkpointing=True),
    "unsloth-fp8": Row("unsloth_lora", "unsloth", "unsloth, FP8 base", "fp8"),
}

# Of align_throughput.py: the peers first, so that a run that is cut short has what ours is held against.
PAIR_ROWS = {
    "trl-liger": Row("trl_dpo", "peers", "TRL DPOTrainer + Liger", liger=True),
    "trl-liger-cached": Row(
        "trl_dpo",
        "peers",
        "TRL DPOTrainer + Liger, reference precomputed",
        liger=True,
        options={"cached": True},
    ),
    "ours-fp8": Row("ours_dpo", "ours", "swiftkit, FP8 base", "fp8"),
    "ours-bf16": Row("ours_dpo", "ours", "swiftkit, bf16 base"),
    "trl": Row("trl_dpo", "peers", "TRL DPOTrainer"),
    "trl-cached": Row("trl_dpo", "peers", "TRL DPOTrainer, reference precomputed", options={"cached": True}),
    "ours-nf4": Row("ours_dpo", "ours", "swiftkit, NF4 base", "nf4"),
}
