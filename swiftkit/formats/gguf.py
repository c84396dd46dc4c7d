"""GGUF in: a llama.cpp file becomes a Hugging Face model folder.

The conversion is ours, so that it gives the same files under every transformers version. The format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swiftkit import hub
from swiftkit.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    import torch
    from gguf import GGUFReader
    from gguf.gguf_reader import ReaderTensor

CONVERTER_VERSION = 1

# GGUF's name to config.json's name. Any other key of the architecture may change what the model
# computes (rope scaling, experts, ...): a file that has one is refused.
LLAMA_CONFIG = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
}
LLAMA_OPTIONAL = ("attention.head_count_kv", "rope.freq_base", "vocab_size")
LLAMA_REQUIRED = tuple(key for key in LLAMA_CONFIG if key not in LLAMA_OPTIONAL)
LLAMA_HEAD_SIZES = ("rope.dimension_count", "attention.key_length", "attention.value_length")
LLAMA_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOKENIZER_REQUIRED = tuple(
    f"tokenizer.ggml.{key}" for key in ("tokens", "token_type", "merges", "eos_token_id")
)
CONTROL, USER_DEFINED = 3, 4  # of tokenizer.ggml.token_type


def convert(gguf: Path, out: Path, *, say: hub.Say = print, record: Mapping[str, str] | None = None) -> None:
    """Write a model folder (bf16 safetensors, config, tokenizer, generation config) from a GGUF file.

    Args:
        gguf: a file of the llama architecture with a byte-level BPE tokenizer, in any quantization.
        out: the folder to make; it appears under this name only when it is whole.
        say: receives a sentence before the work.
        record: what swiftkit.json in the folder shall say about the source.

    Raises:
        UserError: `out` exists, the file is damaged or has unsupported features, or the disk is too full.
    """
    if out.exists():
        raise UserError(f"{out} exists already; remove it or convert to another folder")
    metadata, tensors = _read(gguf)
    config = _config(gguf, metadata, tied=all(tensor.name != "output.weight" for tensor in tensors))
    size = sum(2 * int(tensor.n_elements) for tensor in tensors)
    hub.need_space(out.parent, size, f"converting {gguf.name}")
    say(f"converting {gguf.name} to safetensors, once: {size / 1e6:,.0f} MB, less than a minute")

    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a run that was killed
    partial.mkdir(parents=True)
    try:
        _write_tokenizer(gguf, metadata, partial)
        _write_json(partial / "config.json", config)
        special = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        _write_json(partial / "generation_config.json", special)
        _write_weights(gguf, tensors, config, partial / "model.safetensors")
        made_by = {"converter_version": CONVERTER_VERSION, "gguf": gguf.name}
        _write_json(partial / "swiftkit.json", {**(record or {}), **made_by})
        os.replace(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def tensor_count(path: Path) -> int:
    """The tensors of a GGUF file.

    Raises:
        UserError: it is not a whole one.
    """
    return len(_read(path)[1])


def _read(path: Path) -> tuple[dict[str, Any], list[ReaderTensor]]:
    from gguf import GGUFReader

    try:
        reader: GGUFReader = GGUFReader(path)
    except (ValueError, IndexError) as error:
        raise UserError(f"{path} is no whole GGUF file ({error}); remove it and download it again") from None
    return {name: field.contents() for name, field in reader.fields.items()}, reader.tensors


def _config(path: Path, metadata: Mapping[str, Any], *, tied: bool) -> dict[str, Any]:
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise UserError(f"{path}: architecture {architecture} is not converted, only llama; use safetensors")
    given = {key.removeprefix("llama."): value for key, value in metadata.items() if key.startswith("llama.")}
    unknown = sorted(given.keys() - LLAMA_CONFIG.keys() - set(LLAMA_HEAD_SIZES))
    if unknown:
        raise UserError(f"{path}: llama.{unknown[0]} is a feature that is not converted; use safetensors")
    absent = [f"llama.{key}" for key in LLAMA_REQUIRED if key not in given]
    absent += [key for key in TOKENIZER_REQUIRED if key not in metadata]
    if absent:
        raise UserError(f"{path} lacks {', '.join(absent)}; make the GGUF anew with a current llama.cpp")
    config = {name: given[key] for key, name in LLAMA_CONFIG.items() if key in given}
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    config.setdefault("vocab_size", len(metadata["tokenizer.ggml.tokens"]))
    config.setdefault("rope_theta", 10000.0)
    config["rms_norm_eps"] = float(f"{config['rms_norm_eps']:.6g}")  # stored in fp32: 9.99999974e-06
    head_size = config["hidden_size"] // config["num_attention_heads"]
    if any(given.get(key, head_size) != head_size for key in LLAMA_HEAD_SIZES):
        raise UserError(f"{path}: head size other than hidden / heads is not converted; use safetensors")
    eos = metadata["tokenizer.ggml.eos_token_id"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        **config,
        "head_dim": head_size,
        "tie_word_embeddings": tied,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": eos,
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id", eos),
        "dtype": "bfloat16",
    }


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# ---- weights ---------------------------------------------------------------------------------------------


def _write_weights(path: Path, tensors: list[ReaderTensor], config: Mapping[str, Any], out: Path) -> None:
    from safetensors.torch import save_file

    weights = {_hf_name(path, tensor.name): _weight(path, tensor, config) for tensor in tensors}
    save_file(weights, out, metadata={"format": "pt"})
    shutil.copymode(out.with_name("config.json"), out)  # safetensors makes it private; caches are shared


def _hf_name(path: Path, name: str) -> str:
    found = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.weight", name)
    if found is None or found[2] not in LLAMA_TENSORS:
        raise UserError(f"{path}: tensor {name} is of a feature that is not converted; use safetensors")
    layer = f"model.layers.{found[1]}." if found[1] else ""
    return f"{layer}{LLAMA_TENSORS[found[2]]}.weight"


def _weight(path: Path, tensor: ReaderTensor, config: Mapping[str, Any]) -> torch.Tensor:
    import torch
    from gguf import dequantize

    try:
        values = dequantize(tensor.data, tensor.tensor_type)  # [out, in] or [features], fp32
    except NotImplementedError:
        kind = tensor.tensor_type.name
        raise UserError(f"{path}: tensor {tensor.name} has type {kind}, which cannot be read") from None
    if tensor.name.endswith("attn_q.weight"):
        values = halves_from_pairs(values, heads=config["num_attention_heads"])
    elif tensor.name.endswith("attn_k.weight"):
        values = halves_from_pairs(values, heads=config["num_key_value_heads"])
    return torch.tensor(values).to(torch.bfloat16)


def halves_from_pairs(weight: np.ndarray, *, heads: int) -> np.ndarray:
    """Undo llama.cpp's order of query and key rows, in which neighbours rotate together.

    Args:
        weight: [heads * head size, hidden], rows of a head in pairs (i, i + head size / 2).
        heads: of this projection.
    """
    rows, hidden = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, hidden).swapaxes(1, 2).reshape(rows, hidden)


# ---- tokenizer -------------------------------------------------------------------------------------------


def _write_tokenizer(path: Path, metadata: Mapping[str, Any], out: Path) -> None:
    """tokenizer.json and its config; of the byte-level BPE kinds, SmolLM's way of splitting words."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind = f"{metadata.get('tokenizer.ggml.model')}/{metadata.get('tokenizer.ggml.pre')}"
    if kind != "gpt2/smollm" or metadata.get("tokenizer.ggml.add_bos_token"):
        raise UserError(f"{path}: tokenizer {kind} is not converted, only gpt2/smollm; use safetensors")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    tokenizer.decoder = decoders.ByteLevel()
    for token, token_type in zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True):
        if token_type in (CONTROL, USER_DEFINED):
            tokenizer.add_tokens([AddedToken(token, normalized=False, special=token_type == CONTROL)])
    tokenizer.save(str(out / "tokenizer.json"))

    eos = metadata["tokenizer.ggml.eos_token_id"]
    special = {
        "bos_token": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token": eos,
        "pad_token": metadata.get("tokenizer.ggml.padding_token_id", eos),
        "unk_token": metadata.get("tokenizer.ggml.unknown_token_id"),
    }
    settings: dict[str, Any] = {name: tokens[i] for name, i in special.items() if i is not None}
    # Not GPT2Tokenizer: transformers 5 rebuilds that class's word splitting and would lose the digits.
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    settings["model_max_length"] = metadata["llama.context_length"]
    settings["clean_up_tokenization_spaces"] = False
    if "tokenizer.chat_template" in metadata:
        settings["chat_template"] = metadata["tokenizer.chat_template"]
    _write_json(out / "tokenizer_config.json", settings)
