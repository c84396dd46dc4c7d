"""Speed of DPO over LoRA: ours beside TRL, over one model and the same pairs.

    python benchmarks/align_throughput.py --random_weights --packages sets --results results.jsonl
    python benchmarks/align_throughput.py --merge results.jsonl --into docs/performance.md

Every row runs in a process of its own and is written to the results as soon as it is there.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from peers.pairs import PairWorkload
from peers.rows import PAIR_ROWS
from peers.table import Table, losses_and_norms, memory
from peers.workload import SHAPES
from sft_throughput import checked, measure, merged, parser_of


def parse() -> argparse.Namespace:
    """The command line."""
    parser = parser_of(PAIR_ROWS, __doc__ or "", Path(__file__).stem)
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--random_weights", action="store_true", help="write a model of the shape first")
    model.add_argument("--model", type=Path, help="folder of a model of the shape")
    parser.add_argument("--pairs", type=int, default=4, help="in a step, all at once")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--answer", type=int, default=512, help="tokens of each of its two answers")
    args = checked(parser, PAIR_ROWS)
    if not (args.merge or args.random_weights or args.model):
        parser.error("give --random_weights or --model FOLDER")
    return args


def workload_of(args: argparse.Namespace) -> PairWorkload:
    """What the rows train."""
    layers = args.layers or SHAPES[args.shape].layers
    return PairWorkload(
        shape=args.shape, layers=layers, documents=args.pairs, length=args.prompt + args.answer,
        prompt=args.prompt, warmup=args.warmup, steps=args.steps, seed=args.seed,
        folder=args.model or args.scratch / f"{args.shape}-{layers}-layers-seed-{args.seed}",
    )  # fmt: skip


def rates(record: dict[str, Any]) -> tuple[float, float]:
    """Pairs a second: while training, and of one pass that computes the reference's log-probabilities too.

    Where those are computed in every step, the two are one.
    """
    workload = record["workload"]
    training = record["tokens_per_s"] / (2 * workload["length"])
    pairs = workload["documents"] * (workload["warmup"] + workload["steps"])
    return training, 1 / (1 / training + record.get("reference_s", 0.0) / pairs)


def summary(record: dict[str, Any]) -> str:
    """A row in one line."""
    name = f"{record['row']:17}"
    if record["phase"] != "done":
        return f"{name} {record['error']}"
    training, whole = rates(record)
    return (
        f"{name} {whole:8.2f} pairs/s, {training:8.2f} with the reference known  "
        f"{record['median_step_ms']:8.1f} ms  {record.get('allocated_gib', 0):6.1f}/"
        f"{record.get('reserved_gib', 0):.1f} GiB  "
        f"loss {record['first_loss']:.4f} {record['last_loss']:.4f}  "
        f"norm {record['first_grad_norm']:.4f} {record['last_grad_norm']:.4f}  "
        f"first step {record['first_step_s']:.1f} s {record['compile_cache']}"
    )


def _heading(workload: dict[str, Any]) -> str:
    return (
        f"{workload['shape']} ({workload['layers']} layers, random weights), LoRA rank {workload['rank']} on "
        f"all linear layers, sigmoid loss, {workload['documents']} pairs a step with prompts of "
        f"{workload['prompt']} tokens and answers of {workload['length'] - workload['prompt']}, "
        f"{workload['warmup']} steps to warm up and {workload['steps']} timed, seed {workload['seed']}."
    )


def _cells(record: dict[str, Any], _: list[dict[str, Any]]) -> list[str]:
    training, whole = rates(record)
    return [
        f"{whole:.2f}", f"{training:.2f}", f"{record['median_step_ms']:,.1f}", memory(record),
        *losses_and_norms(record),
    ]  # fmt: skip


TABLE = Table(
    name="align_throughput",
    rows=PAIR_ROWS,
    columns=(
        "pairs/s, reference and training", "pairs/s, training with the reference known", "median step ms",
        "allocated / reserved GiB", "loss first → last", "gradient norm first → last",
    ),
    cells=_cells,
    heading=_heading,
    value=lambda record: rates(record)[1],
)  # fmt: skip


def main() -> int:
    """Run rows, or merge their results."""
    args = parse()
    return merged(args, TABLE) if args.merge else measure(args, PAIR_ROWS, workload_of(args), summary)


if __name__ == "__main__":
    sys.exit(main())
