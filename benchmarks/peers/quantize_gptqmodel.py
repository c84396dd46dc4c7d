"""gptqmodel's GPTQ on token ids; runs in its own environment: MODEL IDS.npy OUT GROUP_SIZE."""

from __future__ import annotations

import sys

import numpy as np
import torch
from gptqmodel import GPTQModel, QuantizeConfig


def main(model: str, ids: str, out: str, group_size: int) -> None:
    """Write a model folder in AutoGPTQ's format.

    Its defaults are desc_act false with columns ordered inside and between groups (`act_group_aware`).
    """
    settings = QuantizeConfig(
        bits=4, group_size=group_size, sym=True, desc_act=True, static_groups=True, act_group_aware=False,
        damp_percent=0.05,
    )  # fmt: skip
    loaded = GPTQModel.load(model, settings, device="cpu", dtype=torch.float32, attn_implementation="sdpa")
    rows = [{"input_ids": row.tolist(), "attention_mask": [1] * len(row)} for row in np.load(ids)]
    loaded.quantize(rows, batch_size=1)
    loaded.save(out)


if __name__ == "__main__":
    main(*sys.argv[1:4], group_size=int(sys.argv[4]))
