"""Rows of preferences: every shape, every refusal, cuts and counts."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from swiftkit.data import Conversation, Origin, Row, prepare_pairs
from swiftkit.data.preferences import to_labelled, to_pair
from swiftkit.errors import UserError
from tests.cases import toy

ASKED = {"role": "user", "content": "2+2?"}
GOOD, BAD = ({"role": "assistant", "content": words} for words in ("4", "five"))


def row(**value: Any) -> Row:
    return Row(value, Origin("rows.jsonl", 7))


CHATS = {
    "lists": dict(chosen=[ASKED, GOOD], rejected=[ASKED, BAD]),
    "prompt list": dict(prompt=[ASKED], chosen=[GOOD], rejected=[BAD]),
    "prompt text and lists": dict(prompt="2+2?", chosen=[GOOD], rejected=[BAD]),
    "prompt repeated in lists": dict(prompt="2+2?", chosen=[ASKED, GOOD], rejected=[ASKED, BAD]),
    "prompt list and texts": dict(prompt=[ASKED], chosen="4", rejected="five"),
    "question": dict(question="2+2?", chosen="4", rejected="five"),
    "rejected response": dict(messages=[ASKED, GOOD], rejected_response="five"),
    "rejected messages": dict(messages=[ASKED, GOOD], rejected_messages=[ASKED, BAD]),
    "sharegpt": dict(
        conversations=[{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}],
        rejected_response="five",
    ),
    "query": dict(query="2+2?", response="4", rejected_response="five"),
    "null columns": dict(messages=[ASKED, GOOD], rejected_response="five", chosen=None, rejected=None),
}  # fmt: skip


@pytest.mark.parametrize("shape", CHATS)
def test_conversations(shape: str) -> None:
    found = to_pair(row(**CHATS[shape]))
    for answer, words in zip(found.answers, ("4", "five"), strict=True):
        assert isinstance(answer, Conversation)
        turns = [(message["role"], message["content"]) for message in answer.messages]
        assert turns == [("user", "2+2?"), ("assistant", words)]
        assert answer.trained("assistant") == [1]


def test_what_both_begin_with_is_not_trained() -> None:
    turns = [ASKED, GOOD, {"role": "user", "content": "sure?"}]
    for end in (BAD, GOOD):  # the second is a tie
        found = to_pair(row(chosen=[*turns, GOOD], rejected=[*turns, end]))
        assert [answer.trained("assistant") for answer in found.answers] == [[3], [3]]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("value", "parts"),
    [
        (dict(prompt="2+2? ", chosen="4", rejected="five"), [("2+2? ", "4"), ("2+2? ", "five")]),
        (dict(chosen="H: hi A: yes", rejected="H: hi A: no"), [("H: hi A: ", "yes"), ("H: hi A: ", "no")]),
        (dict(chosen="a b", rejected="a b c"), [("a ", "b"), ("a ", "b c")]),
        (dict(chosen="same", rejected="same"), [("", "same"), ("", "same")]),
    ],
)
def test_plain_texts(value: dict[str, str], parts: list[tuple[str, str]]) -> None:
    found = to_pair(row(**value)).answers
    assert [(answer.prompt, answer.completion) for answer in found] == parts  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (dict(prompt="a", chosen="", rejected="b"), "in 'chosen': the completion is empty"),
        (dict(prompt="a", chosen="b", rejected="  "), "in 'rejected': the completion is empty"),
        (dict(prompt="a", chosen="b", rejected=None), "'rejected' is null or empty"),
        (dict(prompt="a", chosen="b"), "'rejected' is missing"),
        (dict(prompt="a", rejected="b"), "'chosen' is missing"),
        (dict(prompt="a", chosen="b", rejected=[BAD]), "both texts, or both lists"),
        (dict(prompt="a", chosen=[GOOD], rejected=[]), "in 'rejected'|no answer"),
        (dict(messages=[ASKED, GOOD], rejected_response=""), "in 'rejected_response': the content"),
        (dict(chosen=[ASKED], rejected=[ASKED, BAD]), "'chosen' has no answer of the assistant"),
        (dict(prompt="a", chosen="b", rejected="c", margin="x"), "'margin' is a number"),
        (dict(prompt="a", completion="b"), "no pair of answers"),
    ],
)
def test_refusals_name_the_line(value: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=rf"^rows\.jsonl:7: .*({words})"):
        to_pair(row(**value))


def test_columns_margin_and_labels() -> None:
    columns = {"q": "prompt", "good": "chosen", "bad": "rejected"}
    found = to_pair(row(q="a ", good="b", bad="c", margin=2), columns)
    assert found.margin == 2.0
    assert to_labelled(row(prompt="a", completion="b", label=True)).good
    assert not to_labelled(row(messages=[ASKED, BAD], label=0)).good
    assert to_labelled(row(question="a", answer="b", label="true")).good
    for value, words in (
        (dict(prompt="a", completion="b"), "no 'label'"),
        (dict(prompt="a", completion="b", label="maybe"), "'label' is true or false"),
        (dict(prompt="a", chosen="b", rejected="c"), "pairs are for the other losses"),
    ):
        with pytest.raises(UserError, match=words):
            to_labelled(row(**value))


def pairs_of(folder: Path, *rows: dict[str, Any], **knobs: Any) -> Any:
    file = folder / "pairs.jsonl"
    file.write_text("".join(json.dumps(value) + "\n" for value in rows))
    return prepare_pairs([str(file)], tokenizer=toy.tokenizer(), **{"max_length": "auto", **knobs})


LONG = dict(prompt="a long question: ", chosen="yes", rejected="certainly not")


def test_cuts_by_name(tmp_path: Path) -> None:
    short = dict(prompt="hi ", chosen="yes", rejected="no")
    dropped = pairs_of(tmp_path, short, LONG, max_length=20)
    assert dropped.num_windows == 1 and dropped.report.rows_dropped == 1
    assert f"{tmp_path}/pairs.jsonl:2" in dropped.report.losses()
    left = pairs_of(tmp_path, LONG, max_length=20, truncation_strategy="left").rows[0]
    whole = pairs_of(tmp_path, LONG).rows[0]
    for cut, own in zip(left.documents, whole.documents, strict=True):
        assert cut.ids.tolist() == own.ids[11:].tolist() and len(cut) <= 20
    assert left.shared == whole.shared - 11
    right = pairs_of(tmp_path, LONG, max_length=20, truncation_strategy="right").rows[0]
    assert [len(document) for document in right.documents] == [20, 20]
    with pytest.raises(UserError, match="no row has a trainable token"):
        pairs_of(tmp_path, LONG, max_length=10, truncation_strategy="right")


def test_ties_splits_and_skipped_rows_are_counted(tmp_path: Path) -> None:
    same = dict(prompt="a ", chosen="b", rejected="b")
    rows = [LONG, same, dict(prompt="x", chosen="", rejected="y"), LONG, same]
    data = pairs_of(tmp_path, *rows, skip_bad_rows=True, split_ratio=0.25)
    ((words, tally),) = data.report.notes.items()
    assert words.startswith("chosen and rejected are the same") and tally.rows == 2
    assert data.report.rows_skipped == 1 and data.report.rows_held_out == 1
    assert data.num_windows == 3 and data.evaluation.num_windows == 1
    with pytest.raises(UserError, match=r"pairs\.jsonl:3: "):
        pairs_of(tmp_path, *rows)


def test_labelled_rows_get_a_mismatched_answer(tmp_path: Path) -> None:
    rows = [dict(prompt=f"question {n}: ", completion=f"answer {n}", label=bool(n % 2)) for n in range(3)]
    data = pairs_of(tmp_path, *rows, kind="labelled")
    tokenizer = toy.tokenizer()
    texts = [tokenizer.decode(found.documents[1].ids, skip_special_tokens=True) for found in data.rows]
    assert texts == [f"question {n}: answer {(n + 1) % 3}" for n in range(3)]
    assert [found.good for found in data.rows] == [False, True, False]


@pytest.mark.parametrize("kind", ["pairs", "labelled"])
def test_tokens_are_found_again_and_made_by_several_processes(kind: Any, tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    known = ["yes", "no", "perhaps", "3 and 4"]
    words = [" ".join(draw.choices(known, k=draw.randrange(1, 9))) for _ in range(80)]
    rows = [
        dict(prompt=f"{n}: ", chosen=a, rejected=b, margin=n / 7)
        if kind == "pairs"
        else dict(prompt=f"{n}: ", completion=a, label=a < b)
        for n, (a, b) in enumerate(zip(words[::2], words[1::2], strict=True))
    ]
    given: dict[str, Any] = dict(kind=kind, split_ratio=0.2, max_length=40)
    plain = pairs_of(tmp_path, *rows, **given)
    assert plain.report.rows_dropped and plain.report.rows_kept > 10
    first, again, several = (
        pairs_of(tmp_path, *rows, **given, cache=tmp_path / name, num_proc=processes)
        for name, processes in (("cache", 1), ("cache", 1), ("other", 2))
    )
    assert "written for the next start" in first.report.cache and "from cache" in again.report.cache
    for found in (first, again, several):
        assert found.report == plain.report and found.prompts == plain.prompts
        for data, wanted in ((found, plain), (found.evaluation, plain.evaluation)):
            assert data.fingerprint == wanted.fingerprint
            assert [row.shared for row in data.rows] == [row.shared for row in wanted.rows]
    (entry,) = (tmp_path / "cache").glob("tokens-*")
    other = pairs_of(tmp_path, *rows, **{**given, "max_length": 30}, cache=tmp_path / "cache")
    assert "from cache" in other.report.cache and list((tmp_path / "cache").glob("tokens-*")) == [entry]


def test_rows_are_counted_by_source(tmp_path: Path) -> None:
    short = dict(prompt="hi ", chosen="yes", rejected="no")
    for name, rows in (("a", [short, LONG, short]), ("b", [LONG, short])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl") + "#1"]
    data = prepare_pairs(sources, tokenizer=toy.tokenizer(), max_length=20)
    found = [(counts.read, counts.kept, counts.dropped) for counts in data.report.counts]
    assert found == [(3, 2, 1), (1, 0, 1)]
    assert [row.documents[0].origin.line for row in data.rows] == [1, 3]


def test_a_text_file_has_no_pairs(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("Once upon a time.\n")
    with pytest.raises(UserError, match="no pair of answers"):
        prepare_pairs([str(tmp_path / "book.txt")], tokenizer=toy.tokenizer(), max_length="auto")
