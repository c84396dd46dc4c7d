"""What each way of quantizing costs in perplexity, ours beside other quantizers.

    python benchmarks/quantize_quality.py --calibration valid.txt --text test.txt --envs .interop
        [--rows fp32,rtn,gptq,gptqmodel] [--seeds 0 1 2] [--work output/quantize_quality]

The texts are WikiText-2's, each as one .txt file. A seed draws the windows that calibrate, and every row of a
seed gets the same ones. Every result becomes a plain float32 model, and one judge reads all: transformers
in float32, windows without overlap. What is measured is kept in results.json of the work folder; a call adds
its rows to it, and prints the table of all.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import tempfile
import time
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch

import swiftkit
from swiftkit.data.tokenizer import load_tokenizer
from swiftkit.errors import UserError
from swiftkit.formats.named import open_model
from swiftkit.formats.quantized import dequantized_copy
from swiftkit.quantize.texts import prepare_texts

LENGTH = 512  # tokens of a window
# Ours: what `swiftkit quantize` is told. Formats are such that a method and its rounding have one grid.
OURS: dict[str, dict[str, str]] = {
    "rtn": dict(method="rtn", format="gptq"),
    "gptq": dict(method="gptq"),
    "rtn-asymmetric": dict(method="rtn", format="awq"),
    "awq": dict(method="awq"),
}
# Others: the environment, and the script that runs in it.
PEERS = {
    "gptqmodel": ("gptqmodel", "quantize_gptqmodel.py"),
    "llmcompressor-awq": ("llmcompressor", "quantize_llmcompressor.py"),
}
ROWS = ("fp32", "rtn", "gptq", "gptqmodel", "rtn-asymmetric", "awq", "llmcompressor-awq")
SEEDED = ("gptq", "gptqmodel", "awq", "llmcompressor-awq")
AGAINST = {"gptq": "gptqmodel", "awq": "llmcompressor-awq"}


def main() -> None:
    """Measure the rows that are asked for, and print the table of all that are known."""
    options = arguments()
    options.work.mkdir(parents=True, exist_ok=True)
    book = options.work / "results.json"
    setting = {name: getattr(options, name) for name in ("model", "group_size", "windows", "eval_windows")}
    known = json.loads(book.read_text()) if book.exists() else {"setting": setting, "rows": {}}
    if known["setting"] != setting:
        raise SystemExit(f"{book} holds rows of {known['setting']}; give another --work")
    base = open_model(options.model, source="auto", revision=None, say=print).path
    for seed in options.seeds:
        ids = texts(base, seed, options)
        for row in options.rows:
            name = f"{row}/{seed}" if row in SEEDED else row
            if name in known["rows"]:
                continue
            with tempfile.TemporaryDirectory(dir=options.work) as folder:
                known["rows"][name] = measure(row, seed, base, ids, Path(folder), options)
            book.write_text(json.dumps(known, indent=1) + "\n")
            print(json.dumps({name: known["rows"][name]}), flush=True)
    print("\n".join(table(known)))


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--calibration", required=True, help="a text file")
    parser.add_argument("--text", required=True, help="a text file to judge on")
    parser.add_argument("--rows", default="fp32,rtn,gptq,rtn-asymmetric,awq", help=", ".join(ROWS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--envs", type=Path, default=Path(".interop"), help="of the others, one folder each")
    parser.add_argument("--work", type=Path, default=Path("output/quantize_quality"))
    parser.add_argument("--group_size", type=int, default=64)
    parser.add_argument("--windows", type=int, default=64, help=f"of {LENGTH} tokens, to calibrate on")
    parser.add_argument("--eval_windows", type=int, default=128, help=f"of {LENGTH} tokens, to judge on")
    options = parser.parse_args()
    options.rows = options.rows.split(",")
    unknown = set(options.rows) - set(ROWS)
    if unknown:
        parser.error(f"no such rows: {', '.join(sorted(unknown))}; there are {', '.join(ROWS)}")
    return options


def texts(base: Path, seed: int, options: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    """What calibrates and what is judged, as `swiftkit quantize` draws it: token ids [windows, LENGTH]."""
    tokenizer = load_tokenizer(base, None)
    made = prepare_texts(
        dataset=[options.calibration], val_dataset=[options.text], calibrates=True, tokenizer=tokenizer,
        vocabulary=len(tokenizer), max_length=LENGTH, calibration_windows=options.windows,
        eval_windows=options.eval_windows, seed=seed, settings={"columns": {}, "system": None},
    )  # fmt: skip
    calibration, judged = (
        np.stack([window.input_ids for window in each]) for each in (made.calibration, made.judged)
    )
    return calibration, judged


def measure(
    row: str,
    seed: int,
    base: Path,
    ids: tuple[np.ndarray, np.ndarray],
    folder: Path,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Quantize with the first ids, and judge what came out on the second."""
    began = time.perf_counter()
    plain = folder / "plain"
    if row == "fp32":
        plain = base
    elif row in OURS:
        ours(row, seed, folder / "out", options)
        dequantized_copy(folder / "out", plain)
    else:
        peer(row, base, ids[0], folder, options)
        if not plain.exists():
            dequantized_copy(folder / "out", plain)
    quantized = time.perf_counter()
    return {
        "perplexity": perplexity(plain, ids[1]),
        "quantize_seconds": round(quantized - began, 1),
        "judge_seconds": round(time.perf_counter() - quantized, 1),
    }


def ours(row: str, seed: int, out: Path, options: argparse.Namespace) -> None:
    """Run `swiftkit quantize`; its own judge is content with one window."""
    try:
        swiftkit.quantize_model(
            options.model, out, **OURS[row], group_size=options.group_size, dataset=options.calibration,
            val_dataset=options.text, max_length=LENGTH, seed=seed, calibration_windows=options.windows,
            eval_windows=1, max_ppl_increase=100.0, device="cpu",
        )  # fmt: skip
    except UserError as failure:
        raise SystemExit(str(failure)) from None


def peer(row: str, base: Path, ids: np.ndarray, folder: Path, options: argparse.Namespace) -> None:
    """Run somebody else's quantizer: a quantized model in `out`, or a plain one in `plain`."""
    env, script = PEERS[row]
    out = folder / ("plain" if row == "llmcompressor-awq" else "out")
    np.save(folder / "ids.npy", ids)
    python = (options.envs / env / "bin" / "python").absolute()
    path = Path(__file__).parent / "peers" / script
    log = options.work.absolute() / f"{row}.log"
    with log.open("w") as told:
        done = subprocess.run(
            [str(python), str(path), str(base), str(folder.absolute() / "ids.npy"), str(out.absolute()),
             str(options.group_size)],
            stdout=told, stderr=subprocess.STDOUT, cwd=folder,
            env={**os.environ, "PYTHONPATH": "", "GPTQMODEL_CPU_WORKERS": "2", "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{row} failed: {log}")


@torch.no_grad()
def perplexity(folder: Path, text: np.ndarray) -> float:
    """Of transformers in float32 over windows [windows, tokens]; a window's first token is not predicted."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    loss, count = 0.0, 0
    for row in torch.from_numpy(text):
        logits = model(input_ids=row[None], use_cache=False).logits[0, :-1]
        loss += float(torch.nn.functional.cross_entropy(logits, row[1:], reduction="sum"))
        count += len(row) - 1
    return math.exp(loss / count)


def table(known: dict[str, Any]) -> list[str]:
    """Markdown: a line a row, a column a seed, and how far ours are from the others."""
    setting, found = known["setting"], {name: row["perplexity"] for name, row in known["rows"].items()}
    seeds = sorted({name.partition("/")[2] for name in found} - {""}, key=int)
    heads = ["", *(f"seed {seed}" for seed in seeds), "mean"]
    lines = [
        f"{setting['model']}, 4 bits, group {setting['group_size']}, {setting['windows'] * LENGTH:,} tokens "
        f"calibrate, {setting['eval_windows'] * LENGTH:,} are judged; torch {torch.__version__}",
        "",
        "| " + " | ".join(heads) + " |",
        "|---" * len(heads) + "|",
    ]
    for row in ROWS:
        values = [found.get(f"{row}/{seed}", found.get(row)) for seed in seeds]
        have = [value for value in values if value is not None]
        if not have:
            continue
        shown = ["" if value is None or row in found else f"{value:.3f}" for value in values]
        lines.append(f"| {row} | " + " | ".join([*shown, f"{mean(have):.3f}"]) + " |")
    lines.append("")
    for row, other in AGAINST.items():
        shared = [seed for seed in seeds if f"{row}/{seed}" in found and f"{other}/{seed}" in found]
        if shared:
            pairs = [found[f"{row}/{seed}"] / found[f"{other}/{seed}"] - 1 for seed in shared]
            lines.append(f"{row} beside {other}: " + ", ".join(f"{pair:+.2%}" for pair in pairs))
    return lines


if __name__ == "__main__":
    main()
