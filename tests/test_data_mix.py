"""Several sources: limits, shares and a seed, with exact counts; rows that are lost, and how many may be."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from swiftkit.config import DataKnobs, SftConfig, build
from swiftkit.data import Prepared, prepare
from swiftkit.data.mix import mixed
from swiftkit.errors import UserError
from tests.cases.toy import case, expected, template, tokenizer


def prepared(*sources: str, **knobs: Any) -> Prepared:
    settings: dict[str, Any] = {
        "max_length": "auto",
        "packing": True,
        "truncation_strategy": "drop",
        "system": None,
    }
    return prepare(sources, tokenizer=tokenizer(knobs.pop("tok", "plain")), **{**settings, **knobs})


def rows(folder: Path, name: str, count: int) -> str:
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps({"text": f"{name} {number}"}) + "\n" for number in range(count)))
    return str(path)


def assert_counts_add_up(found: Prepared) -> None:
    report = found.report
    for counts in report.counts:
        assert counts.read == counts.kept + counts.held_out + counts.dropped + counts.left_out
    totals = {
        "read": report.rows_read,
        "kept": report.rows_kept,
        "held_out": report.rows_held_out,
        "dropped": report.rows_dropped,
        "left_out": report.rows_left_out,
        "repeated": report.rows_repeated,
        "skipped": report.rows_skipped,
    }
    for name, total in totals.items():
        assert sum(getattr(counts, name) for counts in report.counts) == total, name
    assert len(found.documents) == report.rows_kept + report.rows_repeated
    assert sum(report.shapes.values()) == report.rows_read
    json.dumps(report.to_dict())


def by_file(found: Prepared) -> dict[str, Counter[int]]:
    counted: dict[str, Counter[int]] = {}
    for document in found.documents:
        counted.setdefault(Path(document.origin.file).stem, Counter())[document.origin.line] += 1
    return counted


def test_the_scarcest_source_is_taken_whole(tmp_path: Path) -> None:
    sources = rows(tmp_path, "a", 30), rows(tmp_path, "b", 100)
    found = prepared(*sources, interleave_prob=[0.5, 0.5])
    assert_counts_add_up(found)
    taken = by_file(found)
    assert (taken["a"].total(), taken["b"].total()) == (30, 30)
    assert max(taken["b"].values()) == 1 and found.report.rows_left_out == 70
    assert any(": 100 read, 30 trained, 70 not drawn" in line for line in found.report.lines())
    again = prepared(*sources, interleave_prob=[1, 1])
    other = prepared(*sources, interleave_prob=[1, 1], seed=7)
    assert again.fingerprint == found.fingerprint != other.fingerprint
    assert by_file(other)["b"] != taken["b"]


def test_the_most_plentiful_source_is_taken_whole(tmp_path: Path) -> None:
    sources = rows(tmp_path, "a", 30), rows(tmp_path, "b", 100)
    found = prepared(*sources, interleave_prob=[3, 1], stopping_strategy="all_exhausted")
    assert_counts_add_up(found)
    taken = by_file(found)
    assert (taken["a"].total(), taken["b"].total()) == (300, 100)
    assert set(taken["a"].values()) == {10} and found.report.rows_repeated == 270
    uneven = by_file(prepared(*sources, interleave_prob=[0.8, 1], stopping_strategy="all_exhausted"))
    assert sorted(Counter(uneven["a"].values()).items()) == [(2, 10), (3, 20)]


def test_any_mix_keeps_its_shares(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(200):
        counts = [draw.randint(1, 200) for _ in range(draw.randint(1, 4))]
        shares = [draw.uniform(0.01, 5) for _ in counts]
        for strategy in ("first_exhausted", "all_exhausted"):
            found = mixed(counts, shares, strategy=strategy, seed=3)
            scale = [count / share for count, share in zip(counts, shares, strict=True)]
            whole = (min if strategy == "first_exhausted" else max)(scale)
            for count, share, indices in zip(counts, shares, found, strict=True):
                assert abs(len(indices) - share * whole) <= 0.5 or len(indices) == 1
                assert set(indices) <= set(range(count)) and indices == sorted(indices)
                times = Counter(indices)
                assert max(times.values()) - min(times[index] for index in range(count)) <= 1
            pivot = scale.index(whole)
            assert found[pivot] == list(range(counts[pivot]))


def test_a_split_comes_before_the_mix(tmp_path: Path) -> None:
    sources = rows(tmp_path, "a", 30), rows(tmp_path, "b", 100)
    knobs = {"interleave_prob": [1, 1], "stopping_strategy": "all_exhausted"}
    found = prepared(*sources, split_ratio=0.2, **knobs)
    assert_counts_add_up(found)
    assert found.evaluation is not None and found.report.rows_held_out == 26
    held_out = {document.origin for document in found.evaluation.documents}
    assert not held_out & {document.origin for document in found.documents}


def test_limits_shares_and_rows_that_are_dropped(tmp_path: Path) -> None:
    long = tmp_path / "long.jsonl"
    long.write_text("".join(json.dumps({"text": "x" * n}) + "\n" for n in (5, 50, 5, 50, 5)))
    found = prepared(f"{rows(tmp_path, 'a', 30)}#10", f"{long}#4", max_length=20, interleave_prob=[2, 1])
    assert_counts_add_up(found)
    assert [(c.read, c.dropped, c.kept) for c in found.report.counts] == [(10, 0, 4), (4, 2, 2)]
    empty = rows(tmp_path, "none", 0)
    with pytest.raises(UserError, match=r"none\.jsonl: no row is left to mix"):
        prepared(rows(tmp_path, "b", 3), empty, interleave_prob=[1, 1])


def test_a_share_for_each_source() -> None:
    with pytest.raises(UserError, match=r"--interleave_prob has 1 shares for 2 data sets"):
        build(DataKnobs, {"dataset": ["a", "b"], "interleave_prob": [0.5]})
    with pytest.raises(UserError, match=r"--interleave_prob takes more than 0"):
        build(DataKnobs, {"dataset": ["a", "b"], "interleave_prob": [0.5, 0]})
    config = build(
        SftConfig,
        {
            "model": "m",
            "dataset": ["a", "b"],
            "interleave_prob": ["0.5", "1"],
            "columns": '{"prompt": "my_q"}',
        },
    )
    assert config.interleave_prob == [0.5, 1.0] and config.columns == {"prompt": "my_q"}
    for wrong in ("{", "[1]", '{"a": 1}'):
        with pytest.raises(UserError, match="--columns"):
            build(DataKnobs, {"dataset": ["a"], "columns": wrong})


def test_case_04_skipped_rows_are_in_the_report() -> None:
    known = expected("04-malformed-lines")["skip_bad"]
    source = case("04-malformed-lines.jsonl")
    found = prepared(source, chat_template="chatml", skip_bad_rows=True)
    assert_counts_add_up(found)
    assert (found.report.rows_kept, found.report.rows_skipped) == (known["rows"], known["skipped"])
    with pytest.raises(UserError, match=r"04-malformed-lines\.jsonl:4: "):
        prepared(source, chat_template="chatml")
    with pytest.raises(
        UserError, match=r"^55\.6% of the rows are lost, --max_dropped allows 55\.0%: 1 skipp"
    ):
        prepared(source, chat_template="chatml", skip_bad_rows=True, max_dropped=0.55)
    assert prepared(source, chat_template="chatml", skip_bad_rows=True, max_dropped=0.56)


def test_bad_rows_of_every_step_are_skipped(tmp_path: Path) -> None:
    good = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    path = tmp_path / "rows.jsonl"
    lines = [
        json.dumps(good),
        "{",  # no JSON
        json.dumps({"q": 1}),  # no shape
        json.dumps({"messages": [*good["messages"], *good["messages"][1:]]}),  # not for this template
        json.dumps(good),
    ]
    path.write_text("\n".join(lines))
    strict = "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    strict += "{{ raise_exception('turns') }}{% endif %}[{{ m['content'] }}]{% endfor %}"
    (tmp_path / "t.jinja").write_text(strict)
    found = prepared(str(path), chat_template=str(tmp_path / "t.jinja"), skip_bad_rows=True)
    assert_counts_add_up(found)
    assert [document.origin.line for document in found.documents] == [1, 5]
    assert [tally.first for tally in found.report.skipped.values()] == [[f"{path}:{n}"] for n in (2, 3, 4)]
    limited = prepared(f"{path}#2", chat_template=str(tmp_path / "t.jinja"), skip_bad_rows=True)
    assert [document.origin.line for document in limited.documents] == [1, 5]


def test_too_many_dropped_rows_stop_the_run(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": "x" * n}) + "\n" for n in [5] * 97 + [50] * 3))
    assert prepared(str(path), max_length=20, max_dropped=0.03).report.rows_dropped == 3
    with pytest.raises(
        UserError, match=r"^3\.0% of the rows are lost, --max_dropped allows 2\.0%: 3 dropped: "
    ):
        prepared(str(path), max_length=20, max_dropped=0.02)


@pytest.mark.parametrize("tok", ["plain", "bos"])
def test_a_text_file_is_cut_into_windows(tmp_path: Path, tok: str) -> None:
    text = "".join(f"line {number} of a book\n" for number in range(200))
    path = tmp_path / "book.txt"
    path.write_text(text)
    toy = tokenizer(tok)
    room = 63 if tok == "bos" else 64
    found = prepared(str(path), tok=tok, max_length=64)
    assert_counts_add_up(found)
    ids = [i for document in found.documents for i in document.ids.tolist() if i != toy.bos_token_id]
    assert toy.decode(ids) == text + "</s>"
    assert found.report.windows == found.report.rows_read == -(-(len(text) + 1) // room)
    assert all(len(document) == 64 for document in found.documents[:-1])
    if tok == "bos":
        assert all(document.ids[0] == 1 and not document.trained[0] for document in found.documents)
    for document in found.documents:
        own = [i for i in document.ids.tolist() if i != toy.bos_token_id]
        start = toy.decode(own).split("</s>")[0]
        line = text[: text.index(start) if text.count(start) == 1 else 0].count("\n") + 1
        assert text.count(start) != 1 or document.origin.line == line
    first = prepared(f"{path}#3", tok=tok, max_length=64)
    assert [d.ids.tolist() for d in first.documents] == [d.ids.tolist() for d in found.documents[:3]]
    assert first.report.rows_read == 3
    path.write_text(text * 3)
    assert prepared(str(path), tok=tok).max_length == 4096
    short = tmp_path / "short.txt"
    short.write_text("a few words")
    assert prepared(str(short), tok=tok).max_length == 12 + (tok == "bos")
    short.write_text("")
    with pytest.raises(UserError, match="there are no rows"):
        prepared(str(short), tok=tok)


def test_a_folder_of_rows_and_texts(tmp_path: Path) -> None:
    rows(tmp_path, "a", 3)
    (tmp_path / "b.txt").write_text("x" * 100)
    rows(tmp_path, "c", 3)
    found = prepared(str(tmp_path), max_length=20)
    assert_counts_add_up(found)
    assert found.report.shapes == {"plain texts": 6, "windows of a text file": 6}
    limited = prepared(f"{tmp_path}#5", max_length=20)
    assert limited.report.shapes == {"plain texts": 3, "windows of a text file": 2}


def test_what_was_done_is_in_the_report(tmp_path: Path) -> None:
    found = prepared(case("13-thinking-history.jsonl"), chat_template=template("thinking"), train_on="last")
    report = found.report.to_dict()
    assert report["settings"] == {"train_on": "last", "thinking_history": "template"}
    (note,) = report["notes"].items()
    assert note[0].startswith("thoughts of older answers") and note[1]["rows"] == 1
    assert any(line.startswith("note      1: thoughts of older") for line in found.report.lines())
    assert any(line.endswith("train_on last; thinking_history template") for line in found.report.lines())
