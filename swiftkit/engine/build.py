"""From a folder to a model of ours, in this order: description, exchange, buffers, weights, adapters."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from swiftkit.engine import attention
from swiftkit.engine.exchange import exchange
from swiftkit.engine.families import logit_rule
from swiftkit.engine.linear import LoraLinear
from swiftkit.errors import UserError
from swiftkit.formats.peft import LoraSpec
from swiftkit.formats.weights import Weights


def describe(folder: Path) -> Any:
    """The model's transformers config.

    Raises:
        UserError: for a folder without a config, or a family that is not served.
    """
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} has no config.json: it is not a model folder")
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except ValueError as unknown:
        raise UserError(f"{folder / 'config.json'}: {str(unknown).splitlines()[0]}") from None
    logit_rule(config)
    return config


def build_model(
    folder: Path, *, dtype: torch.dtype, device: torch.device, lora: LoraSpec | None = None, seed: int = 42
) -> nn.Module:
    """A causal language model with our linears and attention; weights are frozen, adapters are not.

    Args:
        folder: config.json and safetensors, as on the Hugging Face hub.
        dtype: of the frozen weights; adapters are float32.
        device: where it computes.
        lora: the adapter to add, or None.
        seed: of the adapter's first values.

    Raises:
        UserError: when the files do not fit the config.
    """
    model = skeleton(describe(folder))
    exchange(model, lora)
    _make_buffers(model, device)
    load_weights(model, Weights(folder), dtype=dtype, device=device)
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear):
            module.reset_adapter(name=name, seed=seed, device=device)
    return model.train()


def skeleton(config: Any) -> nn.Module:
    """The model as transformers describes it, without memory: everything is on the meta device."""
    from transformers import AutoModelForCausalLM

    attention.register()
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), attn_implementation=attention.IMPLEMENTATION, trust_remote_code=False
        )
    return model.requires_grad_(False)


def _make_buffers(model: nn.Module, device: torch.device) -> None:
    """Give rotary frequencies and the like, which no file holds, their values.

    transformers fills them in `_init_weights`. It must run before weights are there: afterwards it would draw
    the embeddings of some families anew, without a word.
    """
    for module in model.modules():
        own = {name: buffer for name, buffer in module.named_buffers(recurse=False) if buffer.is_meta}
        if not own:
            continue
        for name, buffer in own.items():
            module._buffers[name] = torch.empty_like(buffer, device="cpu")
        with torch.no_grad():
            model._init_weights(module)  # type: ignore[operator]
        for name in own:
            module._buffers[name] = module._buffers[name].to(device)  # type: ignore[union-attr]


def load_weights(model: nn.Module, weights: Weights, *, dtype: torch.dtype, device: torch.device) -> None:
    """Fill every base parameter from its file, one tensor at a time; tied parameters stay one.

    Raises:
        UserError: naming tensors that are missing or have another shape.
    """
    available = weights.names()
    missing: list[str] = []
    for parameter, names in _base_parameters(model):
        source = next((name for name in names if name in available), None)
        if source is None:
            missing.append(names[0])
            continue
        if weights.shape(source) != tuple(parameter.shape):
            raise UserError(
                f"{weights.folder}: {source} has shape {weights.shape(source)}, "
                f"config.json asks for {tuple(parameter.shape)}"
            )
        value = nn.Parameter(weights.read(source).to(device=device, dtype=dtype), requires_grad=False)
        for name in names:
            _put(model, name, value)
    if missing:
        raise UserError(
            f"{weights.folder} lacks {len(missing)} tensors of the model, the first is {missing[0]}"
        )


def _base_parameters(model: nn.Module) -> list[tuple[nn.Parameter, list[str]]]:
    """Each base parameter once, with all the names it goes by (a tied head is a second name)."""
    found: dict[int, tuple[nn.Parameter, list[str]]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name.rpartition(".")[2] not in ("lora_A", "lora_B"):
            found.setdefault(id(parameter), (parameter, []))[1].append(name)
    return list(found.values())


def _put(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    module_name, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(module_name), leaf, parameter)


def adapter_parameters(model: nn.Module) -> dict[str, Tensor]:
    """The trained tensors by name, `...q_proj.lora_A` and `...q_proj.lora_B`."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}
