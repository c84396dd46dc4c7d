"""Guards: a bad step changes nothing, says what its rows were, and a tensor that learns nothing is named."""

from __future__ import annotations

import io
import json
import math
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from swiftkit.engine import Batch, Engine, Head, Loss, Sums
from swiftkit.errors import UserError
from swiftkit.methods.sft import loss
from swiftkit.train.artifact import read_model
from swiftkit.train.checkpoint import read_snapshot
from swiftkit.train.guards import BAD_BATCHES, BadStep, StepGuard
from swiftkit.train.judge import Judge
from swiftkit.train.stop import Stop, stop_by_signal
from swiftkit.train.watchdog import Watchdog
from tests import tiny, training
from tests.training import CPU, data_of, keeper_of, logged, persona, saved, train


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy-model")
    tiny.make_toy(folder)
    return folder


# ---- an update is held back ------------------------------------------------------------------------------


def moments(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [value.clone() for state in optimizer.state.values() for value in state.values()]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(
    ("value", "norm"), [(math.nan, 1.0), (math.inf, 1.0), (1.0, math.nan), (1.0, math.inf)]
)
def test_a_held_step_leaves_parameters_moments_and_counts(fused: bool, value: float, norm: float) -> None:
    parameters = [torch.randn(5, 3, requires_grad=True), torch.randn(7, requires_grad=True)]
    optimizer = torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.1, fused=fused)
    guard = StepGuard(optimizer, device=CPU)

    def update(loss: float, norm: float) -> None:
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, math.nan if math.isnan(loss + norm) else 0.3)
        guard.update(torch.tensor(loss), torch.tensor(norm))

    update(1.0, 1.0)
    before = [parameter.detach().clone() for parameter in parameters], moments(optimizer)
    update(value, norm)
    assert bool(guard.held)
    after = [parameter.detach().clone() for parameter in parameters], moments(optimizer)
    for old, new in zip(before, after, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(old, new, strict=True))
    update(1.0, 1.0)
    assert not bool(guard.held) and not torch.equal(parameters[0], before[0][0])
    assert {float(state["step"]) for state in optimizer.state.values()} == {2.0}


def test_a_leap_is_measured_against_the_median_of_the_last_steps() -> None:
    parameter = torch.zeros(2, requires_grad=True)
    guard = StepGuard(torch.optim.AdamW([parameter], lr=0.1), device=CPU, spike_factor=3.0)

    def held(value: float) -> bool:
        parameter.grad = torch.ones(2)
        guard.update(torch.tensor(value), torch.tensor(1.0))
        return bool(guard.held)

    assert not held(50.0), "a first loss may be anything"
    assert not any(held(1.0 + n / 100) for n in range(9))
    assert held(3.2) and held(1000.0) and not held(3.0)
    state = guard.state_dict()
    other = StepGuard(torch.optim.AdamW([parameter], lr=0.1), device=CPU, spike_factor=3.0)
    other.load_state_dict({name: tensor.clone() for name, tensor in state.items()})
    guard = other
    assert held(3.2), "after a resume too"


# ---- whole runs ------------------------------------------------------------------------------------------


def spoilt_in(*steps: int, by: float = math.nan) -> Loss:
    """The loss of runs with one micro-batch a step, times `by` in some steps, counted from 1."""
    calls = iter(range(1, 1000))

    def spoilt(head: Head, hidden: torch.Tensor, batch: Batch) -> Sums:
        factor = by if next(calls) in steps else 1.0
        return {name: value * factor for name, value in loss(head, hidden, batch).items()}

    return spoilt


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / BAD_BATCHES).read_text().splitlines()]


def test_a_bad_batch_is_skipped_and_written_down(model: Path, tmp_path: Path) -> None:
    """The result is that of a run in which the bad step did nothing; its rows are in the run folder."""
    engine, folder, said = training.engine_of(model), tmp_path / "run", io.StringIO()
    data = data_of("swiftkit::persona", chat_template="chatml")
    knobs: dict[str, Any] = dict(global_batch_size=2, per_device_train_batch_size=2, max_steps=8)
    train(
        engine, data, folder, loss=spoilt_in(3), logging_steps=4, on_bad_loss="skip", console=said,
        keeper=keeper_of(folder, engine), **knobs,
    )  # fmt: skip
    lines = {line["step"]: line for line in logged(folder)}
    assert lines[4]["skipped_steps"] == 1 and "skipped_steps" not in lines[8]
    assert math.isfinite(lines[4]["loss"])
    (line,) = rows_of(folder)
    assert (line["step"], line["why"], len(line["rows"])) == (3, "loss is nan", 2)
    assert "warning   step 3: loss is nan, so its update was held back; its rows are " in said.getvalue()
    for row in line["rows"]:
        file, _, number = row["row"].rpartition(":")
        (document,) = [d for d in data.documents if str(d.origin) == row["row"]]
        assert file and int(number) > 0 and document.ids.tolist() == row["ids"]
        assert row["row"] in said.getvalue()
    assert saved(folder) == [8]
    tensors = read_snapshot(folder / "checkpoint-8").tensors
    updates = {float(tensor) for name, tensor in tensors.items() if name.endswith("/step")}
    assert updates == {7.0}, "the held step is not counted either"


def test_a_bad_batch_stops_at_the_next_log_line_with_its_rows(model: Path, tmp_path: Path) -> None:
    engine, folder = training.engine_of(model), tmp_path / "run"
    rule = (
        r"^step 3: loss is nan, training has diverged \(last finite loss \d.\d{4} at step 1\).*"
        r"--on_bad_loss skip; its rows are .*persona.*:\d+"
    )
    with pytest.raises(UserError, match=rule):
        train(
            engine, persona(), folder, loss=spoilt_in(3), max_steps=9, logging_steps=5, global_batch_size=1,
            keeper=keeper_of(folder, engine),
        )  # fmt: skip
    assert [line["step"] for line in rows_of(folder)] == [3]
    assert all(bool(p.isfinite().all()) for p in engine.parameters.values())
    assert saved(folder) == []


def test_a_leap_is_reported_as_one(model: Path, tmp_path: Path) -> None:
    engine, folder, said = training.engine_of(model), tmp_path / "run", io.StringIO()
    train(
        engine, persona(), folder, loss=spoilt_in(11, by=1000.0), max_steps=12, global_batch_size=1,
        loss_spike_factor=10.0, on_bad_loss="skip", console=said, keeper=keeper_of(folder, engine),
    )  # fmt: skip
    (line,) = rows_of(folder)
    assert line["step"] == 11 and line["why"].startswith("loss leaps to ")
    assert "step 11: loss leaps to" in said.getvalue()
    assert "step 11/12  loss of no step" in said.getvalue()


def test_skipping_without_end_is_given_up(model: Path, tmp_path: Path) -> None:
    knobs: dict[str, Any] = dict(global_batch_size=1, on_bad_loss="skip")
    engine, bad = training.engine_of(model), spoilt_in(*range(2, 99))
    with pytest.raises(UserError, match=r"^step 26: 25 updates in a row were held back, training has"):
        train(engine, persona(), tmp_path / "run", loss=bad, max_steps=60, **knobs)
    engine, bad = training.engine_of(model), spoilt_in(*range(99))
    with pytest.raises(UserError, match=r"^step 4: every update was held back before anything was trained"):
        train(engine, persona(), tmp_path / "short", loss=bad, max_steps=4, **knobs)


def test_what_was_wrong_is_said_in_its_own_words() -> None:
    assert str(BadStep(1, math.nan, 1.0)) == "loss is nan"
    assert str(BadStep(1, 2.0, math.inf)) == "grad_norm is inf"
    assert str(BadStep(1, 7.5, 1.0)) == "loss leaps to 7.5000"


# ---- every trained tensor has a gradient ------------------------------------------------------------------


def without(engine: Engine, name: str) -> None:
    """A layer whose adapter the forward never reads, as experts that are one fused tensor."""
    owner, _, leaf = name.rpartition(".")
    module: Any = engine.model.get_submodule(owner)
    dead = torch.nn.Parameter(getattr(module, leaf).detach().clone())
    engine.parameters[name] = dead


@pytest.mark.parametrize(("factor", "step"), [("lora_B", 1), ("lora_A", 2)])
def test_an_adapter_that_nothing_reaches_is_named(
    model: Path, tmp_path: Path, factor: str, step: int
) -> None:
    engine = training.engine_of(model)
    name = next(name for name in engine.parameters if "down_proj" in name and name.endswith(factor))
    without(engine, name)
    rule = f"^step {step}: no gradient reaches {name}: the loss does not depend on it"
    with pytest.raises(UserError, match=rule):
        train(engine, persona(), tmp_path / "run", max_steps=5, logging_steps=5)


def test_a_held_first_step_raises_no_false_alarm(model: Path, tmp_path: Path) -> None:
    """A has no gradient at the second step when B was not moved by the first."""
    lines = train(
        training.engine_of(model), persona(), tmp_path / "run", loss=spoilt_in(1), max_steps=4,
        on_bad_loss="skip", global_batch_size=1,
    )  # fmt: skip
    assert [line["step"] for line in lines] == [1, 2, 3, 4] and "loss" not in lines[0]


# ---- the watchdog ----------------------------------------------------------------------------------------


def test_the_watchdog_says_what_hangs_once_with_the_stack() -> None:
    said: list[str] = []
    reported = threading.Event()

    def say(text: str) -> None:
        said.append(text)
        reported.set()

    def a_function_that_hangs() -> None:
        assert reported.wait(60)

    with Watchdog(0.05, say) as watchdog:
        watchdog.enter("saving", done=7)
        a_function_that_hangs()
        watchdog.enter("data", done=8)
        time.sleep(0.2)
    (text,) = said
    assert text.startswith("after step 7: saving has taken 0 s, longer than --hang_timeout 0.05")
    assert "in a_function_that_hangs" in text


def test_the_watchdog_is_quiet_in_a_run_that_moves_and_when_it_is_off(model: Path, tmp_path: Path) -> None:
    said = io.StringIO()
    train(training.engine_of(model), persona(), tmp_path / "run", max_steps=3, hang_timeout=600, console=said)
    train(training.engine_of(model), persona(), tmp_path / "off", max_steps=3, hang_timeout=0, console=said)
    assert "hang_timeout" not in said.getvalue()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("swiftkit")]


def test_a_run_that_hangs_is_reported(model: Path, tmp_path: Path) -> None:
    said = io.StringIO()
    calls = iter(range(9))

    def slow(head: Head, hidden: torch.Tensor, batch: Batch) -> Sums:
        if next(calls) == 1:
            deadline = time.monotonic() + 60
            while "hang_timeout" not in said.getvalue() and time.monotonic() < deadline:
                time.sleep(0.01)
        return loss(head, hidden, batch)

    train(
        training.engine_of(model), persona(), tmp_path / "run", loss=slow, max_steps=3, hang_timeout=2.0,
        global_batch_size=1, console=said,
    )  # fmt: skip
    assert "after step 1: forward and backward has taken" in said.getvalue()
    assert "in slow" in said.getvalue()


def test_signals_are_left_alone_outside_the_main_thread() -> None:
    found: list[Stop] = []

    def elsewhere() -> None:
        with stop_by_signal() as stop:
            found.append(stop)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found[0].signal is None


# ---- the best checkpoint ---------------------------------------------------------------------------------


def test_patience_counts_evaluations_without_a_new_best() -> None:
    judge = Judge("eval_loss", patience=2)
    best = [
        judge.take({"eval_loss": value}, step=step) for step, value in enumerate([0.1, 3.0, 2.0, 2.0, 2.5])
    ]
    assert best == [False, True, True, False, False], "the untrained model is no candidate"
    assert (judge.best_step, judge.best, judge.gives_up) == (2, 2.0, True)
    other = Judge("eval_loss", patience=3)
    other.load_state_dict(json.loads(json.dumps(judge.state_dict())))
    assert not other.gives_up and other.take({"eval_loss": 1.0}, step=5)
    assert not Judge(None).take({"eval_loss": 1.0}, step=1)
    by_another = Judge("eval_perplexity")
    by_another.load_state_dict(judge.state_dict())
    assert by_another.best_step is None and by_another.evaluated == 4


@pytest.mark.parametrize("load", [True, False])
def test_a_run_stops_early_and_keeps_its_best(model: Path, tmp_path: Path, load: bool) -> None:
    """A rate far too high: evaluations get worse, and the best of them stays whatever the limit says."""
    data, folder, engine = persona(split_ratio=0.3), tmp_path / "run", training.engine_of(model)
    lines = train(
        engine, data, folder, evaluation=data.evaluation, max_steps=60, eval_steps=2, save_steps=60,
        global_batch_size=1, learning_rate=0.08, lr_scheduler_type="constant", early_stopping_patience=3,
        load_best_model_at_end=load, save_total_limit=1, keeper=keeper_of(folder, engine, keep=1),
    )  # fmt: skip
    judged = {line["step"]: line["eval_loss"] for line in lines if "eval_loss" in line and line["step"]}
    best, last = min(judged, key=lambda step: judged[step]), max(judged)
    assert last < 60 and list(judged)[-4:] == [best, best + 2, best + 4, best + 6]
    assert saved(folder) == [best, last]
    named = json.loads((folder / "best.json").read_text())
    assert named == {"checkpoint": f"checkpoint-{best}", "metric": "eval_loss", "value": judged[best]}
    result = read_model(folder / f"checkpoint-{best if load else last}")
    assert all(torch.equal(engine.parameters[name], tensor) for name, tensor in result.items())
