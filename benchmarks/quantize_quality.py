"""What each way of quantizing costs in perplexity: one table, rounding and the unquantized model beside.

    python benchmarks/quantize_quality.py --calibration valid.txt --text test.txt [--seeds 0 1 2]

The texts are WikiText-2's (`wiki.valid.raw`, `wiki.test.raw`), each as one .txt file. Every row is the whole
`swiftkit quantize`, with the perplexity that it reports, windows without overlap.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch

import swiftkit
from swiftkit.errors import UserError

METHODS = {
    "rtn": dict(method="rtn"),
    "rtn, asymmetric": dict(method="rtn", format="awq"),
    "gptq": dict(method="gptq"),
    "awq": dict(method="awq"),
    "fp8": dict(method="fp8"),
}


def main() -> None:
    """Print one JSON line a run, then the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--calibration", required=True, help="a text file")
    parser.add_argument("--text", required=True, help="a text file to judge on")
    parser.add_argument("--methods", nargs="+", default=["rtn", "gptq", "awq"], choices=METHODS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--group_size", type=int, default=64)
    parser.add_argument("--windows", type=int, default=64, help="of 512 tokens, to calibrate on")
    parser.add_argument("--eval_windows", type=int, default=128, help="of 512 tokens, to judge on")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    rows = []
    for method in options.methods:
        seeds = options.seeds if METHODS[method]["method"] in ("gptq", "awq") else options.seeds[:1]
        for seed in seeds:
            rows.append(measure(method, seed, options))
            print(json.dumps(rows[-1]), flush=True)
    print(f"\n{options.model}, group {options.group_size}, torch {torch.__version__}, {options.device}")
    print(f"{rows[0]['judged_tokens']:,} tokens judged, perplexity {rows[0]['before']:.3f} unquantized\n")
    print("| method | seed | calibration tokens | perplexity | top-1 agreement | seconds |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['method']} | {row['seed']} | {row['calibration_tokens']:,} | {row['after']:.3f} | "
            f"{row['agreement']:.1%} | {row['seconds']:.0f} |"
        )


def measure(method: str, seed: int, options: argparse.Namespace) -> dict[str, object]:
    """One run of `swiftkit quantize`, in numbers."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        try:
            out = swiftkit.quantize_model(
                options.model, Path(folder) / "out", **METHODS[method], group_size=options.group_size,
                dataset=options.calibration, val_dataset=options.text, max_length=512, seed=seed,
                calibration_windows=options.windows, eval_windows=options.eval_windows,
                max_ppl_increase=100.0, device=options.device,
            )  # fmt: skip
        except UserError as failure:
            raise SystemExit(str(failure)) from None
        report = json.loads((out / "quantize_report.json").read_text(encoding="utf-8"))
    quality = report["quality"]
    return {
        "method": method,
        "seed": seed,
        "calibration_tokens": report["calibration"]["tokens"],
        "judged_tokens": quality["tokens"],
        "before": quality["perplexity_before"],
        "after": quality["perplexity_after"],
        "agreement": quality["top1_agreement"],
        "seconds": time.perf_counter() - began,
    }


if __name__ == "__main__":
    main()
