"""Checkpoints as a run leaves them, without the run: a tiny base, a random adapter of PEFT, args.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from swiftkit.formats.source import fingerprint
from tests import tiny
from tests.cases import toy

# Widths that every storage of a base takes: multiples of 64.
WIDE = dict(hidden_size=64, intermediate_size=128, num_key_value_heads=4, head_dim=16)


def make_base(
    folder: Path, family: str = "llama", *, dtype: torch.dtype = torch.float32, tok: str = "plain",
    template: str | None = None, **changes: Any,
) -> Any:  # fmt: skip
    """A tiny model of a family in one type of numbers, with a toy tokenizer: a whole model folder."""
    model = tiny.make(family, folder, **{**WIDE, **changes})
    model.to(dtype).save_pretrained(folder)
    tokenizer = toy.tokenizer(tok)
    if template is not None:
        tokenizer.chat_template = Path(toy.template(template)).read_text(encoding="utf-8")
    tokenizer.save_pretrained(folder)
    return model.float()


def make_checkpoint(
    folder: Path,
    base: Path,
    *,
    precision: str = "fp32",
    scale: float = 0.1,
    seed: int = 0,
    args: dict[str, Any] | None = None,
    **lora: Any,
) -> Any:
    """Write a checkpoint of a random adapter, and return PEFT's model of it, in float32.

    Args:
        folder: to be made.
        base: its base's folder.
        precision: of the training's base, as args.json tells it.
        scale: of the random values.
        seed: of them.
        args: what args.json says besides; None writes none, as for an adapter that is not of a run.
        lora: of PEFT's LoraConfig.
    """
    import peft
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
    config = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **lora}
    tuned: Any = peft.get_peft_model(model, peft.LoraConfig(**config))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "lora_A" in name or "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
            elif parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)
    tuned.save_pretrained(folder)
    if args is not None:
        write_args(folder, base, precision, **args)
    return tuned.eval()


def write_args(folder: Path, base: Path, precision: str, **more: Any) -> None:
    """Write the args.json of a run on that base."""
    content = {
        "method": "sft",
        "config": {"model": str(base), "base_precision": precision, "dataset": [], **more},
        "base": {"source": "folder", "revision": "", "fingerprint": fingerprint(base)},
        "machine": {"device": "CPU, 1 thread"},
    }
    (folder / "args.json").write_text(json.dumps(content), encoding="utf-8")


def ids(seed: int = 0, tokens: int = 40) -> torch.Tensor:
    """Random tokens, [1, tokens]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(10, tiny.VOCABULARY, (1, tokens), generator=generator)


@torch.no_grad()
def logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """What a transformers or PEFT model says, [tokens, vocabulary]."""
    return model(input_ids=tokens, use_cache=False).logits[0].float()


def reopened(folder: Path) -> Any:
    """A model folder as transformers opens it, in float32."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()
