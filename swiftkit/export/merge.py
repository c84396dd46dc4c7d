"""`swiftkit merge`: base plus adapter as one model that every reader opens."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import torch

from swiftkit.config import MergeConfig
from swiftkit.engine.build import describe
from swiftkit.engine.placement import find_device
from swiftkit.errors import UserError
from swiftkit.export import card, files, gguf, push
from swiftkit.export.adapter import Adapter, open_adapter
from swiftkit.export.base import held_of
from swiftkit.export.verify import verify
from swiftkit.export.weights import MergedWeights
from swiftkit.formats.packing import packing_of
from swiftkit.formats.quantized import open_stored
from swiftkit.formats.shards import Stored, shards, write_shards
from swiftkit.hub import Say

DTYPES = {"base": None, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def merge(config: MergeConfig, *, say: Say = print) -> Path:
    """Write base plus adapter to `config.output_dir`, check it, and hand it on where that is asked for.

    Everything is written beside, checked, and renamed: a folder of that name is whole and checked.

    Raises:
        UserError: for what is wrong with checkpoint, base or target, before anything is written; or when the
            merged model is not the adapter's within the stated bounds.
    """
    out = Path(config.output_dir).expanduser()
    if out.exists():
        raise UserError(f"{out} exists already; give another folder, or remove it first")
    device = torch.device(find_device(config.device))
    shard_bytes = parse_size(config.max_shard_size)
    converter = gguf.prepare(config.gguf, config.gguf_type) if config.gguf else None
    pushing = push.prepare(config.push_to_hub, private=config.private) if config.push_to_hub else None
    adapter = open_adapter(config, say)
    packing = packing_of(describe(adapter.base.path))
    if packing is not None and config.merge_dtype == "base":
        config = config.with_changes(merge_dtype="bf16")
    merged = merged_weights(adapter, config, device)
    parts = shards(merged.tensors, max_bytes=shard_bytes)
    size = sum(tensor.nbytes for tensor in merged.tensors)
    _need_space(out, size)
    say(
        f"merging   {len(merged.factors)} layers of {adapter.folder} into {adapter.base.name} "
        f"({config.merge_base} weights), {size / 1e9:,.2f} GB in {len(parts)} file{'s' * (len(parts) > 1)}"
    )
    if packing is not None:
        say(
            f"          the base is {packing}: its weights are unpacked, and all is written in "
            f"{config.merge_dtype}. To keep its size, keep the adapter beside it: chat and eval take both"
        )
    beside = out.absolute().with_name(f".{out.name}.partial")
    shutil.rmtree(beside, ignore_errors=True)  # left by a merge that was killed
    beside.mkdir(parents=True)
    try:
        _write(beside, adapter, merged, parts, config, say)
        checked = verify(beside, adapter, merged, config, device=device, say=say)
        card.write(beside, adapter, config, checked)
        files.flush(beside)
        beside.rename(out)
        files.flush_folder(out.absolute().parent)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    say(f"merged    {out}\ntalk      swiftkit chat --model {out}")
    if converter is not None:
        converter.convert(out, say)
    if pushing is not None:
        pushing.upload(out, say)
    return out


def _write(
    folder: Path,
    adapter: Adapter,
    merged: MergedWeights,
    parts: list[list[Stored]],
    config: MergeConfig,
    say: Say,
) -> None:
    base = adapter.base.path
    files.write_config(
        folder,
        base,
        tied=merged.tied,
        vocabulary=merged.vocabulary,
        dtype=DTYPES[config.merge_dtype],
    )
    files.copy_tokenizer(folder, own=adapter.folder, base=base)
    dropped = files.write_generation(folder, adapter.tokenizer, own=adapter.folder, base=base)
    if dropped:
        say(
            f"warning   generation_config.json: {', '.join(dropped)} contradict its do_sample or num_beams, "
            "had no effect, and are left out: no tool could save the model with them"
        )
    write_shards(folder, parts, merged.pieces)


def merged_weights(adapter: Adapter, config: MergeConfig, device: torch.device) -> MergedWeights:
    """The tensors of the merged model.

    Raises:
        UserError: the adapter does not fit the base, or no dequantized base can be had.
    """
    description = describe(adapter.base.path)
    dequantized = config.merge_base == "dequantized"
    held = held_of(adapter.trained_on, description) if dequantized else None
    if dequantized and held is None and packing_of(description) is None:
        trained = adapter.trained_on
        why = (
            "whose run is not recorded (there is no args.json of swiftkit)"
            if trained is None
            else f"which was trained on {trained.precision} weights: none were quantized"
        )
        raise UserError(f"--merge_base dequantized needs an fp8 or nf4 training, not {adapter.folder}, {why}")
    return MergedWeights(
        open_stored(adapter.base.path, description),
        description=description,
        spec=adapter.spec,
        tensors=adapter.tensors,
        held=held,
        dtype=DTYPES[config.merge_dtype],
        device=device,
    )


def parse_size(text: str) -> int:
    """Bytes of `5GB`, `500MB` (powers of ten) or `2GiB` (of two).

    Raises:
        UserError: another form.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", text.strip())
    unit = found[2].upper() if found else ""
    if found is None or unit not in UNITS or float(found[1]) * UNITS[unit] < 1:
        raise UserError(f"--max_shard_size takes a size such as 5GB or 500MB, not {text}")
    return int(float(found[1]) * UNITS[unit])


def _need_space(out: Path, size: int) -> None:
    existing = next(parent for parent in out.absolute().parents if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < size:
        raise UserError(
            f"{out} needs {size / 1e9:,.1f} GB, and {existing} has {free / 1e9:,.1f} GB free; make room, or "
            "give a folder on another disk"
        )
