"""The counts: equal to what `prepare` does with the same rows; duplicates, which it does not look for."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swiftkit.data import prepare
from swiftkit.data.stats import Stats, _histogram, count
from swiftkit.data.stats_text import lines
from tests.test_data_preview import ROWS, chatty, rows_file, tokenizer


@pytest.mark.compat
@pytest.mark.parametrize("strategy", ["drop", "left", "right"])
@pytest.mark.parametrize("packing", [True, False])
def test_the_counts_are_those_of_training(tmp_path: Path, strategy: Any, packing: bool) -> None:
    sources = [rows_file(tmp_path, [*ROWS * 3, "{broken"]), "swiftkit::persona"]
    common = dict(tokenizer=chatty(), truncation_strategy=strategy, packing=packing, system=None)
    found = count(sources, max_length=120, **common)
    report = prepare(sources, max_length=120, skip_bad_rows=True, **common).report
    assert found.rows == report.rows_read
    assert {reason: tally.rows for reason, tally in found.bad.items()} == {
        reason: tally.rows for reason, tally in report.skipped.items()
    }
    assert found.lengths[100] == report.longest and found.untrained_rows == 3
    loss = found.truncation[strategy]
    assert loss.rows_dropped + found.untrained_rows == report.rows_dropped
    untrained = 3 * len(tokenizer()("<|im_start|>user\nNobody answers.<|im_end|>\n")["input_ids"])
    assert found.tokens - loss.tokens_lost - untrained == report.tokens
    assert found.trained_tokens - loss.trained_lost == report.trained_tokens
    (chosen,) = (entry for entry in found.packing if entry.max_length == 120)
    assert (chosen.rows, chosen.windows) == (report.rows_kept, report.windows)
    assert chosen.efficiency == round(report.packing_efficiency, 4)
    other = prepare(sources, max_length=512, skip_bad_rows=True, **common).report
    (same,) = (entry for entry in found.packing if entry.max_length == 512)
    assert (same.rows, same.windows) == (other.rows_kept, other.windows)


def test_auto_is_the_longest_row_that_the_model_can_read(tmp_path: Path) -> None:
    source = rows_file(tmp_path, ROWS)
    found = count([source], tokenizer=chatty())
    assert found.max_length == found.lengths[100] == max(found.lengths.values())
    assert all(loss.rows_cut == loss.rows_dropped == 0 for loss in found.truncation.values())
    (auto,) = (entry for entry in found.packing if entry.max_length == found.max_length)
    report = prepare(
        [source], tokenizer=chatty(), max_length="auto", packing=True, truncation_strategy="drop", system=None
    ).report
    assert (auto.windows, auto.efficiency) == (report.windows, round(report.packing_efficiency, 4))
    assert count([source], tokenizer=chatty(), longest=80).max_length == 80


def test_duplicates_and_repeated_prompts(tmp_path: Path) -> None:
    def asked(question: str, answer: str) -> dict[str, str]:
        return {"question": question, "answer": answer}

    rows = [
        asked("a", "1"), asked("b", "2"), asked("a", "1"), asked("a", "other"), "{broken", asked("a", "1"),
        {"messages": [{"role": "user", "content": "b"}, {"role": "assistant", "content": "2"}]},
        {"text": "plain"}, {"text": "plane"},
        {"prompt": "p", "completion": "c"}, {"prompt": "p", "completion": "d"},
    ]  # fmt: skip
    name = rows_file(tmp_path, rows)
    for tok in ("plain", "bos"):  # the start token alone is no prompt
        found = count([name], tokenizer=chatty(tok))
        assert found.duplicates.rows == 3
        assert found.duplicates.pairs == [(f"{name}:{a}", f"{name}:{b}") for a, b in ((3, 1), (6, 1), (7, 2))]
        assert found.same_prompt.rows == 2
        assert found.same_prompt.pairs == [(f"{name}:4", f"{name}:1"), (f"{name}:11", f"{name}:10")]
    text = "\n".join(lines(found))
    assert f"copies    3 rows with the tokens of an earlier row ({name}:3 = {name}:1, " in text


def test_what_a_cut_would_lose(tmp_path: Path) -> None:
    rows = [
        {
            "prompt": "p" * 30,
            "completion": "c" * 9,
        },  # 40 tokens with the end: a cut at the right leaves no label
        {"text": "t" * 29},  # 30
        {"text": "t" * 9},  # fits
    ]
    found = count([rows_file(tmp_path, rows)], tokenizer=tokenizer(), max_length=20)
    told = {name: (loss.rows_dropped, loss.rows_cut, loss.tokens_lost, loss.trained_lost)
            for name, loss in found.truncation.items()}  # fmt: skip
    # The first token of a text is no label, nor is that of a text whose beginning is cut off.
    assert told == {"drop": (2, 0, 70, 39), "left": (0, 2, 30, 10), "right": (1, 1, 50, 20)}


def test_the_whole_story_as_lines_and_json(tmp_path: Path) -> None:
    rows = [*ROWS, "{broken", {"nothing": "known"}, ROWS[0]]
    found = count([rows_file(tmp_path, rows)], tokenizer=chatty(), max_length=100)
    text = "\n".join(lines(found))
    for words in (
        "rows      8 (3 question + answer, 2 messages, 1 prompt + completion, 1 text, 1 instruction + out",
        "bad       1: not valid JSON",
        "bad       1: no known row shape with the keys 'nothing'",
        "dropped   1: no answer to train on",
        "roles     7 user, 6 assistant",
        "messages  in a conversation: 4 of 2, 1 of 1, 1 of 4",
        "cut       rows longer than 100 tokens, by --truncation_strategy",
        "windows   by --max_length (packed, --truncation_strategy drop)",
        "  <- chosen",
        "bytes a token",
    ):
        assert words in text, words
    content = json.loads(json.dumps(found.to_dict()))
    assert content["rows"] == 8 and content["truncation"]["drop"]["rows_dropped"] > 0
    assert sum(rows for *_, rows in content["histogram"]) == 8
    assert content["file_bytes"] == (tmp_path / "rows.jsonl").stat().st_size
    assert lines(count([rows_file(tmp_path, ["{"], "bad.jsonl")], tokenizer=chatty()))[:1] == ["rows      0"]


def test_text_files_count_as_windows(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("word " * 300)
    found = count([str(tmp_path / "book.txt")], tokenizer=tokenizer("bos"), max_length=128)
    assert found.shapes == {"text file": 12} and found.lengths[100] == 128 and found.roles == {}
    assert found.packing[0].max_length == 128 and "12 text file" in "\n".join(lines(found))


def test_the_histogram_holds_every_row(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for size in (1, 2, 50, 5_000):
        lengths = rng.geometric(0.01, size).astype(np.int64)
        bars = _histogram(lengths)
        assert sum(rows for *_, rows in bars) == size and len(bars) <= 13
        for low, high, rows in bars:
            assert rows == int(((lengths >= low) & (lengths <= high)).sum())
        assert all(after[0] == before[1] + 1 for before, after in pairwise(bars))


def test_a_row_leaves_numbers_only(tmp_path: Path) -> None:
    """Twice the text makes no more memory: what is kept of a row does not depend on its length."""
    from swiftkit.data.stats import _Counting

    def kept(found: Stats) -> int:
        return len(json.dumps(found.to_dict()))

    short, long = (
        count([rows_file(tmp_path, [{"text": f"{n} " * size} for n in range(40)])], tokenizer=tokenizer())
        for size in (5, 500)
    )
    assert abs(kept(long) - kept(short)) < 400
    arrays = {name for name, kind in _Counting.__annotations__.items() if "array" in str(kind)}
    assert arrays == {"fits", "lengths", "hashes", "prompts", "lines", "files"}
