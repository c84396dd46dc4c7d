"""Host memory of `swiftkit merge` on a synthetic checkpoint of many shards, by default Llama-3-70B layers.

    python benchmarks/merge_memory.py --layers 8

The base's files are sparse: they have their true size and hold zeros, so that only the merged model takes
disk. The adapter is random, of rank 16 on all linear layers, in float32. The merge runs in a process of its
own whose largest resident size (VmHWM) is the figure; no file is mapped, so page cache is not in it. There,
large blocks always go back to the system when they are freed: glibc otherwise learns to keep some, 30 to 150
MiB from one run to the next, which says nothing about what a merge holds.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from swiftkit.formats.peft import LoraSpec, save_adapter
from swiftkit.formats.shards import NAMES, Stored, shards
from swiftkit.formats.source import fingerprint
from swiftkit.formats.weights import INDEX

LINEARS = {
    "self_attn.q_proj": ("hidden", "hidden"), "self_attn.k_proj": ("kv", "hidden"),
    "self_attn.v_proj": ("kv", "hidden"), "self_attn.o_proj": ("hidden", "hidden"),
    "mlp.gate_proj": ("inner", "hidden"), "mlp.up_proj": ("inner", "hidden"),
    "mlp.down_proj": ("hidden", "inner"),
}  # fmt: skip
NO_KEEPING = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}  # set by hand, glibc's threshold stays where it is
NORMS = ("input_layernorm", "post_attention_layernorm")

CHILD = """
import json, sys, time

def memory(field):
    lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(lines[field].split()[0]) * 1024

from swiftkit.config import MergeConfig, build
from swiftkit.export.merge import merge
import transformers.models.llama.modeling_llama
import torch

config = build(MergeConfig, json.loads(sys.argv[1]))
torch.set_num_threads(int(sys.argv[2]))
before, start = memory("VmRSS"), time.perf_counter()
merge(config, say=lambda line: print(line, file=sys.stderr, flush=True))
print(json.dumps({"before": before, "peak": memory("VmHWM"), "seconds": time.perf_counter() - start}))
"""


def sizes(options: argparse.Namespace) -> dict[str, int]:
    """Widths by the words of LINEARS."""
    kv = options.hidden // options.heads * options.kv_heads
    return {"hidden": options.hidden, "inner": options.intermediate, "kv": kv}


def base_tensors(options: argparse.Namespace) -> Iterator[Stored]:
    """The tensors of a Llama of this shape, in bf16."""
    width, dtype = sizes(options), torch.bfloat16
    yield Stored("model.embed_tokens.weight", dtype, (options.vocabulary, options.hidden))
    for layer in range(options.layers):
        prefix = f"model.layers.{layer}"
        for name, (rows, columns) in LINEARS.items():
            yield Stored(f"{prefix}.{name}.weight", dtype, (width[rows], width[columns]))
        for name in NORMS:
            yield Stored(f"{prefix}.{name}.weight", dtype, (options.hidden,))
    yield Stored("model.norm.weight", dtype, (options.hidden,))
    yield Stored("lm_head.weight", dtype, (options.vocabulary, options.hidden))


def write_base(folder: Path, options: argparse.Namespace) -> int:
    """A model folder whose weight files are holes; returns its bytes."""
    folder.mkdir()
    files = shards(base_tensors(options), max_bytes=options.shard_bytes)
    where = {}
    for number, tensors in enumerate(files, 1):
        name = f"model-{number:05}-of-{len(files):05}.safetensors"
        header: dict[str, Any] = {}
        end = 0
        for tensor in tensors:
            start, end = end, end + tensor.nbytes
            offsets = [start, end]
            header[tensor.name] = {
                "dtype": NAMES[tensor.dtype], "shape": tensor.shape, "data_offsets": offsets,
            }  # fmt: skip
            where[tensor.name] = name
        text = json.dumps(header).encode()
        with (folder / name).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)
    total = sum(tensor.nbytes for tensors in files for tensor in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / INDEX).write_text(json.dumps(index))
    write_description(folder, options)
    return total


def write_description(folder: Path, options: argparse.Namespace) -> None:
    """config.json and a tokenizer of three words."""
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    LlamaConfig(
        hidden_size=options.hidden,
        intermediate_size=options.intermediate,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.kv_heads,
        vocab_size=options.vocabulary,
        dtype="bfloat16",
    ).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", bos_token="<s>").save_pretrained(folder)


def write_adapter(folder: Path, base: Path, options: argparse.Namespace) -> None:
    """A random adapter on every linear layer, as a run leaves it."""
    folder.mkdir()
    width, generator = sizes(options), torch.Generator().manual_seed(0)
    tensors: dict[str, Tensor] = {}
    for layer in range(options.layers):
        for name, (rows, columns) in LINEARS.items():
            module = f"model.layers.{layer}.{name}"
            tensors[f"{module}.lora_A"] = (
                torch.randn(options.rank, width[columns], generator=generator) * 0.01
            )
            tensors[f"{module}.lora_B"] = torch.randn(width[rows], options.rank, generator=generator) * 0.01
    spec = LoraSpec(rank=options.rank, alpha=2 * options.rank)
    names = {name.rpartition(".")[0] for name in tensors}
    save_adapter(folder, tensors, spec=spec, base_model=str(base), linear_names=names)
    args = {
        "method": "sft",
        "config": {"model": str(base), "base_precision": options.precision, "dataset": []},
        "base": {"source": "folder", "fingerprint": fingerprint(base)},
        "machine": {"device": "CPU"},
    }
    (folder / "args.json").write_text(json.dumps(args))


def main() -> None:
    """Make the checkpoint, merge it in a process of its own, print a table and a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=8192)
    parser.add_argument("--intermediate", type=int, default=28672)
    parser.add_argument("--heads", type=int, default=64)
    parser.add_argument("--kv_heads", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--shard_bytes", type=int, default=5 * 10**9)
    parser.add_argument("--precision", choices=("bf16", "fp8", "nf4"), default="bf16", help="of the training")
    parser.add_argument("--merge_base", choices=("original", "dequantized"), default="original")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--folder", type=Path, default=None, help="where files go (default: a temporary one)")
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="merge-memory-", dir=options.folder))
    try:
        result = measure(root, options)
    finally:
        shutil.rmtree(root)
    gib = {name: result[name] / 2**30 for name in ("model", "layer", "adapter", "before", "peak")}
    print(
        f"model {gib['model']:.2f} GiB in {result['shards']} shards, one layer {gib['layer']:.2f} GiB, "
        f"adapter {gib['adapter']:.2f} GiB\nresident: {gib['before']:.2f} GiB when imported, at most "
        f"{gib['peak']:.2f} GiB in the merge; {result['seconds']:.0f} s"
    )
    print(json.dumps(result))


def measure(root: Path, options: argparse.Namespace) -> dict[str, float]:
    """Sizes in bytes, times in seconds."""
    total = write_base(root / "base", options)
    write_adapter(root / "checkpoint", root / "base", options)
    knobs = {
        "adapters": str(root / "checkpoint"), "output_dir": str(root / "out"), "merge_check": "layers",
        "merge_base": options.merge_base, "max_shard_size": str(options.shard_bytes), "device": "cpu",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps(knobs), str(options.threads)],
        stdout=subprocess.PIPE, text=True, check=True, env=os.environ | NO_KEEPING,
    )  # fmt: skip
    layer = sum(tensor.nbytes for tensor in base_tensors(options) if ".layers.0." in tensor.name)
    adapter = (root / "checkpoint" / "adapter_model.safetensors").stat().st_size
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return {
        **result, "model": total, "layer": layer, "adapter": adapter,
        "shards": len(list((root / "out").glob("*.safetensors"))),
    }  # fmt: skip


if __name__ == "__main__":
    main()
