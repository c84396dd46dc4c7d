"""llm-compressor's AWQ on token ids; runs in its own environment: MODEL IDS.npy OUT GROUP_SIZE."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, forward_quantize
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier
from llmcompressor.pipelines.cache import IntermediatesCache
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(model: str, ids: str, out: str, group_size: int) -> None:
    """Write a plain float32 model with the values that the quantized weights stand for.

    4 bits with zero points, as its preset W4A16_ASYM, but for the group size (128 there).
    """
    if not torch.cuda.is_available():
        # It pins host memory for a faster way to a device, and fails where there is none.
        IntermediatesCache.pin_memory = lambda self, batch_index: None  # type: ignore[method-assign]
    rows = np.load(ids)
    dataset = Dataset.from_dict({"input_ids": rows.tolist(), "attention_mask": np.ones_like(rows).tolist()})
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    weights = QuantizationArgs(
        num_bits=4, type="int", symmetric=False, strategy="group", group_size=group_size
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    oneshot(
        model=loaded,
        tokenizer=AutoTokenizer.from_pretrained(model),
        dataset=dataset,
        recipe=[AWQModifier(), QuantizationModifier(config_groups={"group_0": scheme}, ignore=["lm_head"])],
        max_seq_length=rows.shape[1],
        num_calibration_samples=len(rows),
        shuffle_calibration_samples=False,
    )
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    state = plain.state_dict()
    quantized = 0
    with torch.no_grad():
        for name, module in loaded.named_modules():
            if getattr(module, "quantization_scheme", None) is not None:
                value = forward_quantize(module, module.weight, "weight", module.quantization_scheme.weights)
                state[f"{name}.weight"].copy_(value)
                quantized += 1
            elif f"{name}.weight" in state:
                state[f"{name}.weight"].copy_(module.weight)  # a norm that took scales
    assert quantized == 7 * loaded.config.num_hidden_layers, f"{quantized} layers are quantized"
    plain.save_pretrained(Path(out))


if __name__ == "__main__":
    main(*sys.argv[1:4], group_size=int(sys.argv[4]))
