"""Small runs of the real loop on the toy model, with the real checkpoints."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from swiftkit.config import TrainKnobs
from swiftkit.data import Prepared, prepare
from swiftkit.engine import Engine, LoraSpec, Loss
from swiftkit.engine.build import build_model
from swiftkit.methods.sft import loss as sft_loss
from swiftkit.train.artifact import Artifact
from swiftkit.train.checkpoint import checkpoint_files, read_facts, read_snapshot
from swiftkit.train.keeper import Keeper
from swiftkit.train.log import FILE, Log
from swiftkit.train.loop import fit
from swiftkit.train.run import ARGS, checkpoints
from swiftkit.train.steps import StepPlan, plan_steps
from tests.cases import toy

CPU = torch.device("cpu")
FACTS = {"config": {}, "base": "b", "data": "d", "windows": 0, "evaluation": None, "steps": 0}
Lines = list[dict[str, Any]]


def engine_of(model: Path, **spec: Any) -> Engine:
    lora = LoraSpec(**{"rank": 4, "alpha": 8, **spec})
    return Engine(build_model(model, dtype=torch.float32, device=CPU, lora=lora))


def data_of(source: str, **knobs: Any) -> Prepared:
    settings = dict(max_length="auto", packing=False, truncation_strategy="drop", system=None)
    return prepare([source], tokenizer=toy.tokenizer(), **{**settings, **knobs})


def persona(**knobs: Any) -> Prepared:
    return data_of("swiftkit::persona", chat_template="chatml", packing=True, max_length=256, **knobs)


def plan_of(data: Prepared, knobs: TrainKnobs) -> StepPlan:
    return plan_steps(knobs, num_windows=len(data.windows), max_length=data.max_length, device_type="cpu")


def keeper_of(folder: Path, engine: Engine, *, resumed: Path | None = None, **options: Any) -> Keeper:
    """The real thing over the run folder `folder`."""
    folder.mkdir(exist_ok=True)
    (folder / ARGS).write_text("{}")
    linears = tuple(engine.linear_names)
    return Keeper(
        folder,
        artifact=Artifact(LoraSpec(rank=4, alpha=8), "toy", linears),
        files=checkpoint_files(toy.tokenizer(), {"eos_token_id": [2]}),
        facts=FACTS,
        resumed=None if resumed is None else read_snapshot(resumed),
        **options,
    )


def train(
    engine: Engine,
    data: Prepared,
    folder: Path,
    *,
    evaluation: Prepared | None = None,
    keeper: Keeper | None = None,
    loss: Loss = sft_loss,
    console: io.StringIO | None = None,
    **knobs: Any,
) -> Lines:
    """Run `fit`; gives the lines of logging.jsonl."""
    folder.mkdir(exist_ok=True)
    checked = TrainKnobs(**{"logging_steps": 1, "learning_rate": 1e-2, **knobs})
    plan = plan_of(data, checked)
    resumed = None
    if keeper is not None and keeper.resumed is not None:
        resumed = read_facts(folder / f"checkpoint-{keeper.resumed.step}")["log"]
    seen = Console(file=console or io.StringIO(), width=300)
    with Log(folder, steps=plan.steps, report_to=[], settings={}, console=seen, resumed=resumed) as log:
        fit(
            engine, data, loss, knobs=checked, plan=plan, log=log, pad_id=0, evaluation=evaluation,
            keeper=keeper,
        )  # fmt: skip
    return logged(folder)


def logged(folder: Path) -> Lines:
    """The log's lines, as strict JSON."""

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in (folder / FILE).read_text().splitlines()]


def losses(lines: Lines) -> list[float]:
    return [line["loss"] for line in lines if "loss" in line]


def saved(folder: Path) -> list[int]:
    """Steps of the checkpoints."""
    return [int(path.name.removeprefix("checkpoint-")) for path in checkpoints(folder)]
