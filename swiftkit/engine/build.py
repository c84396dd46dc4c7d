"""From a folder to a model of ours, in this order: description, exchange, buffers, weights, adapters."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from swiftkit.engine import attention
from swiftkit.engine.compiled import compile_layers
from swiftkit.engine.exchange import exchange
from swiftkit.engine.families import logit_rule
from swiftkit.engine.fused.adopt import fuse_layers
from swiftkit.engine.fused.base import BaseKind
from swiftkit.engine.fused.projection import FrozenLinear
from swiftkit.engine.linear import Linear, LoraLinear
from swiftkit.errors import UserError
from swiftkit.formats.peft import LoraSpec
from swiftkit.formats.weights import Weights


def describe(folder: Path) -> Any:
    """The model's transformers config.

    Raises:
        UserError: for a folder without a config that can be read, quantized weights, or a family that is
            not served.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"{folder} has no config.json: it is not a model folder")
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError) as unknown:
        raise UserError(f"{path}: {str(unknown).splitlines()[0]}") from None
    except StrictDataclassError as odd:  # its last line names the field
        raise UserError(f"{path}: {str(odd).splitlines()[-1].strip()}") from None
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None:
        # Weights of another storage under the usual names would load, and be wrong, without a word.
        kind = dict(quantization).get("quant_method", "of an unknown kind")
        raise UserError(f"{path}: the weights are quantized ({kind}); give the model in bf16 or fp32 instead")
    logit_rule(config)
    return config


def build_model(
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    lora: LoraSpec | None = None,
    seed: int = 42,
    base: BaseKind = "plain",
    fused: bool | None = None,
    tokens: int = 0,
) -> nn.Module:
    """A causal language model with our linears and attention; weights are frozen, adapters are not.

    Args:
        folder: config.json and safetensors, as on the Hugging Face hub.
        dtype: of the frozen weights; adapters are float32.
        device: where it computes.
        lora: the adapter to add, or None.
        seed: of the adapter's first values.
        base: storage of the frozen weights of the blocks.
        fused: whether decoder layers are exchanged whole for fused ones; None does so on a GPU, where the
            family and the adapter allow it, and compiles the others.
        tokens: of the largest micro-batch, from which fused layers choose what they keep for the backward; 0
            leaves memory out of account.

    Raises:
        UserError: when the files do not fit the config.
    """
    model = skeleton(describe(folder))
    on_gpu = device.type == "cuda"
    has_fused = bool(fused or (fused is None and on_gpu)) and fuse_layers(
        model, lora, base=base, dtype=dtype, device=device, tokens=tokens, required=bool(fused)
    )
    exchange(model, None if has_fused else lora, base)
    _make_buffers(model, device)
    load_weights(model, Weights(folder), dtype=dtype, device=device)
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear | FrozenLinear):
            module.reset_adapter(name=name, seed=seed, device=device)
    if on_gpu and not has_fused and base == "plain":
        compile_layers(model)
    return model.train()


def check_model(folder: Path, lora: LoraSpec | None) -> Any:
    """Find what is wrong with a model folder or its adapter's targets while nothing of weight is loaded.

    Returns:
        The model's transformers config.

    Raises:
        UserError: as `build_model` would.
    """
    config = describe(folder)
    model = skeleton(config)
    exchange(model, lora)
    _sources(model, Weights(folder))
    return config


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
    for source, names in _sources(model, weights):
        value = nn.Parameter(weights.read(source).to(device=device, dtype=dtype), requires_grad=False)
        for name in names:
            _put(model, name, value)


def _sources(model: nn.Module, weights: Weights) -> list[tuple[str, list[str]]]:
    """The file's name of each base parameter, and all the names that the model has for it."""
    available = weights.names()
    found: list[tuple[str, list[str]]] = []
    missing: list[str] = []
    for shape, names in _base_parameters(model):
        source = next((name for name in names if name in available), None)
        if source is None:
            missing.append(names[0])
            continue
        if weights.shape(source) != shape:
            raise UserError(
                f"{weights.folder}: {source} has shape {weights.shape(source)}, config.json asks for {shape}"
            )
        found.append((source, names))
    if missing:
        raise UserError(
            f"{weights.folder} lacks {len(missing)} tensors of the model, the first is {missing[0]}"
        )
    return found


def _base_parameters(model: nn.Module) -> list[tuple[tuple[int, ...], list[str]]]:
    """Shape in the file of each base parameter, and all its names (a tied head is a second one)."""
    found: dict[int, tuple[tuple[int, ...], list[str]]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner, _, leaf = name.rpartition(".")
        if leaf in ("lora_A", "lora_B"):
            continue
        module = model.get_submodule(owner)
        shape = tuple(parameter.shape)
        if leaf == "weight" and isinstance(module, Linear | FrozenLinear):  # its storage may be another one
            shape = (module.out_features, module.in_features)
        found.setdefault(id(parameter), (shape, []))[1].append(name)
    return list(found.values())


def _put(model: nn.Module, name: str, value: nn.Parameter) -> None:
    """Hand a tensor to its owner; a linear stores its weight in its own way."""
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    if leaf == "weight" and isinstance(module, Linear | FrozenLinear):
        module.load_weight(value)
    else:
        setattr(module, leaf, value)


def adapter_parameters(model: nn.Module) -> dict[str, Tensor]:
    """The trained tensors by name, `...q_proj.lora_A` and `...q_proj.lora_B`."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}
