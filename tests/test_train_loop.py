"""The loop on a tiny model: the same numbers however a batch is cut, and every time."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from swiftkit.config import TrainKnobs
from swiftkit.engine import Batch, Engine, Head, Loss, Sums
from swiftkit.errors import UserError
from swiftkit.methods.sft import loss
from swiftkit.train.guards import StepGuard
from swiftkit.train.loop import step
from swiftkit.train.steps import microbatches_of_step, plan_steps
from swiftkit.train.stop import Terminated
from tests import tiny, training
from tests.cases import toy
from tests.training import CPU, data_of, keeper_of, logged, losses, persona, saved, train


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy-model")
    tiny.make_toy(folder)
    return folder


def engine_of(model: Path, *, randomise: bool = False, **spec: Any) -> Engine:
    engine = training.engine_of(model, **spec)
    if randomise:
        tiny.randomise_adapter(engine.parameters)
    return engine


# ---- case 15: accumulated = whole batch ------------------------------------------------------------------

KNOWN_15 = toy.expected("15-grad-accum")
LAYOUTS = [(way["batch"], way["accum"]) for way in KNOWN_15["layouts_equal"] if "processes" not in way]


@pytest.mark.compat
def test_case_15_gradients_do_not_depend_on_the_layout(model: Path, seed: int) -> None:
    data = data_of(toy.case("15-grad-accum.jsonl"))
    assert [document.targets for document in data.documents] == KNOWN_15["supervised_tokens"]
    found: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
    sums = {}
    for size, times in LAYOUTS:
        knobs = TrainKnobs(per_device_train_batch_size=size, gradient_accumulation_steps=times)
        plan = plan_steps(knobs, num_windows=4, max_length=data.max_length, device_type="cpu")
        packed = microbatches_of_step(data, plan, step=0, seed=seed, pad_id=0)
        assert [len(p.cu_seqlens) - 1 for p in packed] == [size] * times
        denominator = sum(p.trained_tokens for p in packed)
        assert denominator == KNOWN_15["denominator"]
        engine = engine_of(model, randomise=True)
        sums[size, times] = engine.forward_backward(
            [Batch.of(p, device=CPU) for p in packed], loss, denominator=denominator
        )["loss"]
        found[size, times] = {name: p.grad for name, p in engine.parameters.items() if p.grad is not None}
    first, *others = LAYOUTS
    assert found[first].keys() == engine.parameters.keys()
    for other in others:
        torch.testing.assert_close(sums[other], sums[first], rtol=1e-5, atol=0)
        for name, gradient in found[first].items():
            error = (found[other][name] - gradient).norm() / gradient.norm()
            assert error < 1e-4, f"{other} {name}: {error:.2e}"


@pytest.mark.compat
def test_case_15_logged_losses_and_adapters_do_not_depend_on_the_layout(model: Path, tmp_path: Path) -> None:
    data = data_of(toy.case("15-grad-accum.jsonl"))
    found, adapters = [], []
    for size, times in LAYOUTS:
        engine = engine_of(model)
        lines = train(
            engine,
            data,
            tmp_path / f"{size}x{times}",
            per_device_train_batch_size=size,
            gradient_accumulation_steps=times,
            max_steps=10,
        )
        found.append(losses(lines))
        adapters.append(engine.parameters)
    assert len(found[0]) == 10 and found[0][-1] < found[0][0]
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], rtol=1e-5)
    for other_adapter in adapters[1:]:
        for name, parameter in adapters[0].items():
            torch.testing.assert_close(other_adapter[name], parameter, rtol=1e-3, atol=1e-4)


def test_packing_does_not_change_a_step_over_the_same_documents(model: Path, tmp_path: Path) -> None:
    """One step over all the rows: as windows of one row each, or packed into few."""
    source = toy.case("15-grad-accum.jsonl")
    apart, packed = data_of(source), data_of(source, packing=True, max_length=20)
    assert len(packed.windows) < len(apart.windows) == 4
    found = [
        losses(
            train(engine_of(model), data, tmp_path / name, global_batch_size=len(data.windows), max_steps=10)
        )
        for name, data in (("apart", apart), ("packed", packed))
    ]
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)


# ---- case 16: packed documents never see each other ------------------------------------------------------


@pytest.mark.compat
def test_case_16_documents_of_a_window_never_see_each_other(model: Path) -> None:
    known = toy.expected("16-packing")
    engine = engine_of(model, randomise=True)
    windows = {
        name: data_of(toy.case(f"{name}.jsonl"), packing=True, max_length=known["capacity"])
        for name in ("16-packing", "16-packing-other-first")
    }
    first, second = known["doc_lengths_with_eos"]
    tail = []
    for data in windows.values():
        (window,) = data.windows
        documents = sorted((data.documents[i] for i in window), key=lambda document: document.origin.line)
        assert [len(document) for document in documents] == [first, second]
        tail.append(logits(engine, documents)[first:])
        alone = logits(engine, documents[1:])
    torch.testing.assert_close(tail[0], tail[1], rtol=0, atol=known["logits_tolerance"])
    torch.testing.assert_close(tail[0], alone, rtol=0, atol=known["logits_tolerance"])

    documents = windows["16-packing"].documents
    sums, counts = [], []
    for part in (documents, documents[:1], documents[1:]):
        batch = tiny.row(part)
        sums.append(float(engine.evaluate([batch], loss)["loss"]))
        counts.append(len(batch.targets))
    assert counts == [known["targets_total"], first - 1, second - 1]
    weighted = (counts[1] * (sums[1] / counts[1]) + counts[2] * (sums[2] / counts[2])) / counts[0]
    assert sums[0] / counts[0] == pytest.approx(weighted, rel=1e-6)


def logits(engine: Engine, documents: list[Any]) -> torch.Tensor:
    with torch.no_grad():
        return engine.head.logits(engine.hidden(tiny.row(documents)))


# ---- whole runs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_run_repeats_bit_for_bit_and_learns(model: Path, tmp_path: Path, dropout: float) -> None:
    adapters, found = [], []
    for name in ("first", "second"):
        engine = engine_of(model, dropout=dropout)
        found.append(losses(train(engine, persona(), tmp_path / name, num_train_epochs=2)))
        adapters.append(engine.parameters)
        torch.rand(5)  # what else draws from the global generator must not matter
    assert found[0] == found[1] and len(found[0]) > 10
    assert all(torch.equal(adapters[0][name], adapters[1][name]) for name in adapters[0])
    assert found[0][-1] < 0.9 * found[0][0]


def test_a_seed_is_another_order_and_another_dropout(model: Path, tmp_path: Path) -> None:
    found = [
        losses(train(engine_of(model, dropout=0.3), persona(), tmp_path / str(s), max_steps=4, seed=s))
        for s in (1, 2)
    ]
    assert found[0] != found[1]


def test_micro_batch_size_does_not_change_a_run(model: Path, tmp_path: Path) -> None:
    found = [
        losses(
            train(
                engine_of(model),
                persona(),
                tmp_path / str(size),
                global_batch_size=4,
                per_device_train_batch_size=size,
                max_steps=10,
            )
        )
        for size in (1, 2, 4)
    ]
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)
    np.testing.assert_allclose(found[2], found[0], rtol=1e-5)


def test_logged_values_are_means_over_the_steps_since_the_last_line(model: Path, tmp_path: Path) -> None:
    knobs: dict[str, Any] = dict(global_batch_size=1, num_train_epochs=1, learning_rate=1e-30)
    data = persona()
    often = train(engine_of(model), data, tmp_path / "often", **knobs)
    seldom = train(engine_of(model), data, tmp_path / "seldom", **knobs, logging_steps=4)
    steps = [line["step"] for line in seldom]
    assert steps == [1, *range(4, len(often), 4), len(often)]
    trained = [
        p.trained_tokens
        for step in range(len(often))
        for p in microbatches_of_step(
            data,
            plan_steps(
                TrainKnobs(global_batch_size=1, num_train_epochs=1),
                num_windows=len(data.windows),
                max_length=data.max_length,
                device_type="cpu",
            ),
            step=step,
            seed=42,
            pad_id=0,
        )
    ]
    for before, line in zip([0, *steps], seldom, strict=False):
        share = range(before, line["step"])
        total = sum(often[i]["loss"] * trained[i] for i in share)
        assert line["loss"] == pytest.approx(total / sum(trained[i] for i in share), rel=1e-6)
        assert line["grad_norm"] == pytest.approx(often[line["step"] - 1]["grad_norm"], rel=1e-6)
        assert line["epoch"] == pytest.approx(line["step"] / len(data.windows))
    assert often[-1]["epoch"] == 1.0


def test_evaluation_before_between_and_after(model: Path, tmp_path: Path) -> None:
    data = persona(split_ratio=0.2)
    assert data.evaluation is not None
    engine = engine_of(model, dropout=0.5)
    lines = train(
        engine, data, tmp_path / "run", evaluation=data.evaluation, max_steps=5, eval_steps=2, save_steps=3
    )
    judged = [line for line in lines if "eval_loss" in line]
    assert [line["step"] for line in judged] == [0, 2, 4, 5]
    for line in judged:
        assert line["eval_perplexity"] == pytest.approx(np.exp(line["eval_loss"]))
    assert engine.model.training
    by_hand = engine.evaluate([tiny.row(data.evaluation.documents)], loss)["loss"]
    mean = float(by_hand) / data.evaluation.report.trained_tokens
    assert judged[-1]["eval_loss"] == pytest.approx(mean, rel=1e-5), "without dropout"


def test_checkpoints_are_due_at_their_steps_and_at_the_end(model: Path, tmp_path: Path) -> None:
    for steps, due in ((7, [3, 6, 7]), (6, [3, 6]), (2, [2])):
        folder, engine = tmp_path / str(steps), engine_of(model)
        train(engine, persona(), folder, max_steps=steps, save_steps=3, keeper=keeper_of(folder, engine))
        assert saved(folder) == due


# ---- runs that end early ---------------------------------------------------------------------------------


def test_a_run_that_diverges_says_when_and_what_to_do(model: Path, tmp_path: Path) -> None:
    rule = (
        r"^step 2: loss is nan, training has diverged \(last finite loss \d\.\d{4} at step 1\); "
        r"lower --learning_rate \(1e\+30\)"
    )
    with pytest.raises(UserError, match=rule):
        train(engine_of(model), persona(), tmp_path / "run", learning_rate=1e30, max_steps=5)
    (line,) = logged(tmp_path / "run")
    assert line["step"] == 1 and np.isfinite(line["loss"])


def test_a_diverged_adapter_is_not_saved_between_log_lines(model: Path, tmp_path: Path) -> None:
    """The first update makes numbers that overflow when they are squared; nothing shows it before a save."""
    folder, engine = tmp_path / "run", engine_of(model)
    name, parameter = next(iter(engine.parameters.items()))

    def spoilt(head: Head, hidden: torch.Tensor, batch: Batch) -> Sums:
        with torch.no_grad():
            parameter[0, 0] = float("inf")
        return loss(head, hidden.detach() * 0 + hidden.nan_to_num(), batch)

    with pytest.raises(UserError, match=rf"^step 3: {name} is not finite any more, training has diverged"):
        train(
            engine, persona(), folder, loss=spoilt, max_steps=9, logging_steps=9, save_steps=3,
            on_bad_loss="skip", keeper=keeper_of(folder, engine),
        )  # fmt: skip
    assert saved(folder) == [] and len(logged(folder)) == 1


@pytest.mark.parametrize("judged", [False, True])
def test_a_base_that_is_not_finite_is_no_matter_of_the_rate(
    model: Path, tmp_path: Path, judged: bool
) -> None:
    engine, data = engine_of(model), persona(split_ratio=0.2)
    with torch.no_grad():
        engine.head.weight[0, 0] = float("nan")
    what = "step 0: eval_loss" if judged else "step 1: loss"
    with pytest.raises(UserError, match=rf"^{what} is nan before anything was trained: the model's weights"):
        train(engine, data, tmp_path / "run", evaluation=data.evaluation if judged else None, max_steps=5)
    assert logged(tmp_path / "run") == []


def signalled_in(call: int, number: int) -> Loss:
    """The loss, with a signal in its n-th call, counted from 1."""
    calls = iter(range(1, 1000))

    def signalled(head: Head, hidden: torch.Tensor, batch: Batch) -> Sums:
        if next(calls) == call:
            os.kill(os.getpid(), number)
        return loss(head, hidden, batch)

    return signalled


@pytest.mark.parametrize(("call", "kept"), [(1, [1]), (2, [2]), (5, [2, 4, 5])])
@pytest.mark.parametrize(
    ("number", "ending"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)]
)
def test_a_signal_ends_the_step_and_saves_it(
    model: Path, tmp_path: Path, call: int, kept: list[int], number: int, ending: type[BaseException]
) -> None:
    folder, engine = tmp_path / "run", engine_of(model)
    before = signal.getsignal(number)
    with pytest.raises(ending) as ended:
        train(
            engine, persona(), folder, loss=signalled_in(call, number), global_batch_size=1, max_steps=9,
            save_steps=2, keeper=keeper_of(folder, engine),
        )  # fmt: skip
    assert saved(folder) == kept
    assert getattr(ended.value, "code", 130) == 128 + number
    assert signal.getsignal(number) == before


def test_a_second_signal_ends_at_once(model: Path, tmp_path: Path) -> None:
    folder, engine = tmp_path / "run", engine_of(model)

    def twice(head: Head, hidden: torch.Tensor, batch: Batch) -> Sums:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("the step went on")

    with pytest.raises(Terminated):
        train(engine, persona(), folder, loss=twice, max_steps=9, keeper=keeper_of(folder, engine))
    assert saved(folder) == []


def test_a_signal_in_an_evaluation_does_not_wait_for_its_end(model: Path, tmp_path: Path) -> None:
    data, folder, engine = persona(split_ratio=0.5), tmp_path / "run", engine_of(model)
    assert data.evaluation is not None and len(data.evaluation.windows) > 2
    calls: list[bool] = []

    def signalled(head: Head, hidden: torch.Tensor, batch: Batch) -> Sums:
        calls.append(torch.is_grad_enabled())
        if calls.count(True) == 2 and not calls[-1]:
            os.kill(os.getpid(), signal.SIGINT)
        return loss(head, hidden, batch)

    with pytest.raises(KeyboardInterrupt):
        train(
            engine, data, folder, evaluation=data.evaluation, loss=signalled, max_steps=9, eval_steps=2,
            global_batch_size=1, keeper=keeper_of(folder, engine),
        )  # fmt: skip
    assert saved(folder) == [2]
    assert [line["step"] for line in logged(folder) if "eval_loss" in line] == [0]


# ---- the step ---------------------------------------------------------------------------------------------


class NoHostReads(TorchDispatchMode):
    """Fails where a value is read back from a tensor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "a value is read back"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("spike_factor", [0.0, 3.0])
def test_a_step_reads_no_value_back(model: Path, spike_factor: float) -> None:
    """With fused AdamW, as on a GPU: neither the guard nor the update asks for a number."""
    engine, data = engine_of(model), persona()
    optimizer = torch.optim.AdamW([{"params": engine.parameters.values(), "ratio": 1.0}], lr=1e-3, fused=True)
    guard = StepGuard(optimizer, device=CPU, spike_factor=spike_factor)
    plan = training.plan_of(data, TrainKnobs(global_batch_size=2, per_device_train_batch_size=1))
    for index in range(2):
        packed = microbatches_of_step(data, plan, step=index, seed=1, pad_id=0)
        batches = [Batch.of(p, device=CPU) for p in packed]
        trained, guard.looking = sum(p.trained_tokens for p in packed), True
        with NoHostReads():
            step(engine, batches, loss, optimizer, denominator=trained, rate=1e-3, max_norm=1.0, guard=guard)
        guard.check(step=index + 1)
    with pytest.raises(AssertionError, match="read back"), NoHostReads():
        guard.held.item()
