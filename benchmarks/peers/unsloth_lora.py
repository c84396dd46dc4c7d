"""unsloth's FastLanguageModel in a plain loop; its own kernels, fused loss and checkpointing."""

from __future__ import annotations

import torch
from unsloth import FastLanguageModel  # before transformers, which it patches

from peers import loop
from peers.meter import Meter
from peers.workload import BASE_WEIGHT, TARGETS

LOAD = {
    "bf16": {"load_in_4bit": False, "load_in_16bit": True},
    "nf4": {"load_in_4bit": True},
    "fp8": {"load_in_4bit": False, "load_in_fp8": True},  # a scale per row
}


def run(meter: Meter, *, base: str, checkpointing: bool | str, liger: bool) -> None:
    """Train; `base` is bf16, nf4 or fp8, `checkpointing` False, True or 'unsloth' (its offloading one)."""
    if liger:
        raise ValueError("this peer has kernels of its own, no Liger")
    workload = meter.workload
    model, _ = FastLanguageModel.from_pretrained(
        model_name=str(workload.folder),
        max_seq_length=workload.length,
        dtype=torch.bfloat16,
        **LOAD[base],
        use_gradient_checkpointing=checkpointing,
        random_state=workload.seed,
        use_exact_model_name=True,
    )
    model = FastLanguageModel.get_peft_model(
        model,
        r=workload.rank,
        lora_alpha=workload.alpha,
        target_modules=TARGETS,
        lora_dropout=0.0,  # its fused kernels need it
        bias="none",
        use_gradient_checkpointing=checkpointing,
        random_state=workload.seed,
        max_seq_length=workload.length,
    )
    FastLanguageModel.for_training(model)
    meter.loaded(model.get_parameter(BASE_WEIGHT))
    loop.train(
        lambda ids: model(input_ids=ids, labels=ids).loss,
        (p for p in model.parameters() if p.requires_grad),
        meter=meter,
        device="cuda" if torch.cuda.is_available() else "cpu",
    )
