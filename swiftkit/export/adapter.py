"""What is merged: a checkpoint's adapter, and the very base that it was trained on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from torch import Tensor

from swiftkit.config import MergeConfig
from swiftkit.data.tokenizer import load_tokenizer
from swiftkit.errors import UserError
from swiftkit.export.base import TrainingBase, training_base
from swiftkit.formats.checkpoints import recorded
from swiftkit.formats.named import open_model
from swiftkit.formats.peft import CONFIG as ADAPTER
from swiftkit.formats.peft import LoraSpec, load_adapter
from swiftkit.formats.source import LocalModel
from swiftkit.generate.find import find_checkpoint
from swiftkit.hub import Say, Source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True, eq=False)
class Adapter:
    """A checkpoint with the base that it belongs to.

    Args:
        folder: of the checkpoint.
        args: its `args.json`; empty for an adapter that is not of a run.
        spec, tensors: the adapter.
        base: its base on this machine.
    """

    folder: Path
    args: dict[str, Any]
    spec: LoraSpec
    tensors: dict[str, Tensor]
    base: LocalModel

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The checkpoint's, with the template of the training; else the base's."""
        own = (self.folder / "tokenizer.json").is_file()
        return load_tokenizer(self.folder if own else self.base.path)

    @cached_property
    def trained_on(self) -> TrainingBase | None:
        """What the training made of the base's weights."""
        return training_base(self.args)


def open_adapter(config: MergeConfig, say: Say) -> Adapter:
    """A checkpoint (or the newest one of a run folder), its adapter, and the very base of its training.

    Raises:
        UserError: there is no adapter, a whole model in its place, or another base.
    """
    folder = find_checkpoint(Path(config.adapters).expanduser())
    args = recorded(folder)
    if not (folder / ADAPTER).is_file():
        raise UserError(
            f"{folder} holds a whole model, not an adapter: there is nothing to merge; open it as it is, "
            f"with swiftkit chat --model {folder} or with transformers"
        )
    spec, tensors = load_adapter(folder)
    if spec.scores:
        raise UserError(
            f"{folder} is a reward model: a merged model writes answers and has no place for its head; use "
            "it as it is, by swiftkit.reward_model or PEFT"
        )
    return Adapter(folder, args, spec, tensors, _open_base(config, folder, args, say))


def _open_base(config: MergeConfig, folder: Path, args: dict[str, Any], say: Say) -> LocalModel:
    """The base of the training, by its fingerprint; an adapter that is not of a run has none."""
    trained, base = args.get("config", {}), args.get("base", {})
    source, revision, name = config.model_source, config.revision, config.model
    if name is None:
        peft = json.loads((folder / ADAPTER).read_text(encoding="utf-8"))
        name = trained.get("model") or peft.get("base_model_name_or_path")
        if source == "auto" and base.get("source") in get_args(Source):
            source = base["source"]
        on_hub = source in ("hf", "modelscope")
        revision = revision or (base.get("revision") if on_hub else None) or trained.get("revision")
    if not name:
        raise UserError(f"{folder} does not say which base it was trained on; give --model")
    model = open_model(name, source=source, revision=revision, say=say)
    before, now = base.get("fingerprint"), model.fingerprint
    if before is None:
        say(f"warning   {folder} records no fingerprint: whether {name} is its base is unknown")
    elif before != now:
        raise UserError(
            f"{folder} was trained on {trained.get('model')} (from {base.get('source')}, fingerprint "
            f"{before[:12]}), and {name} (from {model.source}, fingerprint {now[:12]}) has other weights or "
            "another config.json; give the --model or the --revision of the training"
        )
    return model
