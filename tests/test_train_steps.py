"""How many steps a run has and which windows they take."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest

from swiftkit.config import TrainKnobs
from swiftkit.data import DataReport, Document, Origin, Prepared, windows_of_run
from swiftkit.errors import UserError
from swiftkit.train.steps import StepPlan, evaluation_batches, microbatches_of_step, plan_steps


def plan(num_windows: int, *, max_length: int = 512, device: str = "cpu", **knobs: Any) -> StepPlan:
    return plan_steps(TrainKnobs(**knobs), num_windows=num_windows, max_length=max_length, device_type=device)


@pytest.mark.parametrize(
    ("num_windows", "knobs", "steps", "whole", "micro", "windows"),
    [
        # auto: 8 windows a step, as many at once as 4,096 (CPU) or 16,384 (GPU) tokens hold
        (1000, dict(num_train_epochs=1), 125, 8, 8, 1000),
        (1001, dict(num_train_epochs=1), 126, 8, 8, 1001),
        (1000, dict(num_train_epochs=1, max_length=2048), 125, 8, 2, 1000),
        (1000, dict(num_train_epochs=1, max_length=1500), 125, 8, 2, 1000),
        (1000, dict(num_train_epochs=1, max_length=9000), 125, 8, 1, 1000),
        (1000, dict(num_train_epochs=1, max_length=4096, device="cuda"), 125, 8, 4, 1000),
        # small data: fewer windows a step, so that there are at least 50 steps where that can be
        (100, dict(num_train_epochs=1), 50, 2, 2, 100),
        (3, dict(num_train_epochs=6), 18, 1, 1, 18),
        (100, dict(num_train_epochs=4), 50, 8, 8, 400),
        # explicit sizes are obeyed, whatever the data set's size
        (10, dict(num_train_epochs=1, global_batch_size=8), 2, 8, 8, 10),
        (10, dict(num_train_epochs=1, global_batch_size=6, per_device_train_batch_size=2), 2, 6, 2, 10),
        (10, dict(num_train_epochs=1, global_batch_size=6, gradient_accumulation_steps=3), 2, 6, 2, 10),
        (64, dict(num_train_epochs=1, per_device_train_batch_size=4, gradient_accumulation_steps=4),
         4, 16, 4, 64),
        (100, dict(num_train_epochs=1, per_device_train_batch_size=3), 34, 3, 3, 100),
        (1000, dict(num_train_epochs=1, per_device_train_batch_size=3), 167, 6, 3, 1000),
        (1000, dict(num_train_epochs=1, gradient_accumulation_steps=16), 63, 16, 1, 1000),
        # max_steps in place of epochs
        (1000, dict(max_steps=7), 7, 8, 8, 56),
        (4, dict(max_steps=20, global_batch_size=3), 20, 3, 3, 60),
        (1, dict(num_train_epochs=0.01), 1, 1, 1, 1),
    ],
)  # fmt: skip
def test_table(num_windows: int, knobs: dict, steps: int, whole: int, micro: int, windows: int) -> None:
    found = plan(num_windows, **knobs)
    assert (found.steps, found.global_batch_size, found.micro_batch_size) == (steps, whole, micro)
    assert found.windows == windows
    assert found.gradient_accumulation_steps * micro == whole


def test_padding_is_fixed_only_where_layers_are_compiled() -> None:
    """Elsewhere a micro-batch grows to the next multiple of the kernels' tiles, and on a CPU not at all."""
    shapes = dict(max_length=300, num_windows=1000)
    fixed, tiled, bare = (
        plan_steps(
            TrainKnobs(per_device_train_batch_size=2), device_type=device, fixed_length=fixed, **shapes
        )
        for device, fixed in (("cuda", True), ("cuda", False), ("cpu", False))
    )
    assert (fixed.tokens, fixed.pad_to, fixed.pad_multiple) == (640, 640, None)
    assert (tiled.tokens, tiled.pad_to, tiled.pad_multiple) == (640, None, 128)
    assert (bare.tokens, bare.pad_to, bare.pad_multiple) == (600, None, None)
    for found, lengths in ((fixed, [640, 640]), (tiled, [128, 128]), (bare, [4, 4])):
        batches = list(evaluation_batches(numbered(4), found, pad_id=0))
        assert [len(batch.input_ids) for batch in batches] == lengths
        assert [batch.tokens for batch in batches] == [4, 4]


def test_short_windows_go_through_the_model_in_greater_numbers() -> None:
    """Without packing most windows are shorter than `max_length`: their real lengths count."""

    def found(lengths: list[int], **options: Any) -> StepPlan:
        knobs = TrainKnobs(num_train_epochs=1)
        return plan_steps(
            knobs, num_windows=len(lengths), max_length=4096, device_type="cuda", lengths=lengths, **options
        )

    assert found([100] * 1000).micro_batch_size == 8 and found([100] * 1000).tokens == 896
    assert found([4096] * 1000).micro_batch_size == 4
    assert found([100] * 1000, fixed_length=True).micro_batch_size == 4
    uneven = found([4096] * 4 + [2] * 996)
    assert uneven.micro_batch_size == 4, "also when the longest ones meet"
    assert found([1]).tokens == 128


def test_a_smaller_step_is_said() -> None:
    assert plan(1000).note == ""
    assert plan(20).note == "a step takes 1 instead of 8 windows, as the data set is small"


def test_a_capped_run_is_not_planned_by_its_epochs() -> None:
    """--max_steps says how long the run is: a small data set repeats, and a step keeps its size."""
    assert plan(20, max_steps=100).global_batch_size == 8
    assert plan(20, max_steps=100).note == ""
    assert plan(4, max_steps=12).global_batch_size == 4, "no window comes twice in a step"


def test_sizes_that_disagree_are_refused() -> None:
    from swiftkit.config import build

    rule = "leave one of the three on auto"
    with pytest.raises(UserError, match=rule):
        build(
            TrainKnobs,
            dict(global_batch_size=8, per_device_train_batch_size=3, gradient_accumulation_steps=2),
        )
    with pytest.raises(UserError, match=r"no multiple of .*per_device_train_batch_size 3"):
        build(TrainKnobs, dict(global_batch_size=8, per_device_train_batch_size=3))


def numbered(num_windows: int) -> Prepared:
    """Window i holds one document of the tokens i, i."""
    documents = [
        Document(np.array([i, i], np.int32), np.array([False, True]), Origin("f", i + 1))
        for i in range(num_windows)
    ]
    return Prepared(documents, [[i] for i in range(num_windows)], 2, DataReport(["f"]), "", [], 1)


def test_every_window_is_taken_once_an_epoch(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(25):
        num_windows, epochs = draw.randint(1, 30), draw.choice([1, 2, 3, 5])
        knobs = dict(num_train_epochs=epochs, seed=draw.randint(0, 99))
        if draw.random() < 0.5:
            knobs |= dict(global_batch_size=draw.choice([1, 4, 6, 12]))
        data, found = numbered(num_windows), plan(num_windows, max_length=draw.choice([2, 900]), **knobs)
        taken: Counter[int] = Counter()
        for step in range(found.steps):
            batches = microbatches_of_step(data, found, step=step, seed=int(knobs["seed"]), pad_id=0)
            assert batches, "no step is empty"
            assert all(len(b.cu_seqlens) - 1 <= found.micro_batch_size for b in batches)
            assert len(batches) <= found.gradient_accumulation_steps
            taken.update(int(token) for b in batches for token in b.input_ids[::2])
        assert taken == dict.fromkeys(range(num_windows), epochs)
        assert sum(taken.values()) == windows_of_run(num_windows, epochs) == found.windows


def test_evaluation_takes_every_window_once_in_order() -> None:
    found = plan(7, per_device_train_batch_size=3)
    batches = list(evaluation_batches(numbered(7), found, pad_id=0))
    assert [b.input_ids[::2].tolist() for b in batches] == [[0, 1, 2], [3, 4, 5], [6]]
