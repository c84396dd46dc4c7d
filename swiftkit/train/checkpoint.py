"""Checkpoints: written beside, read back, then renamed. A folder with a final name is complete."""

from __future__ import annotations

import json
import os
import shutil
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from swiftkit.engine import Engine, LoraSpec
from swiftkit.formats.peft import CONFIG, WEIGHTS, load_adapter, save_adapter
from swiftkit.train.run import ARGS, checkpoints

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

GENERATION = "generation_config.json"


def save_checkpoint(
    run: Path,
    step: int,
    *,
    engine: Engine,
    spec: LoraSpec,
    tokenizer: PreTrainedTokenizerFast,
    base_model: str,
    generation: dict[str, Any],
    keep: int | None = None,
) -> Path:
    """Write `checkpoint-<step>`: adapter in PEFT's format, tokenizer with template, and settings.

    Args:
        run: the run folder.
        step: finished optimizer steps.
        engine: holds the adapter.
        spec: its shape.
        tokenizer: travels along, so that the checkpoint alone is enough to talk to the model.
        base_model: hub id or folder of the base.
        generation: content of generation_config.json, so that other tools stop where the model learnt to.
        keep: older checkpoints beyond this number are removed, after the new one stands.
    """
    final = run / f"checkpoint-{step}"
    beside = run / f".checkpoint-{step}.partial"
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir()
    save_adapter(
        beside, engine.parameters, spec=spec, base_model=base_model, linear_names=engine.linear_names
    )
    # safetensors makes files that only their owner can read.
    (beside / WEIGHTS).chmod(stat.S_IMODE((beside / CONFIG).stat().st_mode))
    tokenizer.save_pretrained(beside)
    text = json.dumps(generation, indent=2, ensure_ascii=False)
    (beside / GENERATION).write_text(text + "\n", encoding="utf-8")
    shutil.copy2(run / ARGS, beside / ARGS)
    _check(beside, engine)
    _flush(beside)
    beside.rename(final)
    _flush_folder(run)
    for old in checkpoints(run)[: -keep if keep else 0]:
        shutil.rmtree(old)
    return final


def _check(folder: Path, engine: Engine) -> None:
    """Read the adapter back and compare it with what is in memory."""
    _, written = load_adapter(folder)
    for name, tensor in engine.parameters.items():
        if name not in written or not _same_bytes(written[name], tensor.detach().cpu()):
            raise OSError(f"{folder}: {name} reads back other than it was written; is the disk sound?")


def _same_bytes(one: Tensor, other: Tensor) -> bool:
    """Equality that holds for NaN too."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(*(tensor.contiguous().view(torch.uint8) for tensor in (one, other)))


def _flush(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    _flush_folder(folder)


def _flush_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)
