"""Whether DPO learns: answers of GSM8K's questions, and accuracy on questions that training has not seen.

    python benchmarks/dpo_learning.py --solutions example_model_solutions.jsonl --into docs/alignment.md

Each seed is a run of `swiftkit.dpo` with its own split of the questions, adapter and order of the pairs. Held
out are whole questions, one pair of each, so that the pairs are independent of each other.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from data_throughput import put
from matplotlib.figure import Figure
from rich.console import Console

import swiftkit
from swiftkit.data.tokenizer import load_tokenizer
from swiftkit.formats.named import open_model

NAME = "dpo_learning"  # of the place in the document
WRITERS = ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification")
PEOPLE = "ground_truth"
CONTRASTS = {
    "people": "GSM8K's own solution, which is right, against a wrong one of a model",
    "right": "a model's right solution against a model's wrong one of the same question",
    "balanced": "the same, each writer as often right as wrong against each other writer",
    "writer": "a solution of the 175B model with a verifier against one of the 6B model without, both right "
    "or both wrong",
}
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
SAME = ("contrast", "model", "held_out", "longest", "steps", "batch", "learning_rate", "beta")
Row = dict[str, Any]


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--solutions", type=Path, help="GSM8K's example_model_solutions.jsonl")
    parser.add_argument("--contrast", choices=CONTRASTS, default="people", help="what the answers differ in")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--held_out", type=int, default=120, help="questions, one pair of each")
    parser.add_argument("--longest", type=int, default=192, help="tokens of a question with both answers")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--batch", type=int, default=8, help="pairs a step")
    parser.add_argument("--eval_steps", type=int, default=12)
    parser.add_argument("--learning_rate", type=float, default=5e-4)
    parser.add_argument("--beta", type=float, default=0.1)
    parser.add_argument("--output_dir", type=Path, default=Path("output") / NAME)
    parser.add_argument("--merge", type=Path, nargs="+", help="train nothing; results of earlier calls")
    parser.add_argument("--into", type=Path, help="document with a place for the table and the curves")
    return parser.parse_args()


def main() -> None:
    """Train each seed, or take what other calls have trained, and write results, curves and table."""
    args = parse()
    results = trained(args) if args.merge is None else merged(args.merge)
    text = table(results)
    print(text)
    if args.into:
        name = f"{NAME} {results[0]['args']['contrast']}"
        picture = args.into.parent / "images" / f"{name.replace(' ', '-')}.png"
        picture.parent.mkdir(exist_ok=True)
        curves(results).savefig(picture, dpi=120)
        put(args.into, name, f"{text}\n\n![Held-out accuracy](images/{picture.name})")


def trained(args: argparse.Namespace) -> list[Row]:
    """A result of each seed; the file is written after every one."""
    if args.solutions is None:
        sys.exit("give --solutions, GSM8K's example_model_solutions.jsonl")
    args.output_dir.mkdir(parents=True, exist_ok=True)
    questions = [json.loads(line) for line in args.solutions.read_text(encoding="utf-8").splitlines()]
    pairs = short_pairs(questions, args)
    results: list[Row] = []
    for seed in args.seeds:
        results.append(train(seed, pairs, args))
        said = {key: results[-1][key] for key in ("seed", "before", "after", "seconds")}
        print(json.dumps(said), flush=True)
        (args.output_dir / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    return results


def merged(files: Sequence[Path]) -> list[Row]:
    """Results of several calls that differ in nothing but their seeds."""
    results = [row for file in files for row in json.loads(file.read_text())]
    asked = {json.dumps({k: v for k, v in row["args"].items() if k in SAME}) for row in results}
    if len(asked) != 1:
        sys.exit("the results are of different runs: " + "; ".join(sorted(asked)))
    return sorted(results, key=lambda row: int(row["seed"]))


# ---- pairs -------------------------------------------------------------------------------------------------


def short_pairs(questions: Sequence[Row], args: argparse.Namespace) -> dict[str, list[Row]]:
    """The pairs of each question that are short enough."""
    say: Callable[[str], None] = print
    tokenizer = load_tokenizer(open_model(args.model, say=say).path, None)

    def tokens(text: str) -> int:
        return len(tokenizer(text)["input_ids"])

    found: dict[str, list[Row]] = {}
    for row in questions:
        made = [
            {
                "prompt": f"Question: {row['question']}\nAnswer:\n",
                "chosen": row[good] if good == PEOPLE else row[good]["solution"],
                "rejected": row[bad]["solution"],
                "writers": [good, bad],
            }
            for good, bad in sides(row, args.contrast)
        ]
        texts = ("prompt", "chosen", "rejected")
        short = [pair for pair in made if sum(tokens(pair[key]) for key in texts) <= args.longest]
        if short:
            found[row["question"]] = short
    return balanced(found) if args.contrast == "balanced" else found


def sides(row: Row, contrast: str) -> Iterator[tuple[str, str]]:
    """Who wrote the chosen answer and who the rejected one, for every pair of a question."""
    right = {writer: row[writer]["is_correct"] for writer in WRITERS}
    if contrast == "writer":
        if right[WRITERS[3]] == right[WRITERS[0]]:
            yield WRITERS[3], WRITERS[0]
        return
    if contrast == "people":
        yield from ((PEOPLE, bad) for bad in WRITERS if not right[bad])
        return
    yield from ((good, bad) for good in WRITERS for bad in WRITERS if right[good] and not right[bad])


def balanced(pairs: dict[str, list[Row]]) -> dict[str, list[Row]]:
    """Of each two writers as many pairs that one wins as the other; the writer then tells nothing."""
    order = [(question, pair) for question, own in pairs.items() for pair in own]
    random.Random(0).shuffle(order)
    wins = Counter(tuple(pair["writers"]) for _, pair in order)
    taken: Counter[tuple[str, ...]] = Counter()
    kept: dict[str, list[Row]] = {}
    for question, pair in order:
        good, bad = pair["writers"]
        if taken[good, bad] < min(wins[good, bad], wins[bad, good]):
            taken[good, bad] += 1
            kept.setdefault(question, []).append(pair)
    return kept


def split(pairs: dict[str, list[Row]], seed: int, held_out: int) -> tuple[list[Row], list[Row]]:
    """Pairs to train on, and one pair of each held-out question."""
    draw = random.Random(seed)
    questions = sorted(pairs)
    draw.shuffle(questions)
    return (
        [pair for question in questions[held_out:] for pair in pairs[question]],
        [draw.choice(pairs[question]) for question in questions[:held_out]],
    )


# ---- runs --------------------------------------------------------------------------------------------------


def train(seed: int, pairs: dict[str, list[Row]], args: argparse.Namespace) -> Row:
    """One seed: what its run said of the held-out pairs, and what tells answers apart without training."""
    folder = args.output_dir / f"seed-{seed}"
    folder.mkdir(exist_ok=True)
    training, held_out = split(pairs, seed, args.held_out)
    random.Random(seed).shuffle(training)
    training = training[: args.steps * args.batch]  # no pair comes twice, and no log-probability is in vain
    for name, rows in (("train", training), ("held-out", held_out)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    began = time.perf_counter()
    run = swiftkit.dpo(
        model=args.model, dataset=folder / "train.jsonl", val_dataset=folder / "held-out.jsonl", seed=seed,
        max_length=args.longest, learning_rate=args.learning_rate, beta=args.beta, max_steps=args.steps,
        global_batch_size=args.batch, eval_steps=args.eval_steps, save_steps=args.steps, save_total_limit=1,
        logging_steps=1, sample_prompts="none", report_to="none", output_dir=folder,
        console=Console(file=io.StringIO(), width=200),
    )  # fmt: skip
    lines = [json.loads(line) for line in (Path(run.folder) / "logging.jsonl").read_text().splitlines()]
    evaluated = [line for line in lines if "eval_accuracy" in line]
    return {
        "seed": seed, "seconds": time.perf_counter() - began, "pairs": len(held_out),
        "trained_pairs": len(training), "questions": len(pairs) - args.held_out,
        "before": evaluated[0]["eval_accuracy"], "after": evaluated[-1]["eval_accuracy"],
        "loss": [evaluated[0]["eval_loss"], evaluated[-1]["eval_loss"]],
        "evaluations": [{k: line[k] for k in ("step", "eval_accuracy", "eval_loss", "eval_margin")}
                        for line in evaluated],
        "training": [{k: line[k] for k in ("step", "accuracy", "loss", "margin")}
                     for line in lines if "accuracy" in line],
        "without_training": untrained(held_out, training, Path(run.folder)),
        "args": {name: str(value) for name, value in vars(args).items()},
    }  # fmt: skip


def untrained(held_out: Sequence[Row], training: Sequence[Row], folder: Path) -> dict[str, float]:
    """Accuracy on the held-out pairs of rules that need no training: what a model could lean on instead."""
    with np.load(folder / "reference.npz") as kept:
        logprobs = kept["evaluation"].reshape(-1, 2)
    lengths = np.array([[len(row["chosen"]), len(row["rejected"])] for row in held_out])
    wins = Counter(tuple(row["writers"]) for row in training)
    by_writer = [wins[good, bad] - wins[bad, good] for good, bad in (row["writers"] for row in held_out)]
    return {
        "the likelier answer": share(logprobs[:, 0] - logprobs[:, 1]),
        "the likelier answer, by character": share(np.subtract(*(logprobs / lengths).T)),
        "the shorter answer": share(lengths[:, 1] - lengths[:, 0]),
        "the writer who was chosen more often": share(np.array(by_writer)),
    }


def share(differences: np.ndarray) -> float:
    """Of positive ones; one half for a draw."""
    return float(np.mean((differences > 0) + 0.5 * (differences == 0)))


# ---- what is said of them ----------------------------------------------------------------------------------


def wilson(accuracy: float, count: int, z: float = 1.96) -> tuple[float, float]:
    """The 95 % interval of a share (Wilson 1927)."""
    middle = (accuracy + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(accuracy * (1 - accuracy) / count + (z / (2 * count)) ** 2)
    return middle - half, middle + half


def table(results: Sequence[Row]) -> str:
    """Seeds, their mean, and the rules without training, in Markdown."""
    first = results[0]
    args = argparse.Namespace(**first["args"])
    lines = [
        f"{args.model}, LoRA, sigmoid, beta {args.beta}, learning rate {args.learning_rate}, "
        f"{args.steps} steps of {args.batch} pairs; {CONTRASTS[args.contrast]}; a question with both answers "
        f"of at most {args.longest} tokens; {first['pairs']} held-out questions of each seed, one pair of "
        f"each; on a CPU, "
        f"{sum(row['seconds'] for row in results) / 60:.0f} minutes together.",
        "",
        "| seed | accuracy before | after, with its 95 % interval | loss before | after |",
        "|---|---|---|---|---|",
    ]
    for row in results:
        low, high = wilson(row["after"], row["pairs"])
        lines.append(
            f"| {row['seed']} | {row['before']:.3f} | {row['after']:.3f} ({low:.3f} to {high:.3f}) | "
            f"{row['loss'][0]:.4f} | {row['loss'][1]:.4f} |"
        )
    after = [row["after"] for row in results]
    if len(after) in T_95:
        spread = T_95[len(after)] * statistics.stdev(after) / math.sqrt(len(after))
        mean = statistics.mean(after)
        lines.append(f"| mean | | {mean:.3f} ({mean - spread:.3f} to {mean + spread:.3f}) | | |")
    lines += ["", "On the same held-out pairs, without training (mean over seeds): " + "; ".join(
        f"{name} {statistics.mean(row['without_training'][name] for row in results):.3f}"
        for name in first["without_training"]
    ) + "."]  # fmt: skip
    return "\n".join(lines)


def curves(results: Sequence[Row]) -> Figure:
    """Held-out accuracy, and the loss of each step's new pairs, a line a seed."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    shown = (
        ("evaluations", "eval_accuracy", "held-out accuracy", 0.5),
        ("training", "loss", "loss of each step's new pairs", math.log(2)),
    )
    for axes, (part, name, label, chance) in zip(figure.subplots(1, 2), shown, strict=True):
        for row in results:
            steps = [line["step"] for line in row[part]]
            axes.plot(steps, [line[name] for line in row[part]], marker="o", markersize=3,
                      label=f"seed {row['seed']}")  # fmt: skip
        axes.axhline(chance, color="grey", linewidth=0.8, linestyle="--")
        axes.set_xlabel("step")
        axes.set_ylabel(label)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    return figure


if __name__ == "__main__":
    main()
