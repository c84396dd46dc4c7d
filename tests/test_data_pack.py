from __future__ import annotations

import random

import numpy as np
import pytest

from swiftkit.data import Document, Origin, collate, num_steps, pack, windows_of_run, windows_of_step
from tests.cases.toy import expected, render


def first_fit_decreasing(lengths: list[int], capacity: int) -> list[list[int]]:
    windows: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        for window in windows:
            if sum(lengths[other] for other in window) + lengths[index] <= capacity:
                window.append(index)
                break
        else:
            windows.append([index])
    return windows


def document(length: int, *, first: int = 10) -> Document:
    return Document(np.arange(first, first + length, dtype=np.int32), np.ones(length, bool), Origin("f", 1))


@pytest.mark.compat
def test_pack_equals_the_plain_algorithm(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(60):
        capacity = draw.choice([1, 2, 3, 7, 8, 31, 32, 33, 100, 1000])
        lengths = [draw.randint(1, capacity) for _ in range(draw.randint(0, 120))]
        windows = pack(lengths, capacity)
        assert windows == first_fit_decreasing(lengths, capacity)
        assert sorted(index for window in windows for index in window) == list(range(len(lengths)))
        assert all(sum(lengths[index] for index in window) <= capacity for window in windows)


@pytest.mark.compat
def test_packed_positions_and_targets() -> None:
    known = expected("16-packing")
    documents = render("16-packing.jsonl")
    assert [len(document) for document in documents] == known["doc_lengths_with_eos"]
    for pad_to in (None, known["capacity"]):
        batch = collate([documents], pad_id=0, pad_to=pad_to)
        size = batch.tokens
        assert size == sum(known["doc_lengths_with_eos"]) and len(batch.labels) == (pad_to or size)
        assert batch.position_ids[:size].tolist() == known["position_ids_start"]
        assert batch.trained_tokens == known["targets_total"] == sum(d.targets for d in documents)
        # Label t is what follows position t, so a token is a target where the label before it is its id.
        boundary = known["boundary_position_not_a_target"]
        assert batch.labels[boundary - 1] == -100
        others = [t for t in range(1, size) if t != boundary]
        assert (batch.labels[np.array(others) - 1] == batch.input_ids[others]).all()
        assert (batch.labels[size - 1 :] == -100).all()
        assert batch.cu_seqlens.tolist() == [0, 10, 21] + [32] * (pad_to is not None)
        assert batch.position_ids[size:].tolist() == list(range(len(batch.labels) - size))


def test_the_first_token_of_a_document_is_never_a_target() -> None:
    batch = collate([[document(3)], [document(1), document(2, first=50)]], pad_id=0)
    assert batch.labels.tolist() == [11, 12, -100, -100, 51, -100]
    assert batch.position_ids.tolist() == [0, 1, 2, 0, 0, 1]
    assert batch.cu_seqlens.tolist() == [0, 3, 4, 6] and batch.cu_seqlens.dtype == np.int32
    assert batch.input_ids.dtype == batch.labels.dtype == batch.position_ids.dtype == np.int64
    assert (batch.trained_tokens, batch.tokens) == (3, 6)


def test_a_full_row_gets_no_padding_document() -> None:
    batch = collate([[document(4)]], pad_id=0, pad_to=4)
    assert batch.cu_seqlens.tolist() == [0, 4]
    with pytest.raises(ValueError, match="pad_to=3"):
        collate([[document(4)]], pad_id=0, pad_to=3)


def test_padding_is_many_short_documents() -> None:
    """One long document of padding would cost attention the square of its length."""
    batch = collate([[document(4)]], pad_id=0, pad_to=300)
    assert batch.cu_seqlens.tolist() == [0, 4, 132, 260, 300]
    assert batch.position_ids.max() == 127 and batch.position_ids[4:132].tolist() == list(range(128))
    assert batch.tokens == 4 and batch.trained_tokens == 3 and (batch.labels[3:] == -100).all()
    assert np.diff(collate([[document(4)]], pad_id=0, pad_to=260).cu_seqlens).tolist() == [4, 128, 128]


def stream(num_windows: int, windows_per_step: int, *, seed: int, total: int) -> list[int]:
    steps = -(-total // windows_per_step)
    taken = [
        windows_of_step(num_windows, windows_per_step, seed=seed, step=step, limit=total)
        for step in range(steps)
    ]
    assert all(len(windows) == windows_per_step for windows in taken[:-1])
    return [window for windows in taken for window in windows]


def test_every_epoch_takes_each_window_once_whatever_the_step(seed: int) -> None:
    for num_windows in (1, 5, 12, 37):
        total = windows_of_run(num_windows, 3)
        whole = stream(num_windows, 1, seed=seed, total=total)
        for epoch in range(3):
            assert sorted(whole[epoch * num_windows : (epoch + 1) * num_windows]) == list(range(num_windows))
        for windows_per_step in (2, 4, 7, 50):
            assert stream(num_windows, windows_per_step, seed=seed, total=total) == whole


def test_order_depends_on_seed_step_and_epoch_alone(seed: int) -> None:
    later = windows_of_step(40, 8, seed=seed, step=23)
    for step in range(30):
        windows_of_step(40, 8, seed=seed + step, step=step)
    assert windows_of_step(40, 8, seed=seed, step=23) == later
    epochs = {tuple(windows_of_step(40, 40, seed=seed, step=step)) for step in range(3)}
    assert len(epochs) == 3
    assert windows_of_step(40, 40, seed=seed + 1, step=0) != windows_of_step(40, 40, seed=seed, step=0)


def test_order_is_the_same_in_every_release() -> None:
    assert windows_of_step(8, 8, seed=42, step=0) == [4, 1, 3, 6, 0, 7, 2, 5]


@pytest.mark.parametrize(
    ("num_windows", "per_step", "epochs", "steps"),
    [(10, 2, 3.0, 15), (10, 4, 1.0, 3), (7, 8, 1.0, 1), (7, 8, 6.0, 6), (10, 2, 0.5, 3), (3, 2, 0.01, 1)],
)
def test_steps_are_counted_before_training(
    num_windows: int, per_step: int, epochs: float, steps: int
) -> None:
    assert num_steps(num_windows, per_step, epochs) == steps
    total = windows_of_run(num_windows, epochs)
    assert windows_of_step(num_windows, per_step, seed=0, step=steps - 1, limit=total)
    assert not windows_of_step(num_windows, per_step, seed=0, step=steps, limit=total)
