"""Do other readers get the model that we wrote? Their logits beside those of our own dequantized weights.

    python benchmarks/quantize_interop.py --envs FOLDER [--model smollm2-135m]

FOLDER holds one environment a reader: `auto-gptq`, `gptqmodel`, `compressed` (`make interop` builds them).
The bar: logits within 1 %, and the same likeliest token in 95 % of places.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

import swiftkit
from swiftkit.formats.quantized import dequantized_copy
from swiftkit.quantize.fp8 import round_inputs
from swiftkit.quantize.shapes import linears_of

TEXT = "The harbour froze twice that winter, and each time the boats were pulled up with ropes. "
MOST_OFF, LEAST_SAME = 0.01, 0.95
READER = Path(__file__).with_name("interop_reader.py")
# What is written, and who reads it: method, format, bits, environment, reader.
PAIRS = [
    ("gptq", "gptq", 4, "auto-gptq", "auto-gptq"),
    ("gptq", "gptq", 8, "auto-gptq", "auto-gptq"),
    ("gptq", "gptq", 4, "gptqmodel", "gptqmodel"),
    ("gptq", "gptq_v2", 4, "gptqmodel", "gptqmodel"),
    ("awq", "awq", 4, "gptqmodel", "gptqmodel"),
    ("gptq", "compressed-tensors", 4, "compressed", "transformers"),
    ("fp8", "compressed-tensors", 8, "compressed", "transformers"),
]


def logits_of(folder: Path, ids: np.ndarray, *, fp8: bool) -> np.ndarray:
    """Of transformers in float32; with FP8, inputs of linear layers are rounded as the format says."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for block in model.base_model.layers if fp8 else ():
        for linear in linears_of(block).values():
            linear.register_forward_pre_hook(round_inputs)
    with torch.no_grad():
        found: np.ndarray = model(input_ids=torch.from_numpy(ids)).logits.numpy()
    return found


def write(model: str, dataset: str, form: tuple[str, str, int], out: Path) -> None:
    """A quantized model, calibrated on little: this asks for equal weights, not for good ones."""
    method, layout, bits = form
    swiftkit.quantize_model(
        model, out, method=method, format=layout, bits=bits, group_size=64, dataset=[dataset],
        calibration_windows=4, eval_windows=1, max_length=256, untie_head=True, max_ppl_increase=10.0,
        device="cpu",
    )  # fmt: skip


def compare(expected: np.ndarray, found: np.ndarray) -> tuple[float, float]:
    """Relative difference of the logits, and the share of places with the same likeliest token."""
    off = float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
    return off, float((found.argmax(-1) == expected.argmax(-1)).mean())


def main() -> None:
    """Print one line a pair; the exit code is 1 where one misses the bar."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dataset", required=True, help="a text to calibrate on")
    parser.add_argument("--envs", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=None, help="keep what is written here")
    options = parser.parse_args()
    work = options.work or Path(tempfile.mkdtemp())
    work.mkdir(parents=True, exist_ok=True)
    rows = []
    for method, layout, bits, env, reader in PAIRS:
        folder = work / f"{method}-{layout}-{bits}"
        if not folder.exists():
            write(options.model, options.dataset, (method, layout, bits), folder)
        rows.append(read_back(folder, work, options.envs / env / "bin" / "python", reader))
        print(json.dumps({"wrote": folder.name, "reader": reader, **rows[-1]}), flush=True)
    if options.work is None:
        shutil.rmtree(work)
    sys.exit(0 if all(row.get("passed") for row in rows) else 1)


def read_back(folder: Path, work: Path, python: Path, reader: str) -> dict[str, object]:
    """The reader's logits beside ours."""
    from transformers import AutoTokenizer

    ids = np.asarray([AutoTokenizer.from_pretrained(folder)(TEXT * 4)["input_ids"]], np.int64)
    plain = work / f"{folder.name}-dequantized"
    if not plain.exists():
        dequantized_copy(folder, plain)
    np.save(work / "ids.npy", ids)
    result = subprocess.run(
        [str(python), str(READER), reader, str(folder), str(work / "ids.npy"), str(work / "out.npy")],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": "", "GPTQMODEL_CPU_WORKERS": "2"},
    )  # fmt: skip
    if result.returncode:
        return {"passed": False, "failed": result.stderr.strip().splitlines()[-3:]}
    off, same = compare(logits_of(plain, ids, fp8="fp8" in folder.name), np.load(work / "out.npy"))
    return {"passed": off <= MOST_OFF and same >= LEAST_SAME, "off": round(off, 5), "same": round(same, 4)}


if __name__ == "__main__":
    main()
