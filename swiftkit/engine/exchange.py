"""The exchange of modules: once, on the meta device, before any weight is loaded."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from swiftkit.engine.fused.base import BaseKind, kind_of
from swiftkit.engine.linear import Linear, LoraLinear
from swiftkit.errors import UserError, nearest
from swiftkit.formats.peft import LoraSpec

ALL_LINEAR = "all-linear"
# Linear layers inside blocks that choose experts rather than transform tokens: adapted only when named.
ROUTERS = ("gate", "router", "shared_expert_gate")


def exchange(model: nn.Module, spec: LoraSpec | None, kind: BaseKind = "plain") -> list[str]:
    """Replace every `nn.Linear` of a model by ours; the targets of `spec` get an adapter.

    Args:
        model: a transformers causal language model with its parameters on the meta device.
        spec: the adapter, or None for a model that is only used.
        kind: storage of the frozen weights (see `kind_of`); the output head always stays plain.

    Returns:
        The names of the adapted modules, in the model's order.

    Raises:
        UserError: when a target matches nothing, or a width does not fit the storage.
    """
    linears = list(_linears(model))
    head = _head(model)
    targets = set() if spec is None else select_targets(model, spec.target_modules)
    for name, parent, leaf, module in linears:
        own: BaseKind = "plain" if module is head else kind_of(leaf, kind)
        if own != "plain":
            _check_widths(name, module)
        if spec is not None and name in targets:
            setattr(parent, leaf, LoraLinear(module, spec, own))
        else:
            setattr(parent, leaf, Linear(module, own))
    return [name for name, *_ in linears if name in targets]


def select_targets(model: nn.Module, wanted: tuple[str, ...]) -> set[str]:
    """Names of the linear layers that `target_modules` means.

    `all-linear` is every linear layer of the blocks; the output head and the routers of experts are reached
    only by their names.
    """
    head = _head(model)
    names = [name for name, _, _, _ in _linears(model)]
    heads = {name for name, _, _, module in _linears(model) if module is head}
    chosen: set[str] = set()
    for word in wanted:
        if word == ALL_LINEAR:
            hits = {n for n in names if n not in heads and n.rpartition(".")[2] not in ROUTERS}
        else:
            hits = {n for n in names if n == word or n.endswith("." + word)}
        if not hits:
            leaves = sorted({n.rpartition(".")[2] for n in names})
            offer = nearest(word, leaves, say="; did you mean {}?")
            raise UserError(
                f"--target_modules {word} matches no linear layer{offer} (there are {', '.join(leaves)})"
            )
        chosen |= hits
    if chosen & heads:
        raise UserError(f"--target_modules: adapters on the output head ({min(heads)}) are not served yet")
    return chosen


def _check_widths(name: str, module: nn.Linear) -> None:
    """Blocks of NF4 and of the casts to FP8 are 64 wide."""
    for width in (module.in_features, module.out_features):
        if width % 64:
            raise UserError(
                f"{name} is {width} wide; fp8 and nf4 bases need multiples of 64: take --base_precision bf16"
            )


def _head(model: nn.Module) -> nn.Module | None:
    find = getattr(model, "get_output_embeddings", None)
    return None if find is None else find()


def _linears(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Linear]]:
    """(name, parent, name in the parent, module) of each linear layer."""
    for parent_name, parent in list(model.named_modules()):
        for leaf, module in parent.named_children():
            if isinstance(module, nn.Linear):
                yield (f"{parent_name}.{leaf}" if parent_name else leaf), parent, leaf, module
