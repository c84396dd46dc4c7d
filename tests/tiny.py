"""Tiny models of every served family, random but not trivial: norms and biases are drawn too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from swiftkit.data import Document, Origin, PackedBatch, collate
from swiftkit.engine import Batch

VOCABULARY = 272
SIZES = dict(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=VOCABULARY,
    max_position_embeddings=512,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": dict(model_type="llama"),
    "llama-tied-biased": dict(
        model_type="llama", tie_word_embeddings=True, attention_bias=True, mlp_bias=True
    ),
    "llama3-rope": dict(
        model_type="llama",
        rope_parameters=dict(
            rope_type="llama3",
            rope_theta=10000.0,
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
    ),
    "qwen2": dict(model_type="qwen2"),
    "qwen3": dict(model_type="qwen3", head_dim=24),
    "gemma2": dict(
        model_type="gemma2",
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=8,
        attn_logit_softcapping=1.0,
        final_logit_softcapping=2.0,
        num_hidden_layers=4,
    ),
    "gemma3": dict(model_type="gemma3_text", head_dim=16, query_pre_attn_scalar=16, sliding_window=8,
                   num_hidden_layers=7),
    "mistral": dict(model_type="mistral", sliding_window=8),
    "phi3": dict(model_type="phi3"),
    "granite": dict(
        model_type="granite", logits_scaling=3.0, residual_multiplier=0.5, embedding_multiplier=2.0,
        attention_multiplier=0.3,
    ),
    "smollm3": dict(model_type="smollm3", no_rope_layer_interval=2),
    "olmo2": dict(model_type="olmo2"),
    "glm4": dict(model_type="glm4", head_dim=16),
    "cohere2": dict(model_type="cohere2", sliding_window=8, logit_scale=0.25, num_hidden_layers=4),
}  # fmt: skip


def make(family: str, folder: Path, *, seed: int = 0, **changes: Any) -> Any:
    """A random transformers model of a family, written to `folder`; returned in float32, eager attention."""
    from transformers import AutoConfig

    options = {**SIZES, **FAMILIES[family], **changes}
    config = AutoConfig.for_model(options.pop("model_type"), **options)
    return _drawn(config, folder, seed=seed)


def make_toy(folder: Path, *, seed: int = 0, tok: str = "plain", template: str | None = None) -> Any:
    """The toy Llama of the cases with random weights, and a toy tokenizer beside it: a whole model folder."""
    from transformers import AutoConfig

    from tests.cases import toy

    model = _drawn(AutoConfig.from_pretrained(toy.case("00-toy/model-dense.json")), folder, seed=seed)
    tokenizer = toy.tokenizer(tok)
    if template is not None:
        tokenizer.chat_template = Path(toy.template(template)).read_text(encoding="utf-8")
    tokenizer.save_pretrained(folder)
    return model


def _drawn(config: Any, folder: Path, *, seed: int) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            elif parameter.dim() == 1:
                parameter.copy_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.copy_(torch.randn_like(parameter) * 0.12)
    model.save_pretrained(folder)
    return model


def documents(lengths: list[int], *, seed: int = 0) -> list[Document]:
    """Random documents; the second half of each is trained."""
    rng = np.random.default_rng(seed)
    made = []
    for line, length in enumerate(lengths, 1):
        trained = np.arange(length) >= length // 2
        ids = rng.integers(10, VOCABULARY, length).astype(np.int32)
        made.append(Document(ids=ids, trained=trained, origin=Origin("random", line)))
    return made


def packed(lengths: list[int], *, seed: int = 0) -> PackedBatch:
    """One window of random documents."""
    return collate([documents(lengths, seed=seed)], pad_id=0)


def row(documents: list[Document]) -> Batch:
    """One row on the CPU."""
    return Batch.of(collate([documents], pad_id=0), device=torch.device("cpu"))


def randomise_adapter(parameters: dict[str, torch.Tensor], *, seed: int = 0) -> None:
    """Nonzero A and B, so that every gradient is nonzero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
