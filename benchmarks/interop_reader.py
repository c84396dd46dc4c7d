"""Read a quantized model with somebody else's code, and write its logits; runs where swiftkit is not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch


def auto_gptq(folder: str) -> Any:
    """auto-gptq, whose CPU path dequantizes with torch."""
    from auto_gptq import AutoGPTQForCausalLM

    return AutoGPTQForCausalLM.from_quantized(
        folder, device="cpu", use_safetensors=True, disable_exllama=True, disable_exllamav2=True
    ).model


def gptqmodel(folder: str) -> Any:
    """gptqmodel on a CPU, which reads GPTQ in both versions, and AWQ."""
    from gptqmodel import BACKEND, GPTQModel

    backend = BACKEND.TORCH_AWQ if "awq" in folder else BACKEND.TORCH
    return GPTQModel.load(folder, device="cpu", backend=backend, dtype=torch.float16).model


def transformers(folder: str) -> Any:
    """Plain transformers, with compressed-tensors beside it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


READERS: dict[str, Callable[[str], Any]] = {
    "auto-gptq": auto_gptq,
    "gptqmodel": gptqmodel,
    "transformers": transformers,
}

if __name__ == "__main__":
    reader, folder, ids, out = sys.argv[1:]
    torch.set_num_threads(1)
    model = READERS[reader](folder).eval()
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(np.load(ids))).logits
    np.save(out, logits.float().numpy())
