"""TRL's DPOTrainer; its reference is the base with adapters off, in every step or once beforehand."""

from __future__ import annotations

import tempfile
import time
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

from peers.meter import Meter
from peers.pairs import PairWorkload
from peers.trainer_callback import MeterCallback, training_arguments
from peers.workload import BASE_WEIGHT, TARGETS


class Trainer(DPOTrainer):
    """The trainer over rows that are token ids already; it tells how long the reference takes beforehand."""

    reference_s: float | None = None

    def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
        return dataset

    def _precompute_ref_logps(self, *args: Any) -> Any:
        began = time.perf_counter()
        found = super()._precompute_ref_logps(*args)
        self.reference_s = time.perf_counter() - began
        return found


def run(meter: Meter, *, base: str, checkpointing: bool | str, liger: bool, cached: bool = False) -> None:
    """Train over a bf16 base.

    Args:
        meter, base, checkpointing, liger: as every peer's.
        cached: the reference's log-probabilities are computed before training.
    """
    if base != "bf16":
        raise ValueError("this peer has a bf16 base")
    workload: Any = meter.workload
    assert isinstance(workload, PairWorkload)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    names = ("prompt_ids", "chosen_ids", "rejected_ids")
    rows = [
        dict(zip(names, (ids.tolist() for ids in row), strict=True))
        for arrays in workload.pairs()
        for row in zip(*arrays, strict=True)
    ]
    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(
            workload.folder, dtype=torch.bfloat16, device_map=device, attn_implementation="sdpa"
        ),
        args=DPOConfig(
            **training_arguments(workload),
            output_dir=tempfile.mkdtemp(),
            bf16=True,
            use_cpu=device == "cpu",
            beta=workload.beta,
            max_length=workload.length,
            precompute_ref_log_probs=cached,
            train_sampling_strategy="sequential",
            gradient_checkpointing=bool(checkpointing),
            gradient_checkpointing_kwargs={"use_reentrant": False},
            use_liger_kernel=liger,
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(workload.folder),
        peft_config=LoraConfig(
            r=workload.rank, lora_alpha=workload.alpha, target_modules=TARGETS, task_type="CAUSAL_LM"
        ),
        callbacks=[MeterCallback(meter)],
    )
    if trainer.reference_s is not None:
        meter.record["reference_s"] = trainer.reference_s
    meter.loaded(trainer.model.get_parameter(BASE_WEIGHT))
    trainer.train()
    meter.finish()
