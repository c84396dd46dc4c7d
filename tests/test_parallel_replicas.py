"""Several processes over gloo equal one in each layout: losses, gradients, ten steps (cases 15, 24)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from swiftkit.config import TrainKnobs, build
from swiftkit.errors import UserError
from swiftkit.parallel.mesh import Layout
from swiftkit.parallel.world import ALONE, World, dealt, seed_of_step
from swiftkit.train.steps import check_batch_sizes, plan_steps
from tests import replicas, tiny
from tests.adapters import WIDE
from tests.cases import toy

KNOWN_15, KNOWN_24 = toy.expected("15-grad-accum"), toy.expected("24-uneven-ranks")
NUMBERS = ("loss", "grad_norm", "eval_loss", "learning_rate", "epoch")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "wide"
    tiny.make("llama", folder, **WIDE)
    return folder


@pytest.fixture(scope="module")
def one(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    torch.set_num_threads(1)
    return replicas.alone(model, tmp_path_factory.mktemp("one"))


@pytest.fixture(
    scope="module",
    params=[
        (2, 1, 1), (2, 2, 1), (2, 1, 2),
        *(pytest.param((4, *parts), marks=pytest.mark.slow)
          for parts in ((1, 1), (2, 1), (4, 1), (1, 4), (1, 2), (2, 2))),
    ],
    ids=[
        "ddp 2", "tp 2", "fsdp 2", "ddp 4", "tp 2 x ddp 2", "tp 4", "fsdp 4", "hsdp 2 x 2", "tp 2 x fsdp 2",
    ],
)  # fmt: skip
def several(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    processes, tp, shard = request.param
    return replicas.over(processes, model, tmp_path_factory.mktemp("several") / "run", tp=tp, shard=shard)


def check_lines(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    assert [sorted(line) for line in found] == [sorted(line) for line in wanted]
    for name in NUMBERS:
        theirs = [[line[name] for line in lines if name in line] for lines in (found, wanted)]
        np.testing.assert_allclose(*theirs, rtol=1e-5, err_msg=name)


def check_tensors(
    found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], bound: float = 1e-5
) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        error = float((found[name] - tensor).norm() / tensor.norm().clamp(min=1e-12))
        assert error < bound, f"{name}: {error:.2e}"


@pytest.mark.parametrize("kind", replicas.KINDS)
def test_a_step_over_processes_is_that_of_one(
    kind: str, one: dict[str, Any], several: dict[str, Any]
) -> None:
    if f"step {kind}" not in several:
        pytest.skip("tests/test_parallel_tp.py and test_parallel_tp_quantized.py cut quantized bases")
    found, wanted = several[f"step {kind}"], one[f"step {kind}"]
    assert found["denominator"] == wanted["denominator"]
    np.testing.assert_allclose([found["loss"], found["norm"]], [wanted["loss"], wanted["norm"]], rtol=1e-5)
    check_tensors(found["gradients"], wanted["gradients"])


@pytest.mark.parametrize("kind", replicas.TRAINED)
def test_ten_steps_over_processes_are_those_of_one(
    kind: str, one: dict[str, Any], several: dict[str, Any]
) -> None:
    """Three windows a step: of two processes one has more, of four one has none."""
    if f"train {kind}" not in several:
        pytest.skip("tests/test_parallel_tp.py and test_parallel_tp_quantized.py cut quantized bases")
    found, wanted = several[f"train {kind}"], one[f"train {kind}"]
    check_lines(found["lines"], wanted["lines"])
    assert sum("loss" in line for line in wanted["lines"]) == 10
    # AdamW divides a first gradient by itself: one that is almost zero keeps its rounding, not its size.
    check_tensors(found["parameters"], wanted["parameters"], bound=1e-3)


def test_case_15_the_denominator_is_that_of_all_processes(
    one: dict[str, Any], several: dict[str, Any]
) -> None:
    found, wanted = several["case 15"], one["case 15"]
    assert found["denominator"] == wanted["denominator"] == KNOWN_15["denominator"]
    np.testing.assert_allclose(found["loss"], wanted["loss"], rtol=1e-5)
    check_tensors(found["gradients"], wanted["gradients"], bound=1e-4)


@pytest.mark.parametrize("batch", KNOWN_24["batch"])
def test_case_24_uneven_rows_end_and_each_is_counted_once(
    batch: int, one: dict[str, Any], several: dict[str, Any]
) -> None:
    """Seven rows in steps of four: the last step has three; an evaluation counts each row once."""
    found, wanted = several[f"case 24, batch {batch}"], one[f"case 24, batch {batch}"]
    check_lines(found["lines"], wanted["lines"])
    assert sum("loss" in line for line in found["lines"]) == 2
    dealt_rows = [row for rank in range(2) for row in dealt(range(7), World(rank=rank, size=2))]
    assert sorted(dealt_rows) == list(range(7))


def test_case_24_one_row_for_several_processes_trains(one: dict[str, Any], several: dict[str, Any]) -> None:
    check_lines(several["case 24, one row"]["lines"], one["case 24, one row"]["lines"])


def test_an_update_that_one_rank_must_hold_back_is_held_back_by_all(
    one: dict[str, Any], several: dict[str, Any]
) -> None:
    found, wanted = several["held back"], one["held back"]
    skipped = [line["step"] for line in wanted["lines"] if "skipped_steps" in line]
    assert skipped and skipped == [line["step"] for line in found["lines"] if "skipped_steps" in line]
    check_lines(found["lines"], wanted["lines"])
    check_tensors(found["parameters"], wanted["parameters"], bound=1e-3)


# ---- the plan of a step ----------------------------------------------------------------------------------


def test_the_windows_of_a_step_do_not_depend_on_the_processes() -> None:
    def plan(ranks: int, **knobs: Any) -> tuple[int, int, int, int]:
        found = plan_steps(
            TrainKnobs(**knobs), num_windows=4000, max_length=100, device_type="cpu", ranks=ranks
        )
        return (
            found.steps, found.global_batch_size, found.micro_batch_size, found.gradient_accumulation_steps
        )  # fmt: skip

    assert [plan(ranks)[:2] for ranks in (1, 2, 3, 8)] == [(1500, 8)] * 4
    assert plan(2, per_device_train_batch_size=1, gradient_accumulation_steps=2) == (3000, 4, 1, 2)
    assert plan(2, global_batch_size=16, gradient_accumulation_steps=4)[2:] == (2, 4)
    assert plan(16)[1:] == (8, 1, 1)


def test_a_batch_that_processes_cannot_share_is_refused() -> None:
    knobs = build(
        TrainKnobs,
        dict(global_batch_size=16, per_device_train_batch_size=2, gradient_accumulation_steps=4),
    )
    check_batch_sizes(knobs, 2)
    with pytest.raises(UserError, match=r"16 is not \S+ 2 x \S+ 4; leave one"):
        check_batch_sizes(knobs, 1)
    with pytest.raises(UserError, match=r"16 is not .* 2 x .* 4 x 4 processes; leave one"):
        check_batch_sizes(knobs, 4)


def test_each_rank_and_step_draws_its_own_dropout() -> None:
    seeds = {seed_of_step(42, step=step, rank=rank, size=4) for step in range(50) for rank in range(4)}
    assert len(seeds) == 200


def test_alone_nothing_is_waited_for() -> None:
    assert (ALONE.totals(3, 4), ALONE.from_first(lambda: 5), ALONE.once_a_node(lambda: 6)) == ([3, 4], 5, 6)


def test_a_layout_names_all_axes() -> None:
    assert Layout(replicate=2, tp=4).size == 8
    assert list(Layout.__dataclass_fields__) == ["pp", "replicate", "shard", "cp", "tp", "ep"]


# ---- GPUs ------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_one_process_over_nccl_equals_none(model: Path, tmp_path: Path) -> None:
    check_gpus(replicas.over(1, model, tmp_path / "run", device="cuda"), replicas.alone(model, tmp_path))


@pytest.mark.multigpu
def test_all_gpus_over_nccl_equal_one_process(model: Path, tmp_path: Path) -> None:
    gpus = torch.cuda.device_count()
    check_gpus(replicas.over(gpus, model, tmp_path / "run", device="cuda"), replicas.alone(model, tmp_path))


def check_gpus(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Against one process on the CPU: matrix products round otherwise there."""
    for kind in ("lora", "full"):
        for name in ("loss", "norm"):
            np.testing.assert_allclose(found[f"step {kind}"][name], wanted[f"step {kind}"][name], rtol=1e-3)
        theirs = [
            [line["loss"] for line in run[f"train {kind}"]["lines"] if "loss" in line]
            for run in (found, wanted)
        ]
        np.testing.assert_allclose(*theirs, rtol=1e-2)
