"""The loop on a tiny model: the same numbers however a batch is cut, and every time."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from swiftkit.config import TrainKnobs
from swiftkit.data import Prepared, prepare
from swiftkit.engine import Batch, Engine, Head, LoraSpec, Loss, Sums
from swiftkit.engine.build import build_model
from swiftkit.errors import UserError
from swiftkit.methods.sft import loss
from swiftkit.train.log import FILE, Log
from swiftkit.train.loop import fit
from swiftkit.train.steps import microbatches_of_step, plan_steps
from tests import tiny
from tests.cases import toy

CPU = torch.device("cpu")
Lines = list[dict[str, Any]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy-model")
    tiny.make_toy(folder)
    return folder


def engine_of(model: Path, *, randomise: bool = False, **spec: Any) -> Engine:
    engine = Engine(
        build_model(model, dtype=torch.float32, device=CPU, lora=LoraSpec(**{"rank": 4, "alpha": 8, **spec}))
    )
    if randomise:
        tiny.randomise_adapter(engine.parameters)
    return engine


def data_of(source: str, **knobs: Any) -> Prepared:
    settings = dict(max_length="auto", packing=False, truncation_strategy="drop", system=None)
    return prepare([source], tokenizer=toy.tokenizer(), **{**settings, **knobs})


def train(
    engine: Engine,
    data: Prepared,
    folder: Path,
    *,
    evaluation: Prepared | None = None,
    save: Callable[[int], None] = lambda _: None,
    loss: Loss = loss,
    **knobs: Any,
) -> Lines:
    """Run `fit`; gives the lines of logging.jsonl."""
    folder.mkdir(exist_ok=True)
    checked = TrainKnobs(**{"logging_steps": 1, "learning_rate": 1e-2, **knobs})
    plan = plan_steps(checked, num_windows=len(data.windows), max_length=data.max_length, device_type="cpu")
    console = Console(file=(folder / "console.txt").open("w"))
    with Log(folder, steps=plan.steps, report_to=[], settings={}, console=console) as log:
        fit(engine, data, loss, knobs=checked, plan=plan, log=log, save=save, pad_id=0, evaluation=evaluation)
    return [json.loads(line) for line in (folder / FILE).read_text().splitlines()]


def losses(lines: Lines) -> list[float]:
    return [line["loss"] for line in lines if "loss" in line]


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


def persona(**knobs: Any) -> Prepared:
    return data_of("swiftkit::persona", chat_template="chatml", packing=True, max_length=256, **knobs)


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
        saved: list[int] = []
        train(
            engine_of(model),
            persona(),
            tmp_path / str(steps),
            max_steps=steps,
            save_steps=3,
            save=saved.append,
        )
        assert saved == due


# ---- runs that end early ---------------------------------------------------------------------------------


def logged(folder: Path) -> Lines:
    """The log's lines, as strict JSON."""

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in (folder / FILE).read_text().splitlines()]


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
    saved: list[int] = []
    with pytest.raises(UserError, match=r"^step 3: the adapter is not finite, training has diverged"):
        train(
            engine_of(model),
            persona(),
            tmp_path / "run",
            learning_rate=1e30,
            max_steps=9,
            logging_steps=9,
            save_steps=3,
            save=saved.append,
        )
    assert saved == [] and len(logged(tmp_path / "run")) == 1


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


def interrupted_in(call: int) -> Loss:
    """The loss with Ctrl-C in its n-th call, counted from 1."""
    calls = iter(range(1, 1000))

    def interrupted(head: Head, hidden: torch.Tensor, batch: Batch) -> Sums:
        if next(calls) == call:
            raise KeyboardInterrupt
        return loss(head, hidden, batch)

    return interrupted


@pytest.mark.parametrize(("call", "kept"), [(1, []), (2, [1]), (4, [2, 3]), (5, [2, 4])])
def test_an_interrupted_run_keeps_its_finished_steps(
    model: Path, tmp_path: Path, call: int, kept: list[int]
) -> None:
    saved: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        train(
            engine_of(model),
            persona(),
            tmp_path / "run",
            loss=interrupted_in(call),
            global_batch_size=1,
            max_steps=9,
            save_steps=2,
            save=saved.append,
        )
    assert saved == kept


def test_an_update_that_was_interrupted_is_not_saved(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[int] = []
    updates = iter(range(1, 10))
    whole = torch.optim.AdamW.step

    def update(self: torch.optim.AdamW, closure: None = None) -> None:
        whole(self, closure)
        if next(updates) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(torch.optim.AdamW, "step", update)
    with pytest.raises(KeyboardInterrupt):
        train(engine_of(model), persona(), tmp_path / "run", max_steps=9, save_steps=9, save=saved.append)
    assert saved == []
