"""What a user means by a checkpoint: an adapter, a whole model, or a model's name.

The doors read it: nothing heavy is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swiftkit.errors import UserError
from swiftkit.formats.checkpoints import checkpoints, recorded

ADAPTER, MODEL = "adapter_config.json", "config.json"


@dataclass(frozen=True)
class Place:
    """Where the weights are.

    Args:
        adapter: a PEFT adapter's folder; None for a model alone.
        model: a name, hub id or folder; None is what the adapter was trained on.
        args: the `args.json` beside what was trained; empty where there is none of ours.
    """

    adapter: Path | None
    model: str | None
    args: Mapping[str, Any] = field(default_factory=dict)

    @property
    def trained(self) -> Mapping[str, Any]:
        """The config of the training, every `auto` resolved."""
        return self.args.get("config", {})


def find(*, checkpoint: str | None = None, adapters: str | None = None, model: str | None = None) -> Place:
    """The place that `swiftkit eval CHECKPOINT`, `--adapters` and `--model` name.

    Args:
        checkpoint: a checkpoint or a run's folder, or what a model may be.
        adapters: a checkpoint or a run's folder.
        model: a name, hub id or folder.

    Raises:
        UserError: no checkpoint is there, or a whole model and another one are named.
    """
    word = adapters if adapters is not None else checkpoint
    path = None if word is None else Path(word).expanduser()
    if path is None or not (path.is_dir() or adapters is not None):
        if checkpoint is not None and model is not None:
            raise UserError(f"{checkpoint} is no folder; give a checkpoint, or --model {model} alone")
        name = model or checkpoint
        return Place(None, name, recorded(Path(name).expanduser()) if name else {})
    folder = find_checkpoint(path, flag="" if adapters is None else "--adapters ")
    if (folder / ADAPTER).is_file():
        return Place(folder, model, recorded(folder))
    if model is not None:
        raise UserError(f"{folder} is a whole model; leave --model {model} out")
    return Place(None, str(folder), recorded(folder))


def find_checkpoint(path: Path, *, flag: str = "--adapters ") -> Path:
    """A checkpoint's folder (an adapter or a whole model), or the newest one of a run's folder.

    Args:
        path: where to look.
        flag: stands in front of the path in a complaint.

    Raises:
        UserError: if there is neither.
    """
    if (path / ADAPTER).is_file() or (path / MODEL).is_file():
        return path
    inside = checkpoints(path)
    if not inside:
        raise UserError(f"{flag}{path}: no adapter and no checkpoint there")
    return inside[-1]
