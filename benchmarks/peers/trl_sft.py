"""TRL's SFTTrainer, over a bf16 base or over bitsandbytes' NF4."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer

from peers.meter import Meter
from peers.trainer_callback import MeterCallback, training_arguments
from peers.workload import BASE_WEIGHT, TARGETS


def run(meter: Meter, *, base: str, checkpointing: bool | str, liger: bool) -> None:
    """Train; `base` is bf16 or nf4."""
    workload = meter.workload
    device = "cuda" if torch.cuda.is_available() else "cpu"
    load: dict[str, Any] = {"dtype": torch.bfloat16, "device_map": device, "attn_implementation": "sdpa"}
    if base == "nf4":
        load["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16,
            bnb_4bit_use_double_quant=True,
        )  # fmt: skip
    elif base != "bf16":
        raise ValueError("this peer has a bf16 or an NF4 base")
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(workload.folder, **load),
        args=SFTConfig(
            **training_arguments(workload),
            output_dir=tempfile.mkdtemp(),
            bf16=True,
            use_cpu=device == "cpu",
            max_length=workload.length,
            packing=False,  # every row fills its window
            train_sampling_strategy="sequential",
            dataset_kwargs={"skip_prepare_dataset": True},
            gradient_checkpointing=bool(checkpointing),
            gradient_checkpointing_kwargs={"use_reentrant": False},
            use_liger_kernel=liger,
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list(workload.rows()),
        processing_class=AutoTokenizer.from_pretrained(workload.folder),
        peft_config=LoraConfig(
            r=workload.rank, lora_alpha=workload.alpha, target_modules=TARGETS, task_type="CAUSAL_LM"
        ),
        callbacks=[MeterCallback(meter)],
    )
    meter.loaded(trainer.model.get_parameter(BASE_WEIGHT))
    trainer.train()
    meter.finish()
