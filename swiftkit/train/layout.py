"""How the processes of a run stand: as asked for, or as the model fits; settled before weights are loaded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from swiftkit.config import RunConfig
from swiftkit.data.prepare import AUTO_MAX_LENGTH
from swiftkit.engine import FullSpec, LoraSpec
from swiftkit.engine.placement import Placement
from swiftkit.engine.tensor_parallel import check_tensor_parallel
from swiftkit.errors import UserError
from swiftkit.parallel.mesh import Layout
from swiftkit.parallel.world import World
from swiftkit.plan.job import ACTIVATION, SAVINGS, Cut, Job
from swiftkit.plan.layout import Layout as PlannedLayout
from swiftkit.plan.memory import memory
from swiftkit.plan.predict import USABLE
from swiftkit.plan.shape import ModelShape
from swiftkit.train.steps import TOKENS_AT_ONCE

FLAG = "--tensor_parallel_size"
STORAGES = ("ddp", "hsdp", "fsdp")  # of `--layout`, in the order in which auto tries them
BASES = {  # by the plan's names; what a folder holds packed takes as many bytes as its like, within a tenth
    "plain": "bf16", "fp8": "fp8", "nf4": "nf4", "nf4-fp8": "nf4-fp8", "int": "nf4",
}  # fmt: skip
RECOMPUTED = 3  # of SAVINGS: fused layers choose among so many


def settle_layout(
    config: RunConfig, description: Any, spec: LoraSpec | FullSpec, placement: Placement, world: World
) -> Layout:
    """Layout and tensor parallelism as asked for; on auto the first with which the model fits into a GPU.

    An adapter's base is cut by tensor parallelism before it is parted, since parts have to be gathered for
    every layer of every pass; a model that is trained whole is parted.

    Args:
        config: of the run.
        description: the model's transformers config.
        spec: what is trained.
        placement: device and precision.
        world: the processes.

    Raises:
        UserError: for processes, a model or knobs that cannot be cut so, with the sizes that would do.
    """
    candidates = list(_candidates(config, spec, world))
    if len(candidates) == 1 or world.size == 1 or placement.device.type != "cuda":
        _check(candidates[0], config, description, spec, placement, world)
        return candidates[0]
    found = None
    for layout in candidates:
        try:
            _check(layout, config, description, spec, placement, world)
        except UserError:
            if layout is candidates[-1] and found is None:
                raise
            continue
        found = layout
        if _fits(config, description, spec, placement, layout, tokens=_window(config)):
            break
    assert found is not None
    return found


def _candidates(config: RunConfig, spec: LoraSpec | FullSpec, world: World) -> Iterator[Layout]:
    """What the knobs leave open, in the order of preference.

    Raises:
        UserError: for a number of processes that is no multiple.
    """
    asked = config.tensor_parallel_size
    if asked != "auto":
        _check_processes(asked, world)
    for storage in STORAGES if config.layout == "auto" else (config.layout,):
        if asked != "auto":
            sizes = [asked]
        elif storage != "ddp" or (isinstance(spec, FullSpec) and config.layout == "auto"):
            sizes = [1]
        else:
            sizes = [n for n in range(1, world.local_size + 1) if world.local_size % n == 0]
        for tp in sizes:
            layout = _layout(storage, tp, world)
            if config.layout != "auto" or layout.storage == storage:
                yield layout


def _layout(storage: str, tp: int, world: World) -> Layout:
    rows = world.size // tp
    shard = {"ddp": 1, "fsdp": rows, "hsdp": max(1, world.local_size // tp)}[storage]
    return Layout(replicate=rows // shard, shard=shard, tp=tp)


def _check(
    layout: Layout,
    config: RunConfig,
    description: Any,
    spec: LoraSpec | FullSpec,
    placement: Placement,
    world: World,
) -> None:
    """Refuse what cannot be.

    Raises:
        UserError: saying what is in the way.
    """
    tp, full = layout.tp, isinstance(spec, FullSpec)
    _check_processes(tp, world)
    if config.layout in ("fsdp", "hsdp"):
        _check_parts(config.layout, layout)
    check_tensor_parallel(description, tp, spec=spec, quantized=placement.base != "plain")
    flag = f"{FLAG} {tp}" if tp > 1 else f"--layout {layout.storage}"
    if full and layout.shard > 1 and spec.scores:
        raise UserError(
            f"{flag}: a reward model that is trained whole keeps whole weights as yet; take --layout ddp, or "
            "--tuner_type lora"
        )
    if full and layout.shard > 1 and tp > 1:
        raise UserError(
            f"{FLAG} {tp}: with --layout {layout.storage} a whole model is cut once; leave it at 1"
        )
    if config.optim == "adamw_8bit" and (tp > 1 or (full and layout.shard > 1)):
        raise UserError(
            f"{flag}: --optim adamw_8bit keeps moments in blocks of whole tensors, and each rank "
            "has a part; take adamw_torch"
        )


def _check_parts(asked: str, layout: Layout) -> None:
    if layout.shard == 1:
        raise UserError(f"--layout {asked} takes several processes with rows of their own; there is one")
    if asked == "hsdp" and layout.replicate == 1:
        raise UserError(
            "--layout hsdp has a copy of all parts on each machine, and this is one; take --layout fsdp"
        )


def _check_processes(size: int, world: World) -> None:
    if size == 1:
        return
    if world.size == 1:
        raise UserError(
            f"{FLAG} {size} takes {size} processes, and this is one; give --nproc_per_node {size}"
        )
    if world.local_size % size:
        most = world.local_size
        sizes = ", ".join(str(n) for n in range(1, most + 1) if most % n == 0)
        raise UserError(
            f"{FLAG} {size}: the {most} processes of a machine cannot be parted into groups of {size}; sizes "
            f"that would do: {sizes}"
        )


def room_for_tokens(
    config: RunConfig, description: Any, spec: LoraSpec | FullSpec, placement: Placement, layout: Layout
) -> int:
    """Tokens that go through the model at once: as usual, or by halves fewer where memory is short.

    Args:
        config: of the run.
        description: the model's transformers config.
        spec: what is trained.
        placement: device and precision.
        layout: of the processes.
    """
    tokens = TOKENS_AT_ONCE[placement.device.type]
    if placement.device.type != "cuda":
        return tokens
    while tokens > _window(config) and not _fits(config, description, spec, placement, layout, tokens=tokens):
        tokens //= 2
    return tokens


def _window(config: RunConfig) -> int:
    return config.max_length if isinstance(config.max_length, int) else AUTO_MAX_LENGTH


def _fits(
    config: RunConfig,
    description: Any,
    spec: LoraSpec | FullSpec,
    placement: Placement,
    layout: Layout,
    *,
    tokens: int,
) -> bool:
    """Whether a GPU holds its part of the run; so many tokens at once, or the windows that are asked for."""
    asked = config.per_device_train_batch_size
    tokens = tokens if asked == "auto" else asked * _window(config)
    _, total = torch.cuda.mem_get_info(placement.device)
    return needed_bytes(description, spec, placement, layout, tokens=tokens) <= USABLE * total


def needed_bytes(
    description: Any, spec: LoraSpec | FullSpec, placement: Placement, layout: Layout, *, tokens: int
) -> float:
    """Bytes of one GPU as the plan reckons them, with the most that the layers can save.

    Args:
        description: the model's transformers config.
        spec: what is trained.
        placement: device and precision.
        layout: of the processes.
        tokens: that go through the model at once.
    """
    full = isinstance(spec, FullSpec)
    job = Job(
        tuner="full" if full else "lora",
        base="fp8" if placement.base_precision == "int8" else BASES[placement.base],  # type: ignore[arg-type]
        rank=spec.rank if isinstance(spec, LoraSpec) else 1,
        sequence=tokens,
        tokens_per_gpu=tokens,
    )
    saving = SAVINGS[RECOMPUTED - 1 if placement.fused else 0]
    cut = Cut(tokens, saving)
    shape = shape_of(description)
    planned = memory(shape, job, PlannedLayout(layout.replicate, layout.shard, layout.tp), cut).total
    # The plan cuts the residual stream by tokens as well; here every rank keeps all of it.
    stream = cut.micro_tokens * shape.layers * ACTIVATION * 2 * shape.hidden * (1 - 1 / layout.tp)
    return (planned + stream) * placement.dtype.itemsize / ACTIVATION


def shape_of(description: Any) -> ModelShape:
    """What the plan counts, from a transformers config."""
    heads = description.num_attention_heads
    return ModelShape(
        name=description.model_type,
        hidden=description.hidden_size,
        layers=description.num_hidden_layers,
        heads=heads,
        kv_heads=description.num_key_value_heads,
        head_dim=getattr(description, "head_dim", None) or description.hidden_size // heads,
        inter=description.intermediate_size,
        vocab=description.vocab_size,
        tied=bool(description.tie_word_embeddings),
    )
