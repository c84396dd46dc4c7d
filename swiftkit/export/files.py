"""What lies beside the weights of a merged model: config, tokenizer with template, generation settings."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from swiftkit.data.tokenizer import generation_settings
from swiftkit.formats.generation import mended

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CONFIG, GENERATION = "config.json", "generation_config.json"
TOKENIZER = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*", "vocab*", "merges.txt",
    "*.model",
)  # fmt: skip
LICENCE = ("LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*")


def write_config(folder: Path, base: Path, *, tied: bool, vocabulary: int, dtype: torch.dtype | None) -> None:
    """The base's config.json, with what the merge changed."""
    config: dict[str, Any] = json.loads((base / CONFIG).read_text(encoding="utf-8"))
    config.pop("_name_or_path", None)
    config.pop("quantization_config", None)  # nothing is packed in what is written
    config["tie_word_embeddings"] = tied  # always written: families differ in what its absence means
    config["vocab_size"] = vocabulary
    if dtype is not None:
        config.pop("torch_dtype", None)
        config["dtype"] = str(dtype).removeprefix("torch.")
    write_json(folder / CONFIG, config)


def write_generation(folder: Path, tokenizer: PreTrainedTokenizerFast, *, own: Path, base: Path) -> list[str]:
    """Generation settings with every token at which the model learnt to stop.

    Args:
        folder: of the merged model.
        tokenizer: with the template of the training.
        own: the checkpoint, whose settings were written by the training.
        base: whose settings are taken where the checkpoint has none.

    Returns:
        Names of the base's settings that contradict each other and were left out.
    """
    source = own if (own / GENERATION).is_file() else base
    settings, dropped = mended(generation_settings(tokenizer, source))
    settings["eos_token_id"] = sorted(
        {*settings["eos_token_id"], *generation_settings(tokenizer, base)["eos_token_id"]},
        key=lambda token: (token != tokenizer.eos_token_id, token),
    )
    write_json(folder / GENERATION, settings)
    return dropped


def copy_tokenizer(folder: Path, *, own: Path, base: Path) -> None:
    """The checkpoint's tokenizer, which has the template of the training; else the base's. And licences."""
    source = own if (own / "tokenizer.json").is_file() else base
    for origin, patterns in ((source, TOKENIZER), (base, LICENCE)):
        for path in sorted({path for pattern in patterns for path in origin.glob(pattern)}):
            if path.is_file():
                shutil.copyfile(path, folder / path.name)
    if (source / "chat_templates").is_dir():
        shutil.copytree(source / "chat_templates", folder / "chat_templates", dirs_exist_ok=True)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a readable JSON file."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def flush(folder: Path) -> None:
    """Everything in a folder, and the folder itself, to the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    flush_folder(folder)


def flush_folder(folder: Path) -> None:
    """The names in a folder, to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
