"""What every row of the benchmark computes: the same weights, token stream, adapter shape and optimizer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# A frozen weight, by its name in a PEFT model.
BASE_WEIGHT = "base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight"
SPECIAL_TOKENS = 16  # ids below are the tokenizer's special tokens; the stream has none of them


@dataclass(frozen=True)
class Shape:
    """A Llama model, and the documents that it is trained on by default."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    documents: int
    length: int


SHAPES = {
    "llama3-8b": Shape(4096, 14336, 32, 32, 8, 128256, documents=4, length=4096),
    "llama3-70b": Shape(8192, 28672, 80, 64, 8, 128256, documents=1, length=4096),
    "tiny": Shape(128, 256, 2, 4, 2, 512, documents=2, length=64),
}


@dataclass(frozen=True)
class Workload:
    """A benchmark run.

    Args:
        shape: a name in SHAPES.
        layers: of the model.
        documents: in one optimizer step, all in one micro-batch.
        length: tokens of each document.
        warmup, steps: optimizer steps before the clock starts, and while it runs.
        seed: of weights, adapters and tokens.
        folder: where the model's files are, or will be written.
    """

    shape: str
    layers: int
    documents: int
    length: int
    warmup: int
    steps: int
    seed: int
    folder: Path
    rank: int = 16
    alpha: int = 32
    learning_rate: float = 1e-4
    max_grad_norm: float = 1.0

    @property
    def total_steps(self) -> int:
        """Optimizer steps of a row."""
        return self.warmup + self.steps

    @property
    def step_tokens(self) -> int:
        """Tokens of an optimizer step."""
        return self.documents * self.length

    def tokens(self) -> Iterator[NDArray[np.int64]]:
        """The windows of each step, [documents, length]; every token is trained."""
        rng = np.random.default_rng(self.seed)
        vocabulary = SHAPES[self.shape].vocabulary
        for _ in range(self.total_steps):
            yield rng.integers(SPECIAL_TOKENS, vocabulary, (self.documents, self.length))

    def rows(self) -> list[dict[str, list[int]]]:
        """The same windows one by one, as the rows of a tokenized data set."""
        windows = (window.tolist() for step in self.tokens() for window in step)
        return [{"input_ids": window, "labels": window} for window in windows]

    def write_model(self) -> None:
        """Write a model folder with normal(0, 0.02) bf16 weights, unless it is there already."""
        config = self.folder / "config.json"
        if config.is_file():
            return
        from safetensors.torch import save_file

        self.folder.mkdir(parents=True, exist_ok=True)
        weight_map: dict[str, str] = {}
        size = 0
        for index, names in enumerate(self._shards()):
            file = f"model-{index:05d}.safetensors"
            tensors = {name: self._random(name, shape) for name, shape in names.items()}
            save_file(tensors, self.folder / file, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(names, file)
            size += sum(tensor.nbytes for tensor in tensors.values())
        index_file = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (self.folder / "model.safetensors.index.json").write_text(json.dumps(index_file))
        _write_tokenizer(self.folder)
        config.write_text(json.dumps(self._config(), indent=2))  # last: it says that the folder is whole

    def _config(self) -> dict[str, Any]:
        shape = SHAPES[self.shape]
        return {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16",
            "hidden_size": shape.hidden, "intermediate_size": shape.intermediate,
            "num_hidden_layers": self.layers, "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads, "head_dim": shape.hidden // shape.heads,
            "vocab_size": shape.vocabulary, "max_position_embeddings": max(8192, self.length),
            "rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
            "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False,
            "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
        }  # fmt: skip

    def _shards(self) -> Iterator[dict[str, tuple[int, ...]]]:
        """Names and shapes of the tensors, a file at a time."""
        shape = SHAPES[self.shape]
        hidden, inner = shape.hidden, shape.intermediate
        kv = hidden // shape.heads * shape.kv_heads
        out_in = {
            "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden), "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
            "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
        }  # fmt: skip
        yield {"model.embed_tokens.weight": (shape.vocabulary, hidden), "model.norm.weight": (hidden,)}
        for layer in range(self.layers):
            yield {f"model.layers.{layer}.{name}.weight": size for name, size in out_in.items()}
        yield {"lm_head.weight": (shape.vocabulary, hidden)}

    def _random(self, name: str, shape: tuple[int, ...]) -> Tensor:
        import torch

        if len(shape) == 1:  # a norm
            return torch.ones(shape, dtype=torch.bfloat16)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        generator = torch.Generator(device).manual_seed(hash_of(f"{self.seed}:{name}"))
        return torch.randn(shape, generator=generator, device=device).mul_(0.02).bfloat16().cpu()


def hash_of(text: str) -> int:
    """A seed that is the same in every process."""
    import hashlib

    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "little")


def _write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer: no row uses it, but every library wants one beside the weights."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<|begin_of_text|>", "<|end_of_text|>", "<|pad|>", "<|eot_id|>", "<|start_header_id|>"]
    names += ["<|end_header_id|>"]
    names += [f"<|reserved_{index}|>" for index in range(SPECIAL_TOKENS - len(names))]
    vocabulary = {token: index for index, token in enumerate(names)}
    for byte in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[byte] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(names)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=names[0], eos_token=names[1], pad_token=names[2],
        chat_template="{% for m in messages %}{{ m['content'] }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>{% endif %}",
    ).save_pretrained(folder)  # fmt: skip
