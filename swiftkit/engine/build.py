"""From a folder to a model of ours, in this order: description, exchange, buffers, weights, adapters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from swiftkit.engine import attention
from swiftkit.engine.compiled import compile_layers
from swiftkit.engine.exchange import exchange, select_whole
from swiftkit.engine.families import logit_rule
from swiftkit.engine.fused.adopt import fuse_layers
from swiftkit.engine.fused.base import BaseKind
from swiftkit.engine.fused.projection import FrozenLinear
from swiftkit.engine.linear import Linear, LoraLinear
from swiftkit.engine.outliers import choose_carried
from swiftkit.engine.sharded import Sharded
from swiftkit.engine.tensor_parallel import TensorParallel, check_tensor_parallel
from swiftkit.errors import UserError
from swiftkit.formats.full import JUDGES, FullSpec
from swiftkit.formats.packing import packing_of
from swiftkit.formats.peft import FACTORS, MAGNITUDE, SCORE, LoraSpec
from swiftkit.formats.quantized import QuantizedWeights, open_weights
from swiftkit.formats.weights import Weights
from swiftkit.parallel.shards import Shard
from swiftkit.support import OUTSIDE_LAYERS, check

NewRows = Mapping[int, Sequence[int]]
"""New tokens by id, with the older tokens that they were written in before."""


def describe(folder: Path) -> Any:
    """The model's transformers config.

    Raises:
        UserError: for a folder without a config that can be read, weights quantized in a way that is not
            read, or a family that is not served.
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
    try:
        packing_of(config)
    except UserError as refusal:
        raise UserError(f"{path}: {refusal}") from None
    logit_rule(config)
    return config


def build_model(
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    lora: LoraSpec | None = None,
    full: FullSpec | None = None,
    seed: int = 42,
    base: BaseKind = "plain",
    fused: bool | None = None,
    tokens: int = 0,
    new_rows: NewRows | None = None,
    tp: TensorParallel | None = None,
    sharded: Sharded | None = None,
) -> nn.Module:
    """A causal language model with our linears and attention; what is trained requires a gradient.

    Args:
        folder: config.json and safetensors, as on the Hugging Face hub.
        dtype: of the weights; adapters are float32.
        device: where it computes.
        lora: the adapter to add, or None.
        full: every weight is trained, or None.
        seed: of the adapter's first values.
        base: storage of the frozen weights of the blocks; what a folder holds packed stays so with `int`, and
            is unpacked for `plain`.
        fused: whether decoder layers are exchanged whole for fused ones; None does so on a GPU, where the
            family and the adapter allow it, and compiles the others. They have no `int` base.
        tokens: of the largest micro-batch, from which fused layers choose what they keep for the backward; 0
            leaves memory out of account.
        new_rows: their embeddings start as the mean of these older ones; without any, of all.
        tp: the ranks that the model is cut over; this process builds and reads its own part alone.
        sharded: the ranks that keep the weights in parts; each layer is whole here while it is built.

    Raises:
        UserError: when the files do not fit the config, the adapter not the base, or the model cannot be cut.
    """
    spec = full if lora is None else lora
    config = describe(folder)
    check(set() if spec is None else spec.features, _precision(base, config))
    model = skeleton(config, None if spec is None else spec.vocabulary, writes=writes(full))
    whole = set() if lora is None else trained_whole(model, lora)
    if tp is not None:
        check_tensor_parallel(config, tp.ranks.size, spec=spec, quantized=base != "plain")
        tp.cut(model)
    on_gpu = device.type == "cuda"
    has_fused = full is None and base != "int" and bool(fused or (fused is None and on_gpu))
    if has_fused:
        by_rank = None if lora is None else lora.scaled_by_rank()
        has_fused = fuse_layers(
            model, by_rank, base=base, dtype=dtype, device=device, tokens=tokens, required=bool(fused), tp=tp,
            parts=1 if sharded is None else sharded.ranks.size,
        )  # fmt: skip
    weights = open_weights(folder, config)
    packed = weights.packed if isinstance(weights, QuantizedWeights) else frozenset()
    assert packed or base != "int", "only a quantized folder has codes"
    exchange(model, None if has_fused else lora, base, {} if tp is None else tp.shardings, packed)
    make_buffers(model, device)
    shards: Mapping[str, Shard] = {} if tp is None else tp.shards
    sources = _sources(model, weights, config.vocab_size, shards)

    def fill(wanted: Callable[[str], bool]) -> None:
        chosen = [(source, names) for source, names in sources if wanted(names[0].rpartition(".")[0])]
        load_weights(
            model, weights, chosen, dtype=dtype, device=device, rows=config.vocab_size,
            new_rows=new_rows or {}, shards=shards,
        )  # fmt: skip
        for name, module in model.named_modules():
            if not wanted(name):
                continue
            if isinstance(module, LoraLinear | FrozenLinear):
                module.reset_adapter(name=name, seed=seed, device=device)
            for parameter in module.parameters(recurse=False) if full or name in whole else ():
                parameter.requires_grad_(True)

    if sharded is not None:
        sharded.build(model, fill, device=device, adapter=full is None, observes="fp8" in base)
    else:
        fill(lambda _: True)
        if "fp8" in base:
            choose_carried(model, vocabulary=config.vocab_size, device=device)
    if spec is not None and spec.scores:
        model.score = score_head(config, seed=seed, device=device, weights=None if lora else Weights(folder))
    if on_gpu and not has_fused and base == "plain":
        compile_layers(model)
    if sharded is not None:
        sharded.close(model, adapter=full is None)
    return model.train()


def check_model(
    folder: Path,
    spec: LoraSpec | FullSpec | None,
    *,
    tensor_parallel_size: int = 1,
    quantized: bool = False,
) -> Any:
    """Find what is wrong with a model folder or its adapter's targets while nothing of weight is loaded.

    Args:
        folder: of the model.
        spec: what is trained.
        tensor_parallel_size: ranks that it is cut over.
        quantized: whether its base will be stored in 8 or 4 bits.

    Returns:
        The model's transformers config.

    Raises:
        UserError: as `build_model` would.
    """
    config = describe(folder)
    check_tensor_parallel(config, tensor_parallel_size, spec=spec, quantized=quantized)
    whole = spec if isinstance(spec, FullSpec) else None
    model = skeleton(config, None if spec is None else spec.vocabulary, writes=writes(whole))
    lora = spec if isinstance(spec, LoraSpec) else None
    if lora is not None:
        trained_whole(model, lora)
    exchange(model, lora)
    _sources(model, open_weights(folder, config), config.vocab_size, {})
    return config


def writes(full: FullSpec | None) -> bool:
    """Whether the output head is used: not by a whole model that is trained to score."""
    return full is None or not full.scores


def is_judge(config: Any) -> bool:
    """Whether a model's config is that of a reward model, which has no output head."""
    return any(name.endswith(JUDGES) for name in config.architectures or ())


def skeleton(config: Any, vocabulary: int | None = None, *, writes: bool = True) -> nn.Module:
    """The model as transformers describes it, without memory: everything is on the meta device.

    Args:
        config: of transformers.
        vocabulary: rows of embedding and head, where they are more.
        writes: whether the output head is used; else the embedding stands in for it, which is there anyhow.
    """
    from transformers import AutoModelForCausalLM

    attention.register()
    config = copy.deepcopy(config)
    config.vocab_size = max(config.vocab_size, vocabulary or 0)
    config.tie_word_embeddings = config.tie_word_embeddings or not writes
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(
            config, attn_implementation=attention.IMPLEMENTATION, trust_remote_code=False
        )
    return model.requires_grad_(False)


def trained_whole(model: nn.Module, lora: LoraSpec) -> set[str]:
    """Names of the modules of a skeleton that are trained beside the adapter.

    Raises:
        UserError: as `select_whole` does; where embedding and head are one and the adapter has them apart.
    """
    chosen = select_whole(model, lora)
    ends = {name for name in chosen if name.rpartition(".")[2] in OUTSIDE_LAYERS}
    if ends and is_tied(model) and not lora.keeps_tie:
        raise UserError(
            f"the adapter trained {min(ends)} apart from the other end of this model, which ties both "
            "(ensure_weight_tying is false in its adapter_config.json); that is not served: set it to true "
            "when the adapter is trained"
        )
    return chosen


def is_tied(model: nn.Module) -> bool:
    """Whether the output head is the embedding."""
    head: nn.Module = model.get_output_embeddings()  # type: ignore[operator]
    return head.weight is model.get_input_embeddings().weight  # type: ignore[operator]


def score_head(config: Any, *, seed: int, device: torch.device, weights: Weights | None = None) -> nn.Linear:
    """The head of a reward model, drawn as transformers draws it; it computes in float32.

    Args:
        config: of transformers.
        seed: the run's.
        device: where it computes.
        weights: of a base that may be a reward model, whose head it then is.
    """
    width = int(config.hidden_size)
    head = nn.Linear(width, 1, bias=False, device="meta")
    spread = float(getattr(config, "initializer_range", None) or 0.02)
    if weights is not None and SCORE in weights.names():
        first = weights.read(SCORE).float()
    else:
        first = torch.randn((1, width), generator=torch.Generator().manual_seed(seed)) * spread
    head.weight = nn.Parameter(first.to(device))
    return head


def _precision(base: BaseKind, config: Any) -> str:
    packing = packing_of(config)
    if base == "int" and packing is not None:
        return packing.precision
    return base.partition("-")[0] if base != "plain" else "bf16"


def make_buffers(model: nn.Module, device: torch.device) -> None:
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


def load_weights(
    model: nn.Module,
    weights: Weights,
    sources: Sequence[tuple[str, list[str]]],
    *,
    dtype: torch.dtype,
    device: torch.device,
    rows: int,
    new_rows: NewRows,
    shards: Mapping[str, Shard],
) -> None:
    """Fill base parameters from their files, one tensor at a time; tied parameters stay one.

    Args:
        model: on the meta device.
        weights: of the base.
        sources: the file's name of each of them, and all the names that the model has for it.
        dtype, device: of the parameters.
        rows: of embedding and head in the files.
        new_rows: see `build_model`.
        shards: of parameters that are parts of what the file has; nothing else of it is read.
    """
    ends = _vocabulary_matrices(model)
    size = int(model.config.vocab_size)  # type: ignore[union-attr, arg-type]
    for source, names in sources:
        shard = shards.get(names[0])
        owner = model.get_submodule(names[0].rpartition(".")[0])
        if isinstance(owner, Linear) and owner.kind == "int" and source.endswith(".weight"):
            assert isinstance(weights, QuantizedWeights)
            owner.load_codes(weights.codes(source), dtype=dtype, device=device)
            continue
        if ends.intersection(names) and (new_rows or rows != size):
            tensor = _with_rows(weights.read(source), size, new_rows)
            tensor = tensor if shard is None else shard.take(tensor)
        else:
            tensor = weights.read(source) if shard is None else weights.part(source, shard)
        value = nn.Parameter(tensor.to(device=device, dtype=dtype), requires_grad=False)
        for name in names:
            _put(model, name, value)


def _vocabulary_matrices(model: nn.Module) -> set[str]:
    """All names of the weights with one row a token."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())  # type: ignore[operator]
    return {f"{name}.weight" for name, module in model.named_modules() if any(module is end for end in ends)}


def _with_rows(matrix: Tensor, size: int, new_rows: NewRows) -> Tensor:
    """A matrix [tokens, width] with `size` rows, those of new tokens as means of their pieces' rows."""
    grown = matrix.new_zeros(size, matrix.shape[1])
    grown[: matrix.shape[0]] = matrix
    for token, pieces in new_rows.items():
        rows = matrix[list(pieces)] if pieces else matrix
        grown[token] = rows.float().mean(0).to(matrix.dtype)
    return grown


def _sources(
    model: nn.Module, weights: Weights, rows: int, shards: Mapping[str, Shard]
) -> list[tuple[str, list[str]]]:
    """The file's name of each base parameter, and all the names that the model has for it.

    Raises:
        UserError: naming tensors that are missing or have another shape.
    """
    available = weights.names()
    found: list[tuple[str, list[str]]] = []
    missing: list[str] = []
    ends = _vocabulary_matrices(model)
    for shape, names in _base_parameters(model):
        source = next((name for name in names if name in available), None)
        if source is None:
            missing.append(names[0])
            continue
        shape = shards[names[0]].whole_shape(shape) if names[0] in shards else shape
        wanted = (rows, *shape[1:]) if ends.intersection(names) else shape
        if weights.shape(source) != wanted:
            raise UserError(
                f"{weights.folder}: {source} has shape {weights.shape(source)}, config.json asks for {wanted}"
            )
        found.append((source, names))
    if missing:
        raise UserError(
            f"{weights.folder} lacks {len(missing)} tensors of the model, the first is {missing[0]}"
        )
    return found


def _base_parameters(model: nn.Module) -> list[tuple[tuple[int, ...], list[str]]]:
    """Shape of each base parameter as it is here, and all its names (a tied head is a second one)."""
    found: dict[int, tuple[tuple[int, ...], list[str]]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner, _, leaf = name.rpartition(".")
        if name.endswith((*FACTORS, MAGNITUDE)):
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


def trained_parameters(model: nn.Module) -> dict[str, Tensor]:
    """The trained tensors by name: `...q_proj.lora_A`, `...q_proj.lora_B`, `model.embed_tokens.weight`."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}
