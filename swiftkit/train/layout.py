"""How the processes of a run stand: as asked for, or as the model fits; settled before weights are loaded."""

from __future__ import annotations

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
BASES = {"plain": "bf16", "fp8": "fp8", "nf4": "nf4", "nf4-fp8": "nf4-fp8"}  # by the plan's names
RECOMPUTED = 3  # of SAVINGS: fused layers choose among so many


def settle_layout(
    config: RunConfig, description: Any, spec: LoraSpec | FullSpec, placement: Placement, world: World
) -> Layout:
    """Tensor parallelism as asked for; on auto the least with which the model fits into a GPU.

    Args:
        config: of the run.
        description: the model's transformers config.
        spec: what is trained.
        placement: device and precision.
        world: the processes.

    Raises:
        UserError: for processes, a model or knobs that cannot be cut so, with the sizes that would do.
    """
    asked = config.tensor_parallel_size
    size = _fitting(config, description, spec, placement, world) if asked == "auto" else asked
    _check_processes(size, world)
    check_tensor_parallel(description, size, spec=spec, quantized=placement.base != "plain")
    if size > 1 and config.optim == "adamw_8bit":
        raise UserError(
            f"{FLAG} {size}: --optim adamw_8bit keeps moments in blocks of whole tensors, and each rank "
            "has a part; take adamw_torch"
        )
    return Layout(replicate=world.size // size, tp=size)


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


def _fitting(
    config: RunConfig, description: Any, spec: LoraSpec | FullSpec, placement: Placement, world: World
) -> int:
    """The smallest size with which a GPU holds its part and a window; else the largest there is."""
    if world.size == 1 or placement.device.type != "cuda":
        return 1
    found = 1
    for size in (n for n in range(1, world.local_size + 1) if world.local_size % n == 0):
        if size > 1 and not _cuts(config, description, spec, placement, size):
            continue
        found = size
        if _fits(config, description, spec, placement, tp=size, tokens=_window(config)):
            break
    return found


def room_for_tokens(
    config: RunConfig, description: Any, spec: LoraSpec | FullSpec, placement: Placement, *, tp: int
) -> int:
    """Tokens that go through the model at once: as usual, or by halves fewer where memory is short.

    Args:
        config: of the run.
        description: the model's transformers config.
        spec: what is trained.
        placement: device and precision.
        tp: parts of each weight.
    """
    tokens = TOKENS_AT_ONCE[placement.device.type]
    if placement.device.type != "cuda":
        return tokens
    while tokens > _window(config) and not _fits(config, description, spec, placement, tp=tp, tokens=tokens):
        tokens //= 2
    return tokens


def _window(config: RunConfig) -> int:
    return config.max_length if isinstance(config.max_length, int) else AUTO_MAX_LENGTH


def _fits(
    config: RunConfig,
    description: Any,
    spec: LoraSpec | FullSpec,
    placement: Placement,
    *,
    tp: int,
    tokens: int,
) -> bool:
    """Whether a GPU holds its part of the run; so many tokens at once, or the windows that are asked for."""
    asked = config.per_device_train_batch_size
    tokens = tokens if asked == "auto" else asked * _window(config)
    _, total = torch.cuda.mem_get_info(placement.device)
    return needed_bytes(description, spec, placement, tp=tp, tokens=tokens) <= USABLE * total


def _cuts(
    config: RunConfig, description: Any, spec: LoraSpec | FullSpec, placement: Placement, size: int
) -> bool:
    if config.optim == "adamw_8bit":
        return False
    try:
        check_tensor_parallel(description, size, spec=spec, quantized=placement.base != "plain")
    except UserError:
        return False
    return True


def needed_bytes(
    description: Any, spec: LoraSpec | FullSpec, placement: Placement, *, tp: int, tokens: int
) -> float:
    """Bytes of one GPU as the plan reckons them, with the most that the layers can save.

    Args:
        description: the model's transformers config.
        spec: what is trained.
        placement: device and precision.
        tp: parts of each weight.
        tokens: that go through the model at once.
    """
    full = isinstance(spec, FullSpec)
    job = Job(
        tuner="full" if full else "lora",
        base=BASES[placement.base],  # type: ignore[arg-type]
        rank=spec.rank if isinstance(spec, LoraSpec) else 1,
        sequence=tokens,
        tokens_per_gpu=tokens,
    )
    saving = SAVINGS[RECOMPUTED - 1 if placement.fused else 0]
    cut = Cut(tokens, saving)
    shape = shape_of(description)
    planned = memory(shape, job, PlannedLayout(tp=tp), cut).total
    # The plan cuts the residual stream by tokens as well; here every rank keeps all of it.
    stream = cut.micro_tokens * shape.layers * ACTIVATION * 2 * shape.hidden * (1 - 1 / tp)
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
