"""Checkpoints: written beside, read back, then renamed. A folder with a final name is complete."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from swiftkit.errors import UserError
from swiftkit.formats.parts import together, write_parts
from swiftkit.train.artifact import Artifact, read_model
from swiftkit.train.run import ARGS, checkpoints
from swiftkit.train.state import Snapshot, StateDict

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

STATE = "training_state.safetensors"
PARTS = "training_state"  # a folder: what stays in parts, where the run's weights do
FACTS = "training_state.json"
GENERATION = "generation_config.json"
FORMAT = 1  # of the two files above


def checkpoint_files(tokenizer: PreTrainedTokenizerFast, generation: Mapping[str, Any]) -> dict[str, bytes]:
    """What a checkpoint holds besides numbers: with it, the checkpoint alone is enough to talk to the model.

    Args:
        tokenizer: with the run's template.
        generation: content of generation_config.json, so that other tools stop where the model learnt to.
    """
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        files = {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.is_file()}
    text = json.dumps(generation, indent=2, ensure_ascii=False)
    return {**files, GENERATION: (text + "\n").encode()}


def write_checkpoint(
    run: Path,
    snapshot: Snapshot,
    *,
    artifact: Artifact,
    files: Mapping[str, bytes],
    facts: Mapping[str, Any],
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Write `checkpoint-<step>`: the model part, tokenizer and settings, and what a resume needs.

    Args:
        run: the run folder.
        snapshot: of the run at that step.
        artifact: writes the model part.
        files: what else belongs to a checkpoint, such as the tokenizer.
        facts: what the run is made of, for a resume to compare.
        group: the processes that have parts in their snapshots. All of them call this; the first one writes
            everything else.

    Raises:
        OSError: when it cannot be written, or reads back other than it was written. Then nothing has the
            final name, and what was written is gone.
    """
    final, beside = run / f"checkpoint-{snapshot.step}", run / f".checkpoint-{snapshot.step}.partial"
    first = group is None or dist.get_rank(group) == 0

    def begin() -> None:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir()
        _fill(beside, snapshot, artifact=artifact, files={**files, ARGS: (run / ARGS).read_bytes()})
        _check(beside, snapshot)

    def finish() -> None:
        content = {"format": FORMAT, "step": snapshot.step, **facts, "state": snapshot.facts}
        _write_json(beside / FACTS, {**content, "files": _sizes(beside)})
        _flush(beside)
        if final.exists():  # damaged, or of a run that was cut back: this step's name is due now
            _remove(final)
        beside.rename(final)
        _flush_folder(run)

    try:
        together(group, begin if first else None)
        if group is not None:
            write_parts(beside / PARTS, snapshot.parts, group)
        together(group, finish if first else None)
    except BaseException:
        if first:
            shutil.rmtree(beside, ignore_errors=True)  # also to give a full disk its room back
        raise
    return final


def _sizes(folder: Path) -> dict[str, int]:
    """Bytes of each file, by its path in the folder."""
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in found}


def remove_old(run: Path, *, newest: int, keep: int | None, kept: Iterable[int | None]) -> None:
    """Remove checkpoints before `newest` beyond the number `keep`, apart from the steps in `kept`."""
    if keep is None:
        return
    spared = set(kept)
    numbers = [number for number in map(number_of, checkpoints(run)) if number <= newest]
    for number in numbers[:-keep]:
        if number not in spared:
            _remove(run / f"checkpoint-{number}")


def number_of(checkpoint: Path) -> int:
    """The finished steps of a checkpoint."""
    return int(checkpoint.name.removeprefix("checkpoint-"))


def clear_partial(run: Path) -> None:
    """Remove what a crash left beside the checkpoints; it never had a final name."""
    for path in run.glob(".checkpoint-*"):
        shutil.rmtree(path)


def damage(checkpoint: Path) -> str | None:
    """What keeps a checkpoint from being resumed, naming the file; None where nothing does."""
    path = checkpoint / FACTS
    if not path.is_file():
        return f"{path} is missing"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        sizes = dict(content["files"])
    except (ValueError, KeyError, TypeError):
        return f"{path} is cut or damaged"
    if content.get("format") != FORMAT:
        return f"{path} is of another version of swiftkit"
    for name, size in sizes.items():
        file = checkpoint / name
        if not file.is_file():
            return f"{file} is missing"
        if file.stat().st_size != size:
            return f"{file} is cut or damaged ({file.stat().st_size:,} of {size:,} bytes)"
    return None


def read_facts(checkpoint: Path) -> dict[str, Any]:
    """The content of `training_state.json` of a sound checkpoint."""
    content: dict[str, Any] = json.loads((checkpoint / FACTS).read_text(encoding="utf-8"))
    return content


def read_snapshot(checkpoint: Path) -> Snapshot:
    """A sound checkpoint's run, as it was.

    Raises:
        UserError: when a file of tensors is damaged.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    facts = read_facts(checkpoint)
    try:
        tensors = load_file(checkpoint / STATE)
    except SafetensorError as broken:
        raise UserError(f"{checkpoint / STATE} is damaged ({broken}); take another checkpoint") from None
    state: StateDict = facts["state"]
    stored = checkpoint / PARTS if (checkpoint / PARTS).is_dir() else None
    return Snapshot(facts["step"], read_model(checkpoint), tensors, state, None, stored=stored)


def _fill(folder: Path, snapshot: Snapshot, *, artifact: Artifact, files: Mapping[str, bytes]) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    for name, content in files.items():
        (folder / name).write_bytes(content)
    try:
        artifact.write(folder, snapshot.model)
        save_file(snapshot.tensors, folder / STATE, metadata={"format": "pt"})
    except SafetensorError as failure:  # its words are those of the operating system
        raise OSError(str(failure)) from failure
    (folder / STATE).chmod((folder / ARGS).stat().st_mode)  # safetensors makes files for their owner alone


def _check(folder: Path, snapshot: Snapshot) -> None:
    """Read all tensors back and compare them with what should be there."""
    from safetensors.torch import load_file

    for written, wanted in (
        (read_model(folder), snapshot.model),
        (load_file(folder / STATE), snapshot.tensors),
    ):
        for name, tensor in wanted.items():
            if name not in written or not same_bytes(written[name], tensor):
                raise OSError(f"{folder}: {name} reads back other than it was written; is the disk sound?")


def same_bytes(one: Tensor, other: Tensor) -> bool:
    """Equality that holds for NaN too."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(*(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)))


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")


def _remove(checkpoint: Path) -> None:
    """Take the final name away first: half a folder must not bear it."""
    doomed = checkpoint.with_name(f".{checkpoint.name}.removed")
    shutil.rmtree(doomed, ignore_errors=True)
    checkpoint.rename(doomed)
    shutil.rmtree(doomed)


def _flush(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        else:
            _flush_folder(path)
    _flush_folder(folder)


def _flush_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)
