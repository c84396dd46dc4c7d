"""Many answers through few slots: token for token what each prompt gets alone, in every family."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from swiftkit.engine import Engine
from swiftkit.generate import batch
from swiftkit.generate.batch import generate, rows_at_once
from swiftkit.generate.cache import bytes_per_token
from tests import tiny

CPU = torch.device("cpu")


def load(family: str, folder: Path, *, seed: int) -> Engine:
    tiny.make(family, folder, seed=seed % 1000)
    return Engine.load(folder, dtype=torch.float32, device=CPU)


def prompts(lengths: list[int], *, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, tiny.VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


@pytest.mark.compat
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_slots_refilled_equal_one_at_a_time(family: str, tmp_path: Path, seed: int) -> None:
    engine = load(family, tmp_path, seed=seed)
    asked = prompts([9, 1, 30, 4, 17, 2, 11], seed=seed)  # 8 tokens are the window of some families
    rooms = [12, 20, 3, 16, 1, 7, 12]  # slots come free at different steps
    alone = [
        generate(engine, [prompt], max_new_tokens=room, stop_ids=())[0].ids
        for prompt, room in zip(asked, rooms, strict=True)
    ]
    assert [len(ids) for ids in alone] == rooms
    for slots in (2, 3):
        found = generate(engine, asked, max_new_tokens=rooms, stop_ids=(), slots=slots)
        assert [answer.ids for answer in found] == alone
        assert {answer.finish_reason for answer in found} == {"length"}
    stop = alone[1][6]
    cut = [ids[: ids.index(stop)] if stop in ids else ids for ids in alone]
    found = generate(engine, asked, max_new_tokens=rooms, stop_ids=[stop], slots=2)
    assert [answer.ids for answer in found] == cut
    assert [answer.finish_reason for answer in found] == [
        "stop" if stop in ids else "length" for ids in alone
    ]


def test_a_step_reads_no_more_of_the_prompts_than_it_may(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load("llama", tmp_path, seed=seed)
    asked = prompts([20, 30, 5, 40, 8, 8], seed=seed)
    whole = generate(engine, asked, max_new_tokens=6, stop_ids=())
    read: list[int] = []
    hidden = engine.hidden
    monkeypatch.setattr(engine, "hidden", lambda batch: (read.append(len(batch.input_ids)), hidden(batch))[1])
    monkeypatch.setattr("swiftkit.generate.decode.TOKENS_AT_ONCE", {"cpu": 32})
    assert generate(engine, asked, max_new_tokens=6, stop_ids=(), slots=6) == whole
    assert max(read) == 40  # a prompt longer than that, and it alone


def test_the_window_cuts_answers_and_refuses_prompts(tmp_path: Path, seed: int) -> None:
    engine = load("qwen2", tmp_path, seed=seed)
    asked = prompts([5, 12, 15, 16, 30], seed=seed)
    free = generate(engine, asked, max_new_tokens=8, stop_ids=())
    found = generate(engine, asked, max_new_tokens=8, stop_ids=(), window=16, slots=2)
    assert [answer.finish_reason for answer in found] == ["length", *["window"] * 4]
    assert [len(answer.ids) for answer in found] == [8, 4, 1, 0, 0]
    assert all(one.ids == other.ids[: len(one.ids)] for one, other in zip(found, free, strict=True))
    assert generate(engine, [], max_new_tokens=8, stop_ids=()) == []
    (refused,) = generate(engine, asked[-1:], max_new_tokens=8, stop_ids=(), window=16)
    assert refused.ids == [] and refused.finish_reason == "window"


def test_another_end_keeps_its_last_token(tmp_path: Path, seed: int) -> None:
    engine = load("llama", tmp_path, seed=seed)
    asked = prompts([3, 7, 5], seed=seed)
    seen: set[int] = set()

    def ends(index: int, ids: list[int]) -> bool:
        seen.add(index)
        return index == 1 and len(ids) == 3

    found = generate(engine, asked, max_new_tokens=6, stop_ids=(), slots=1, ends=ends)
    assert [len(answer.ids) for answer in found] == [6, 3, 6] and seen == {0, 1, 2}
    assert [answer.finish_reason for answer in found] == ["length", "stop", "length"]


def test_steps_are_told(tmp_path: Path, seed: int) -> None:
    engine = load("llama", tmp_path, seed=seed)
    told: list[tuple[int, int]] = []
    generate(
        engine,
        prompts([3, 7, 5], seed=seed),
        max_new_tokens=4,
        stop_ids=(),
        slots=2,
        on_step=lambda ended, tokens: told.append((ended, tokens)),
    )
    assert sum(ended for ended, _ in told) == 3 and sum(tokens for _, tokens in told) == 12
    assert max(tokens for _, tokens in told) == 2


def test_rows_at_once_follow_from_memory(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load("qwen3", tmp_path, seed=seed)
    size = bytes_per_token(engine.config, torch.float32)
    assert size == 3 * 2 * 2 * 24 * 4  # layers, keys and values, heads, width, bytes
    monkeypatch.setattr(batch, "CPU_CACHE_BYTES", 100 * size)
    assert rows_at_once(engine, 20) == 5
    assert rows_at_once(engine, 1000) == 1
    assert rows_at_once(engine, 1) == batch.MOST_ROWS["cpu"]
