"""A whole model on disk as transformers writes it: sharded safetensors under their names, and config.json."""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swiftkit.formats.weights import INDEX, WHOLE

if TYPE_CHECKING:
    from torch import Tensor

CONFIG = "config.json"
WRITES, JUDGES = "ForCausalLM", "ForSequenceClassification"  # ends of the names of transformers' classes
SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True)
class FullSpec:
    """Every weight of the model is trained.

    Args:
        vocabulary: rows of embedding and head, where they are more than the base has.
        scores: a reward model: a head [1, hidden] that scores an answer's last token stands in for the one
            that writes.
    """

    vocabulary: int | None = None
    scores: bool = False

    @property
    def features(self) -> set[str]:
        """Names of `support.FEATURES`."""
        return {"full"}


def save_model(
    folder: Path,
    tensors: Mapping[str, Tensor],
    *,
    base: Path,
    vocabulary: int | None = None,
    scores: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write weights and config.json; the tokenizer and generation settings are another's.

    Args:
        folder: exists already.
        tensors: all weights of the model, by the names of its checkpoint; a tied one once.
        base: folder of the model that they were trained from, whose config.json goes along.
        vocabulary: its new number of rows, where that has changed.
        scores: as in `FullSpec`; transformers loads it as a sequence classifier with one label.
        shard_bytes: of one file at most, unless a single tensor is larger.
    """
    from safetensors.torch import save_file

    config: dict[str, Any] = json.loads((base / CONFIG).read_text(encoding="utf-8"))
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
    if vocabulary is not None:
        config["vocab_size"] = vocabulary
    if scores:
        config["architectures"] = [name.replace(WRITES, JUDGES) for name in config.get("architectures", [])]
        config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (folder / CONFIG).write_text(text + "\n", encoding="utf-8")
    shards = _shards(tensors, shard_bytes)
    names = [f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)]
    names = names if len(shards) > 1 else [WHOLE]
    for file, members in zip(names, shards, strict=True):
        chosen = {name: tensors[name].detach().cpu().contiguous() for name in members}
        save_file(chosen, folder / file, {"format": "pt"})
        # safetensors makes files that only their owner can read.
        (folder / file).chmod(stat.S_IMODE((folder / CONFIG).stat().st_mode))
    if len(shards) > 1:
        total = sum(tensor.nbytes for tensor in tensors.values())
        where = {name: file for file, members in zip(names, shards, strict=True) for name in members}
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _shards(tensors: Mapping[str, Tensor], shard_bytes: int) -> list[list[str]]:
    """Names by file, in order."""
    shards: list[list[str]] = [[]]
    room = shard_bytes
    for name, tensor in tensors.items():
        if shards[-1] and tensor.nbytes > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(name)
        room -= tensor.nbytes
    return shards
