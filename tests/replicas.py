"""What several processes must agree on with one: `python -m tests.replicas MODEL FOLDER DEVICE TP SHARD`."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from swiftkit.config import TrainKnobs
from swiftkit.data import Prepared
from swiftkit.engine import Batch, Engine, FullSpec, Head, LoraSpec, Loss, Sums
from swiftkit.methods.sft import loss
from swiftkit.parallel.mesh import Layout
from swiftkit.parallel.world import ALONE, World, joined
from swiftkit.train.log import Log, SilentLog
from swiftkit.train.loop import fit
from swiftkit.train.steps import microbatches_of_step, plan_steps
from tests import tiny
from tests.cases import toy
from tests.training import data_of, logged

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("lora", "full", "nf4", "fp8")
# Without fp8: a row's last bit, which another order of summing changes, flips 8-bit roundings later on.
TRAINED = ("lora", "full", "nf4")
EXACT = ("step", "loss", "grad_norm", "learning_rate", "epoch", "eval_loss", "skipped_steps")


def engine_of(model: Path, kind: str, world: World, *, adapter_seed: int | None = None) -> Engine:
    base: Any = kind if kind in ("nf4", "fp8") else "plain"
    engine = Engine.load(
        model,
        dtype=torch.float32,
        device=world.device or torch.device("cpu"),
        base=base,
        lora=None if kind == "full" else LoraSpec(rank=4, alpha=8),
        full=FullSpec() if kind == "full" else None,
        fused=False,
        tp=world.tp,
        shard=world.shards,
    )
    if adapter_seed is not None:
        drawn = {name: value.clone() for name, value in engine.whole_parameters().items()}
        tiny.randomise_adapter(drawn, seed=adapter_seed)
        engine.load_adapter(drawn)
    return engine


def first_step(engine: Engine, data: Prepared, world: World, **knobs: Any) -> dict[str, Any]:
    """Gradients of a step, summed over the ranks; and what it was divided by."""
    plan = plan_steps(
        TrainKnobs(**knobs), num_windows=len(data.windows), max_length=data.max_length, device_type="cpu",
        ranks=world.data_size,
    )  # fmt: skip
    packed = microbatches_of_step(data, plan, step=0, seed=3, pad_id=0, world=world)
    (trained,) = world.totals(*world.of_rows(sum(p.trained_tokens for p in packed)))
    batches = [Batch.of(p, device=engine.device) for p in packed]
    sums = engine.forward_backward(batches, loss, denominator=trained)
    world.sum_gradients(engine.unsummed)
    value = world.sum_named(sums, engine.device)["loss"] / trained
    found = {name: p.grad for name, p in engine.parameters.items() if p.grad is not None}
    gradients = {n: g.clone() if engine.cut is None else engine.cut.whole(n, g) for n, g in found.items()}
    norm = engine.gradient_norm()
    return {"loss": float(value), "norm": float(norm), "denominator": trained, "gradients": gradients}


def train(
    engine: Engine, data: Prepared, folder: Path, world: World, *, loss: Loss = loss, **knobs: Any
) -> dict[str, Any]:
    """Run `fit` on every rank; the first one's log, and whether all hold the same values in the end."""
    checked = TrainKnobs(**{"logging_steps": 1, "learning_rate": 1e-2, **knobs})
    plan = plan_steps(
        checked, num_windows=len(data.windows), max_length=data.max_length, device_type="cpu",
        ranks=world.data_size,
    )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    console = Console(file=io.StringIO(), width=200)
    log = (
        Log(folder, steps=plan.steps, report_to=[], settings={}, console=console)
        if world.first
        else SilentLog(world.rank)
    )
    with log:
        fit(
            engine, data, loss, knobs=checked, plan=plan, log=log, pad_id=0,
            evaluation=data if loss is not poisoned else None, world=world,
        )  # fmt: skip
    values = {name: p.clone() for name, p in engine.whole_parameters().items()}
    world.check_same(str([float(value.double().sum()) for value in values.values()]), "trained tensors")
    lines = [{k: line[k] for k in EXACT if k in line} for line in logged(folder)] if world.first else []
    return {"lines": lines, "parameters": values}


def poisoned(head: Head, hidden: torch.Tensor, batch: Batch) -> Sums:
    """The loss, not a number for batches that hold row n6: one rank alone sees it."""
    six = batch.input_ids == toy.tokenizer()("6", add_special_tokens=False)["input_ids"][0]
    sums = loss(head, hidden, batch)
    return {"loss": torch.where(six.any(), torch.nan, 1.0) * sums["loss"]}


def everything(model: Path, folder: Path, world: World) -> dict[str, Any]:
    """All that is compared."""
    device = world.device or torch.device("cpu")
    uneven = data_of(toy.case("24-uneven-ranks.jsonl"))
    accumulated = data_of(toy.case("15-grad-accum.jsonl"))
    found: dict[str, Any] = {}
    # On a GPU what is compared is the sums, not products of other precisions.
    # Nor on parts of an NF4 base, which ask for a wider model.
    few = device.type != "cpu" or world.layout.tp > 1
    steps, runs = (("lora", "full"), ("lora", "full")) if few else (KINDS, TRAINED)
    if world.layout.tp > 1 and world.layout.shard > 1:  # a whole model is cut once
        steps, runs = ("lora",), ("lora",)
    for kind in steps:
        engine = engine_of(model, kind, world, adapter_seed=None if kind == "full" else 1)
        found[f"step {kind}"] = first_step(engine, uneven, world, global_batch_size=5)
    for kind in runs:
        engine = engine_of(model, kind, world)
        rate = 1e-3 if kind == "full" else 1e-2
        found[f"train {kind}"] = train(
            engine, uneven, folder / kind, world, global_batch_size=3, max_steps=10, learning_rate=rate,
            eval_steps=5,
        )  # fmt: skip
    times = 4 // world.data_size
    found["case 15"] = first_step(
        engine_of(model, "lora", world, adapter_seed=1), accumulated, world,
        per_device_train_batch_size=1, gradient_accumulation_steps=times,
    )  # fmt: skip
    for batch in (1, 2):
        found[f"case 24, batch {batch}"] = train(
            engine_of(model, "lora", world), uneven, folder / f"24-{batch}", world,
            per_device_train_batch_size=batch, global_batch_size=4, num_train_epochs=1,
        )  # fmt: skip
    found["case 24, one row"] = train(
        engine_of(model, "lora", world), data_of(toy.case("24-uneven-one-row.jsonl")),
        folder / "24-one", world, num_train_epochs=2,
    )  # fmt: skip
    found["held back"] = train(
        engine_of(model, "lora", world), uneven, folder / "held", world, loss=poisoned,
        per_device_train_batch_size=1, global_batch_size=2, max_steps=6, on_bad_loss="skip",
    )  # fmt: skip
    return found


def alone(model: Path, folder: Path) -> dict[str, Any]:
    return everything(model, folder, ALONE)


def over(
    processes: int, model: Path, folder: Path, *, device: str = "cpu", tp: int = 1, shard: int = 1
) -> dict[str, Any]:
    """The same by several processes: `tp` compute a model together, `shard` times as many keep its parts."""
    folder.mkdir()
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    started = []
    for rank in range(processes):
        environment = {
            **os.environ, "RANK": str(rank), "WORLD_SIZE": str(processes), "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(processes), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        words = [sys.executable, "-m", "tests.replicas", str(model), str(folder), device, str(tp), str(shard)]
        started.append(subprocess.Popen(words, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True))
    ended = [(process.communicate(timeout=240)[1], process.returncode) for process in started]
    assert all(code == 0 for _, code in ended), json.dumps(ended, indent=1)
    found: dict[str, Any] = torch.load(folder / "found.pt", weights_only=False, map_location="cpu")
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    where = Path(sys.argv[2])
    tensor, kept = int(sys.argv[4]), int(sys.argv[5])
    with joined(sys.argv[3]) as all_alike:
        copies = all_alike.size // (tensor * kept)
        this = all_alike.arranged(Layout(replicate=copies, shard=kept, tp=tensor))
        result = everything(Path(sys.argv[1]), where, this)
        if this.first:
            torch.save(result, where / "found.pt")
