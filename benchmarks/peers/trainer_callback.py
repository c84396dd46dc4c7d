"""Times the peers that train with transformers' Trainer."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from peers.meter import Meter
from peers.workload import Workload


class MeterCallback(TrainerCallback):
    """Marks every step, and asks for a log of the first and of the last one alone.

    A log holds the mean loss since the last log, so the step before the last one is logged too.
    """

    def __init__(self, meter: Meter):
        self.meter = meter
        last = meter.workload.total_steps
        self.logged = {1, last - 1, last}

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """After the optimizer's step."""
        self.meter.step()
        control.should_log = state.global_step in self.logged

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        """Take loss and gradient norm."""
        if logs and "grad_norm" in logs:
            self.meter.values(float(logs["loss"]), float(logs["grad_norm"]))


def training_arguments(workload: Workload) -> dict[str, Any]:
    """Arguments of Trainer that say the workload and leave out what is not training."""
    return {
        "per_device_train_batch_size": workload.documents,
        "gradient_accumulation_steps": 1,
        "max_steps": workload.total_steps,
        "learning_rate": workload.learning_rate,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": workload.max_grad_norm,
        "optim": "adamw_torch_fused",
        "seed": workload.seed,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": [],
    }
