"""Room on the disk for every checkpoint that will come, reckoned from shapes before the first step."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from swiftkit.errors import UserError
from swiftkit.train.state import TrainingState

SETTINGS_BYTES = 65_536  # args.json, training_state.json, and what a file system adds to a folder
SMALL = 4_096  # tensors of fewer numbers have moments in 32 bits always (bitsandbytes' min_8bit_size)
CODES_BYTES = 2_048  # what the 256 values of two 8-bit moments stand for
TENSOR_BYTES = 256  # a tensor's line in the head of a safetensors file, and its step count


def checkpoint_bytes(
    state: TrainingState, optimizer: torch.optim.Optimizer, files: Mapping[str, bytes]
) -> int:
    """Bytes of one checkpoint: trained tensors, moments, and the files beside them; heads are rounded up.

    Args:
        state: the trained tensors.
        optimizer: it need not have moments yet.
        files: what else a checkpoint holds.
    """
    numbers = {name: math.prod(shape) for name, shape in state.whole_shapes().items()}
    model = sum(numbers[name] * p.element_size() for name, p in state.parameters.items())
    moments = sum(_state_bytes(optimizer, name, p, numbers[name]) for name, p in state.parameters.items())
    heads = 4 * TENSOR_BYTES * len(state.parameters)
    return model + moments + heads + sum(map(len, files.values())) + SETTINGS_BYTES


def _state_bytes(optimizer: torch.optim.Optimizer, name: str, parameter: Tensor, size: int) -> int:
    """Bytes of AdamW's state of one tensor, as `optim.adamw` chooses it; with 8 bits at most these.

    Args:
        optimizer: of it.
        name, parameter: the tensor, or this rank's part of it.
        size: numbers of the whole.
    """
    master = 0 if parameter.dtype == torch.float32 else 4 * size
    args: Any = getattr(optimizer, "args", None)
    if getattr(args, "optim_bits", None) != 8 or size < SMALL or name.endswith("embed_tokens.weight"):
        return master + 8 * size
    return master + 2 * size + size // 16 + CODES_BYTES


def standing_at_once(saves: int, keep: int | None) -> int:
    """Checkpoints of this run that lie on the disk together at most.

    With a limit these are as many, one more while the newest is written, and the best one.
    """
    return saves if keep is None else min(saves, keep + 2)


def check_space(folder: Path, *, each: int, saves: int, keep: int | None) -> None:
    """Refuse a run whose checkpoints will not fit.

    Args:
        folder: the run folder.
        each: bytes of a checkpoint.
        saves: checkpoints that will be written.
        keep: how many of them stay; None is all.

    Raises:
        UserError: saying what is needed and what is free.
    """
    together = standing_at_once(saves, keep)
    free = shutil.disk_usage(folder).free
    if together * each > free:
        raise UserError(
            f"{folder}: {together} checkpoints of {_size(each)} need {_size(together * each)}, and "
            f"{_size(free)} are free; give a smaller --save_total_limit, a larger --save_steps or another "
            "--output_dir"
        )


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**28 else f"{count / 2**20:.2f} MiB"
