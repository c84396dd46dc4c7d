"""The exchange of modules: once, on the meta device, before any weight is loaded."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from torch import nn

from swiftkit.engine.fused.base import BaseKind, kind_of
from swiftkit.engine.linear import DoraLinear, Linear, LoraLinear
from swiftkit.errors import UserError, nearest
from swiftkit.formats.peft import LoraSpec
from swiftkit.parallel.collectives import Sharding

ALL_LINEAR = "all-linear"
# Linear layers inside blocks that choose experts rather than transform tokens: adapted only when named.
ROUTERS = ("gate", "router", "shared_expert_gate")


def exchange(
    model: nn.Module,
    spec: LoraSpec | None,
    kind: BaseKind = "plain",
    shardings: Mapping[str, Sharding] | None = None,
    packed: Collection[str] = (),
) -> list[str]:
    """Replace every `nn.Linear` of a model by ours; the targets of `spec` get an adapter.

    Args:
        model: a transformers causal language model with its parameters on the meta device.
        spec: the adapter, or None for a model that is only used.
        kind: storage of the frozen weights (see `kind_of`); the output head always stays plain.
        shardings: by name, of linear layers that are parts of what they were.
        packed: names of the linear layers that the model's files hold in whole numbers, for the kind `int`;
            the others are plain there.

    Returns:
        The names of the adapted modules, in the model's order.

    Raises:
        UserError: when a target matches nothing, or a width does not fit the storage.
    """
    linears = list(_linears(model))
    layers: int = model.config.num_hidden_layers  # type: ignore[assignment, union-attr]
    head = _head(model)
    targets = set() if spec is None else select_targets(model, spec.target_modules)
    for name, parent, leaf, module in linears:
        own: BaseKind = "plain" if module is head else kind_of(name, kind, layers)
        if own == "int":
            own = "int" if name in packed else "plain"
        elif own != "plain":
            _check_widths(name, module)
        sharding = (shardings or {}).get(name)
        if spec is not None and name in targets:
            setattr(parent, leaf, (DoraLinear if spec.dora else LoraLinear)(module, spec, own, sharding))
        else:
            setattr(parent, leaf, Linear(module, own, sharding))
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


def select_whole(model: nn.Module, spec: LoraSpec) -> set[str]:
    """Names of the modules that `modules_to_save` means: they are trained whole.

    Raises:
        UserError: when a name matches nothing, no module with weights of its own, or an adapted one.
    """
    owners = {name for name, module in model.named_modules() if module._parameters}
    adapted = select_targets(model, spec.target_modules)
    chosen: set[str] = set()
    for word in spec.modules_to_save:
        hits = {n for n in owners if n == word or n.endswith("." + word)}
        if not hits:
            leaves = sorted({n.rpartition(".")[2] for n in owners})
            offer = nearest(word, leaves, say="; did you mean {}?")
            raise UserError(
                f"--modules_to_save {word} matches no module with weights{offer} "
                f"(there are {', '.join(leaves)})"
            )
        both = min(hits & adapted, default=None)
        if both is not None:
            raise UserError(
                f"--modules_to_save {word}: {both} has an adapter already; leave it out of one of them "
                "(--target_modules names what is adapted)"
            )
        chosen |= hits
    return chosen


def fused_experts(model: nn.Module) -> list[str]:
    """Names of modules whose weights are experts in one tensor [experts, ...]: adapters do not reach them."""
    return [
        name
        for name, module in model.named_modules()
        if any(p is not None and p.dim() == 3 for p in module._parameters.values())
    ]


def _check_widths(name: str, module: nn.Linear) -> None:
    """Blocks of NF4 and of the casts to FP8 are 64 wide."""
    for width in (module.in_features, module.out_features):
        if width % 64:
            raise UserError(
                f"{name} is {width} wide; fp8 and nf4 bases need multiples of 64: take --base_precision bf16"
            )


def linear_names(model: nn.Module) -> set[str]:
    """Names of the linear layers of a skeleton."""
    return {name for name, *_ in _linears(model)}


def _head(model: nn.Module) -> nn.Module | None:
    find = getattr(model, "get_output_embeddings", None)
    return None if find is None else find()


def _linears(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Linear]]:
    """(name, parent, name in the parent, module) of each linear layer."""
    for parent_name, parent in list(model.named_modules()):
        for leaf, module in parent.named_children():
            if isinstance(module, nn.Linear):
                yield (f"{parent_name}.{leaf}" if parent_name else leaf), parent, leaf, module
