"""transformers + PEFT in a plain loop."""

from __future__ import annotations

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from peers import loop
from peers.meter import Meter
from peers.workload import BASE_WEIGHT, TARGETS


def run(meter: Meter, *, base: str, checkpointing: bool | str, liger: bool) -> None:
    """Train; `base` is bf16."""
    if base != "bf16" or liger:
        raise ValueError("this peer has a bf16 base and no Liger")
    workload = meter.workload
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(workload.seed)
    model = AutoModelForCausalLM.from_pretrained(
        workload.folder, dtype=torch.bfloat16, device_map=device, attn_implementation="sdpa"
    )
    model.config.use_cache = False
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    adapter = LoraConfig(
        r=workload.rank, lora_alpha=workload.alpha, target_modules=TARGETS, task_type="CAUSAL_LM"
    )
    model = get_peft_model(model, adapter).train()
    meter.loaded(model.get_parameter(BASE_WEIGHT))
    loop.train(
        lambda ids: model(input_ids=ids, labels=ids).loss,
        (p for p in model.parameters() if p.requires_grad),
        meter=meter,
        device=device,
    )
