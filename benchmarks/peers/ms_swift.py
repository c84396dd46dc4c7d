"""ms-swift's own pipeline, fed with token ids instead of text."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from swift.callbacks import callbacks_map
from swift.pipelines.train.sft import SwiftSft

from peers.meter import Meter
from peers.trainer_callback import MeterCallback, training_arguments
from peers.workload import BASE_WEIGHT, TARGETS


def run(meter: Meter, *, base: str, checkpointing: bool | str, liger: bool) -> None:
    """Train; `base` is bf16."""
    if base != "bf16":
        raise ValueError("this peer has a bf16 base")
    workload = meter.workload

    class FullWindows(SwiftSft):
        """Everything of the library's, but for the data."""

        def _prepare_dataset(self) -> list[Any]:
            return [workload.rows(), None]

        def train(self, trainer: Any) -> Any:
            meter.loaded(trainer.model.get_parameter(BASE_WEIGHT))
            return super().train(trainer)

    callbacks_map["meter"] = lambda args, trainer: MeterCallback(meter)
    options: dict[str, Any] = training_arguments(workload) | {
        "model": str(workload.folder),
        "model_type": "llama",
        "template": "llama3_2",
        "check_model": False,
        "report_to": "none",
        "dataset": "none",
        "tuner_type": "lora",
        "target_modules": TARGETS,
        "lora_rank": workload.rank,
        "lora_alpha": workload.alpha,
        "lora_dropout": 0.0,
        "torch_dtype": "bfloat16",
        "attn_impl": "sdpa",
        "max_length": workload.length,
        "train_dataloader_shuffle": False,
        "gradient_checkpointing": bool(checkpointing),
        "use_liger_kernel": liger,
        "use_cpu": not torch.cuda.is_available(),
        "eval_strategy": "no",
        "callbacks": ["meter"],
        "output_dir": tempfile.mkdtemp(),
    }
    FullWindows(_arguments(options)).main()
    meter.finish()


def _arguments(options: dict[str, Any]) -> list[str]:
    """As the command line has them."""
    arguments: list[str] = []
    for name, value in options.items():
        values = value if isinstance(value, list) else [value]
        arguments += [f"--{name}", *(str(v).lower() if isinstance(v, bool) else str(v) for v in values)]
    return arguments
