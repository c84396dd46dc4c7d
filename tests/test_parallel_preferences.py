"""DPO and reward models over several processes equal one: losses, gradients, ten steps, evaluations."""

from __future__ import annotations

import io
import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from safetensors.torch import load_file

import swiftkit
from swiftkit.config import DpoConfig, TrainKnobs
from swiftkit.data import Pairs, prepare_pairs
from swiftkit.engine import Batch, Engine, LoraSpec, Loss
from swiftkit.formats.full import FullSpec
from swiftkit.methods.preference import loss_of
from swiftkit.methods.reference import logprobs
from swiftkit.methods.reward import RewardLoss, calibration
from swiftkit.parallel.mesh import Layout
from swiftkit.parallel.world import ALONE, World, collected, dealt
from swiftkit.train.steps import microbatches_of_step, plan_steps
from tests import tiny
from tests.adapters import WIDE
from tests.cases import toy
from tests.conftest import RUN_SEED
from tests.ranks import on_ranks

CPU = torch.device("cpu")
ROWS = 7  # for two processes, one has one more
KINDS = ("sigmoid", "sigmoid full", "simpo", "kto", "reward")


def pairs_file(folder: Path, *, seed: int, rows: int = ROWS, labels: bool = False) -> Path:
    """Sums with a right and a wrong answer, of random lengths."""
    draw, lines = random.Random(seed), []
    for _ in range(rows):
        a, b = draw.randrange(10), draw.randrange(10)
        prompt = f"{a}+{b}" + "?" * draw.randrange(1, 9) + " "
        right, wrong = f"it is {a + b}" + "!" * draw.randrange(5), "no" * draw.randrange(1, 6)
        pair = {"prompt": prompt, "chosen": right, "rejected": wrong, "margin": draw.random()}
        labelled = {"prompt": prompt, "completion": draw.choice([right, wrong]), "label": draw.random() < 0.5}
        lines.append(json.dumps(labelled if labels else pair) + "\n")
    file = folder / ("labelled.jsonl" if labels else f"pairs-{seed}.jsonl")
    file.write_text("".join(lines))
    return file


def world_of(layout: Layout) -> World:
    """This process among those of the default group."""
    if not dist.is_initialized():
        return ALONE
    rank, size = dist.get_rank(), dist.get_world_size()
    return World(rank, size, rank, size, CPU).arranged(layout)


def engine_of(model: Path, kind: str, world: World) -> Engine:
    full = kind.endswith("full")
    engine = Engine.load(
        model, dtype=torch.float32, device=CPU, base="plain", fused=False, tp=world.tp, shard=world.shards,
        lora=None if full else LoraSpec(rank=4, alpha=8, scores=kind == "reward"),
        full=FullSpec() if full else None,
    )  # fmt: skip
    if not full:
        drawn = {name: value.clone() for name, value in engine.whole_parameters().items()}
        tiny.randomise_adapter(drawn, seed=1)
        engine.load_adapter(drawn)
    return engine


def first_step(model: Path, file: Path, kind: str, world: World) -> dict[str, Any]:
    """Sums, norm and gradients of a step over all ranks; the reference's or the judge's words on the rows."""
    engine = engine_of(model, kind, world)
    rows: Any = "labelled" if kind == "kto" else "pairs"
    data: Pairs = prepare_pairs([str(file)], tokenizer=toy.tokenizer(), max_length="auto", kind=rows)
    knobs = TrainKnobs(global_batch_size=ROWS, per_device_train_batch_size=1 if kind == "kto" else "auto")
    plan = plan_steps(
        knobs, num_windows=data.num_windows, max_length=data.max_length, device_type="cpu",
        lengths=data.window_lengths.tolist(), ranks=world.data_size,
    )  # fmt: skip
    found: dict[str, Any] = {}
    loss: Loss
    if kind == "reward":
        loss = RewardLoss(engine.model.score, 0.1)  # type: ignore[arg-type]
        found["calibration"] = calibration(engine, data, plan, pad_id=0, world=world)
    else:
        word: Any = kind.partition(" ")[0]
        loss = loss_of(DpoConfig(model="m", dataset=["d"], loss_type=word, rpo_alpha="auto", beta=0.3))
        found["logprobs"] = logprobs(engine, data, plan, pad_id=0, world=world)
        data = data.with_reference(found["logprobs"] - np.linspace(-3, 3, 2 * ROWS))
    packed = microbatches_of_step(data, plan, step=0, seed=3, pad_id=0, world=world)
    (rows_counted,) = world.totals(*world.of_rows(sum(p.denominator for p in packed)))
    batches = [Batch.of(p, device=CPU) for p in packed]
    sums = engine.forward_backward(batches, loss, denominator=rows_counted)
    world.sum_gradients(engine.unsummed)
    found["sums"] = {name: float(value) for name, value in world.sum_named(sums, CPU).items()}
    own = {name: p.grad for name, p in engine.parameters.items() if p.grad is not None}
    cut = engine.cut
    found["gradients"] = {name: g.clone() if cut is None else cut.whole(name, g) for name, g in own.items()}
    return {**found, "norm": float(engine.gradient_norm()), "rows": rows_counted}


def everything(model: Path, files: dict[str, Path], layout: Layout) -> dict[str, Any]:
    # A world knows the names of one method's sums.
    return {
        kind: first_step(model, files.get(kind, files["pairs"]), kind, world_of(layout)) for kind in KINDS
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "wide"
    tiny.make("llama", folder, **WIDE)
    return folder


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("rows")
    return {"pairs": pairs_file(folder, seed=RUN_SEED), "kto": pairs_file(folder, seed=RUN_SEED, labels=True)}


@pytest.fixture(scope="module")
def one(model: Path, files: dict[str, Path]) -> dict[str, Any]:
    torch.set_num_threads(1)
    return everything(model, files, Layout())


@pytest.fixture(
    scope="module",
    params=[Layout(replicate=2), Layout(tp=2), Layout(shard=2)],
    ids=["ddp 2", "tp 2", "fsdp 2"],
)
def ranks(
    request: pytest.FixtureRequest,
    model: Path,
    files: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> list[dict[str, Any]]:
    return on_ranks(
        everything, request.param.size, tmp_path_factory.mktemp("ranks"), model, files, request.param
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_over_processes_is_that_of_one(
    kind: str, one: dict[str, Any], ranks: list[dict[str, Any]]
) -> None:
    wanted = one[kind]
    assert wanted["rows"] == ROWS and wanted["norm"] > 1e-3
    for rank in ranks:
        found = rank[kind]
        assert found["rows"] == ROWS and found["sums"].keys() == wanted["sums"].keys()
        for name, value in wanted["sums"].items():
            assert found["sums"][name] == pytest.approx(value, rel=1e-5, abs=1e-5), name
        assert found["norm"] == pytest.approx(wanted["norm"], rel=1e-5)
        assert found["gradients"].keys() == wanted["gradients"].keys()
        for name, gradient in wanted["gradients"].items():
            error = float((found["gradients"][name] - gradient).norm() / wanted["norm"])
            assert error < 1e-5, f"{name}: {error:.2e}"


def test_every_rank_knows_the_reference_of_all_rows(one: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    for kind in ("sigmoid", "sigmoid full", "simpo", "kto"):
        for rank in ranks:
            np.testing.assert_allclose(rank[kind]["logprobs"], one[kind]["logprobs"], rtol=1e-5)


def test_accuracy_and_calibration_are_over_all_ranks(
    one: dict[str, Any], ranks: list[dict[str, Any]]
) -> None:
    wanted = one["reward"]["calibration"]
    assert wanted["pairs"] == ROWS
    for rank in ranks:
        found = rank["reward"]["calibration"]
        assert (found["pairs"], found["accuracy"]) == (ROWS, wanted["accuracy"])
        assert found["error"] == pytest.approx(wanted["error"], abs=1e-5)


def test_what_was_dealt_is_collected_in_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    assert collected([3, 1], ALONE) == [3, 1]
    for size, tp, count in ((3, 1, 8), (4, 2, 7), (4, 2, 1), (2, 1, 0)):
        worlds = [World(rank, size, layout=Layout(replicate=size // tp, tp=tp)) for rank in range(size)]
        shares = [dealt(range(count), world) for world in worlds]
        monkeypatch.setattr(World, "gathered", lambda _, __, shares=shares: shares)
        assert all(collected([], world) == list(range(count)) for world in worlds)


# ---- the command -----------------------------------------------------------------------------------------


def run(verb: str, folder: Path, model: Path, file: Path, processes: int, **knobs: Any) -> Any:
    given = dict(
        dataset=file, val_dataset=file, max_steps=10, global_batch_size=3, eval_steps=5, learning_rate=1e-2,
        save_steps=5, logging_steps=1, report_to="none", device="cpu", output_dir=folder,
    )  # fmt: skip
    return getattr(swiftkit, verb)(
        model=model, nproc_per_node=processes, console=Console(file=io.StringIO()), **{**given, **knobs}
    )


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "logging.jsonl").read_text().splitlines()]


def check_runs(found: Path, wanted: Path) -> None:
    """Every number of the logs but those of the clock, and what was trained."""
    theirs, ours = lines_of(wanted), lines_of(found)
    assert [sorted(line) for line in ours] == [sorted(line) for line in theirs]
    assert sum("loss" in line for line in ours) == 10 and sum("eval_accuracy" in line for line in ours) == 3
    for mine, other in zip(ours, theirs, strict=True):
        for name, value in other.items():
            if "second" not in name and isinstance(value, float):
                assert mine[name] == pytest.approx(value, rel=1e-5, abs=2e-6), (other["step"], name)
    name = "checkpoint-10/adapter_model.safetensors"
    trained = load_file(wanted / name)
    for key, tensor in load_file(found / name).items():
        # AdamW divides a first gradient by itself: one that is almost zero keeps its rounding, not its size.
        assert float((tensor - trained[key]).norm() / trained[key].norm().clamp(min=1e-12)) < 1e-3, key


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verb", "knobs", "layout"),
    [
        ("dpo", {"sample_prompts": "none"}, {}),
        ("dpo", {"sample_prompts": "none"}, {"tensor_parallel_size": 2}),
        ("dpo", {"sample_prompts": "none"}, {"layout": "fsdp"}),
        ("dpo", {"sample_prompts": "none", "loss_type": "kto", "per_device_train_batch_size": 1}, {}),
        ("reward", {}, {}),
        ("reward", {}, {"tensor_parallel_size": 2}),
        ("reward", {}, {"layout": "fsdp"}),
    ],
    ids=["dpo, ddp", "dpo, tp", "dpo, fsdp", "kto, ddp", "reward, ddp", "reward, tp", "reward, fsdp"],
)
def test_the_command_over_two_processes(
    verb: str, knobs: dict[str, Any], layout: dict[str, Any], tmp_path: Path, seed: int
) -> None:
    tiny.make_toy(tmp_path / "toy", seed=4)
    file = pairs_file(tmp_path, seed=seed, labels="loss_type" in knobs)
    one = Path(run(verb, tmp_path / "one", tmp_path / "toy", file, 1, **knobs).folder)
    two = Path(run(verb, tmp_path / "two", tmp_path / "toy", file, 2, **knobs, **layout).folder)
    assert json.loads((two / "args.json").read_text())["machine"]["processes"] == 2
    check_runs(two, one)
    if verb == "reward":
        first, second = (json.loads((folder / "calibration.json").read_text()) for folder in (one, two))
        assert second["accuracy"] == first["accuracy"]
        assert second["error"] == pytest.approx(first["error"], abs=1e-4)
        return
    kept, own = (np.load(folder / "reference.npz") for folder in (one, two))
    for part in ("training", "evaluation"):
        np.testing.assert_allclose(own[part], kept[part], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("before", [1, 2])
def test_a_run_goes_on_with_other_processes(before: int, tmp_path: Path, seed: int) -> None:
    tiny.make_toy(tmp_path / "toy", seed=4)
    file = pairs_file(tmp_path, seed=seed)
    given = dict(sample_prompts="none")
    one = Path(run("dpo", tmp_path / "one", tmp_path / "toy", file, 1, **given).folder)
    broken = Path(run("dpo", tmp_path / "two", tmp_path / "toy", file, before, **given).folder)
    shutil.rmtree(broken / "checkpoint-10")
    again = run(
        "dpo", tmp_path / "two", tmp_path / "toy", file, 3 - before, resume_from_checkpoint="auto", **given
    )
    assert Path(again.folder) == broken
    check_runs(broken, one)
