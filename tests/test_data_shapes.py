"""Rows in other forms: columns by other names, rows for other methods, lists as text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from swiftkit.data import Completion, Conversation, PlainText, Row, prepare, to_example
from swiftkit.data.document import Origin
from swiftkit.data.shapes import column_names
from swiftkit.errors import UserError
from tests.cases.toy import tokenizer

HERE = Origin("rows.jsonl", 7)
ASKED = [("user", "2+2?"), ("assistant", "4")]


def talk(value: dict[str, Any], columns: dict[str, str] | None = None) -> list[tuple[str, str]]:
    found = to_example(Row(value, HERE), column_names(columns or {}))
    assert isinstance(found, Conversation)
    return [(message["role"], message["content"]) for message in found.messages]


@pytest.mark.parametrize(
    ("columns", "value", "turns"),
    [
        ({"question": "q", "answer": "a"}, {"q": "2+2?", "a": "4"}, ASKED),
        ({"q": "question", "a": "answer"}, {"q": "2+2?", "a": "4"}, ASKED),  # as ms-swift writes it
        ({"question": "q"}, {"q": "2+2?", "answer": "4"}, ASKED),
        ({"question": "q"}, {"question": "old", "q": "2+2?", "answer": "4"}, ASKED),
        ({"question": "q"}, {"question": "2+2?", "answer": "4"}, ASKED),  # a row without that column
        ({"query": "q"}, {"instruction": "x", "output": "y", "q": "2+2?", "response": "4"}, ASKED),
        (
            {"messages": "talk"},
            {"talk": [{"role": r, "content": c} for r, c in ASKED], "text": "x"},
            ASKED,
        ),
        ({"question": "answer", "answer": "question"}, {"answer": "2+2?", "question": "4"}, ASKED),
    ],
)
def test_columns_by_other_names(
    columns: dict[str, str], value: dict[str, Any], turns: list[tuple[str, str]]
) -> None:
    assert talk(value, columns) == turns


def test_prompt_and_text_by_other_names() -> None:
    names = column_names({"prompt": "my_q", "completion": "my_a"})
    found = to_example(Row({"my_q": "a", "my_a": "b"}, HERE), names)
    assert found == Completion(prompt="a", completion="b", origin=HERE)
    names = column_names({"text": "body"})
    assert to_example(Row({"body": "a"}, HERE), names) == PlainText(text="a", origin=HERE)


@pytest.mark.parametrize(
    ("columns", "rule"),
    [
        ({"frage": "antwort"}, "neither 'frage' nor 'antwort' is a column that is read; those are answer, "),
        ({"question": "q", "query": "q"}, "'q' for 'query' is named twice"),
        ({"question": "q", "p": "question"}, "'p' for 'question' is named twice"),
    ],
)
def test_columns_that_say_nothing(columns: dict[str, str], rule: str) -> None:
    with pytest.raises(UserError, match=f"^--columns: {rule}"):
        column_names(columns)


TURNS = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


@pytest.mark.parametrize(
    ("value", "mend"),
    [
        ({"chosen": TURNS, "rejected": TURNS}, """--columns '{"messages": "chosen"}'"""),
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, """--columns '{"completion": "chosen"}'"""),
        ({"messages": TURNS, "rejected_response": "b"}, "take 'rejected_response' out"),
        ({"messages": TURNS, "rejected_messages": TURNS}, "take 'rejected_messages' out"),
        ({"query": "q", "response": "a", "rejected_response": "b"}, "take 'rejected_response' out"),
    ],
)
def test_preference_rows_are_known_and_refused(value: dict[str, Any], mend: str) -> None:
    with pytest.raises(UserError, match=r"^rows\.jsonl:7: a preference row \(.*dpo and reward") as refusal:
        to_example(Row(value, HERE))
    assert str(refusal.value).endswith(mend)
    for key in ("rejected", "rejected_response", "rejected_messages"):
        if "messages" in value and key in value:
            assert talk({**value, key: None}) == [("user", "q"), ("assistant", "a")]


def test_the_mend_for_preference_rows_works() -> None:
    chosen = {"chosen": TURNS, "rejected": TURNS}
    assert talk(chosen, {"messages": "chosen"}) == [("user", "q"), ("assistant", "a")]
    names = column_names({"completion": "chosen"})
    found = to_example(Row({"prompt": "q", "chosen": "a", "rejected": "b"}, HERE), names)
    assert found == Completion(prompt="q", completion="a", origin=HERE)


def test_lists_may_be_json_text() -> None:
    assert talk({"messages": json.dumps(TURNS)}) == [("user", "q"), ("assistant", "a")]
    assert talk({"query": "2+2?", "response": "4", "history": '[["1+1?", "2"]]'}) == [
        ("user", "1+1?"),
        ("assistant", "2"),
        *ASKED,
    ]


def test_an_unknown_shape_says_how_to_name_columns() -> None:
    with pytest.raises(UserError, match=r"keys 'q', 'a'; known are: messages; .*--columns") as refusal:
        to_example(Row({"q": "2+2?", "a": "4"}, HERE))
    assert "\n" not in str(refusal.value)


def test_columns_reach_the_run(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("my_q,my_a\na,b\n")
    found = prepare(
        [str(path)],
        tokenizer=tokenizer(),
        max_length="auto",
        packing=True,
        truncation_strategy="drop",
        system=None,
        columns={"prompt": "my_q", "completion": "my_a"},
    )
    assert tokenizer().decode(found.documents[0].ids) == "ab</s>"
