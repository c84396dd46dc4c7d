from __future__ import annotations

import json
from pathlib import Path

import pytest

from swiftkit.data import Completion, Conversation, PlainText, Row, read, to_example
from swiftkit.data.document import Origin
from swiftkit.errors import UserError
from tests.cases.toy import CASES, case, expected

HERE = Origin("rows.jsonl", 7)


def write(folder: Path, *lines: bytes, name: str = "rows.jsonl") -> str:
    path = folder / name
    path.write_bytes(b"\n".join(lines))
    return str(path)


def example(value: dict) -> Conversation | Completion | PlainText:
    return to_example(Row(value, HERE))


def talk(value: dict) -> list[tuple[str, str]]:
    found = example(value)
    assert isinstance(found, Conversation)
    return [(message["role"], message["content"]) for message in found.messages]


@pytest.mark.parametrize("name", ["03-bom-crlf.jsonl", "03-bom-twice.jsonl"])
def test_marks_and_line_ends_do_not_change_rows(name: str) -> None:
    plain = [row.value for row in read(case("03-plain.jsonl"))]
    rows = list(read(case(name)))
    assert [row.value for row in rows] == plain
    assert [list(row.value) for row in rows] == expected("03-bom-crlf")["row_keys"]
    assert "\ufeff" in rows[2].value["messages"][0]["content"]


def test_the_first_malformed_line_is_named() -> None:
    rows = read(case("04-malformed-lines.jsonl"))
    assert [next(rows).origin.line, next(rows).origin.line] == [1, 3]
    with pytest.raises(UserError, match=r"04-malformed-lines\.jsonl:4: not valid JSON"):
        next(rows)


def test_every_malformed_line_is_refused(tmp_path: Path) -> None:
    lines = (CASES / "04-malformed-lines.jsonl").read_bytes().split(b"\n")
    known = expected("04-malformed-lines")
    for number, line in enumerate(lines, start=1):
        source = write(tmp_path, line)
        if number in known["bad_lines"]:
            with pytest.raises(UserError, match=r"rows\.jsonl:1: "):
                list(read(source))
        else:
            assert len(list(read(source))) == (number in known["good_lines"])


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        (b'{"a": NaN}', "NaN is no JSON value"),
        (b'{"a": -Infinity}', "-Infinity is no JSON value"),
        (b'{"a": 1} {"b": 2}', "one object a line"),
        (b'[{"a": 1}]', "not an array"),
        (b"null", "not null"),
        (b"true", "not a boolean"),
        (b"{", "goes on over several lines"),
        (b'{"a": "\xe9"}', "byte 8 is not UTF-8"),
    ],
)
def test_what_is_no_row(tmp_path: Path, line: bytes, rule: str) -> None:
    with pytest.raises(UserError, match=r"rows\.jsonl:3: .*" + rule):
        list(read(write(tmp_path, b'{"a": 1}', b"", line)))


def test_only_a_newline_ends_a_row(tmp_path: Path) -> None:
    source = write(tmp_path, '{"text": "one\u2028two\x85three"}'.encode(), b'{"text": "four"}')
    assert [row.origin.line for row in read(source)] == [1, 2]


def test_a_number_behind_the_name_takes_the_first_rows(tmp_path: Path) -> None:
    source = write(tmp_path, b'{"n": 1}', b"", b'{"n": 2}', b"broken")
    assert [row.value["n"] for row in read(f"{source}#2")] == [1, 2]
    for wrong in ("0", "-1", "", "two", "1.5"):
        with pytest.raises(UserError, match="a whole number from 1"):
            read(f"{source}#{wrong}")
    hashed = write(tmp_path, b'{"n": 1}', name="a#1.jsonl")
    assert len(list(read(hashed))) == 1


def test_sources_that_are_not_there(tmp_path: Path) -> None:
    write(tmp_path, b"{}", name="train.jsonl")
    with pytest.raises(UserError, match=r"did you mean train\.jsonl\?"):
        read(str(tmp_path / "trian.jsonl"))
    with pytest.raises(UserError, match=r"'.md' are not read; give a \.jsonl, .* or \.txt file"):
        read(write(tmp_path, b"words", name="notes.md"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"is a folder without a \.jsonl, "):
        read(str(tmp_path / "empty"))
    with pytest.raises(UserError, match="s3:: is not read; give a file, hf::ID, ms::ID"):
        read("s3::someone/something")
    with pytest.raises(UserError, match="did you mean swiftkit::persona"):
        read("swiftkit::persone")


def test_the_shipped_persona_is_read_by_its_name() -> None:
    train, val = list(read("swiftkit::persona")), list(read("swiftkit::persona-val"))
    assert (len(train), len(val)) == (18, 4)
    assert str(train[0].origin) == "swiftkit::persona:1"
    for row in train + val:
        assert talk(row.value)[-1][1].endswith("Fair winds!")
    questions = {talk(row.value)[0][1] for row in train}
    assert len(questions) == 18 and not questions & {talk(row.value)[0][1] for row in val}
    assert len(list(read("swiftkit::persona#5"))) == 5


ASKED = [("user", "2+2?"), ("assistant", "4")]


@pytest.mark.parametrize(
    ("value", "turns"),
    [
        ({"instruction": "add", "input": "2+2", "output": "4"}, [("user", "add\n2+2"), ASKED[1]]),
        ({"instruction": "2+2?", "input": None, "output": "4", "text": "all of it"}, ASKED),
        (
            {"instruction": "2+2?", "output": "4", "system": "count", "history": [["1+1?", "2"]]},
            [("system", "count"), ("user", "1+1?"), ("assistant", "2"), *ASKED],
        ),
        ({"query": "2+2?", "response": "4", "history": None, "system": None}, ASKED),
        ({"query": "2+2?", "response": "4", "history": []}, ASKED),
        ({"question": "2+2?", "answer": "4"}, ASKED),
        ({"messages": None, "question": "2+2?", "answer": "4"}, ASKED),
        ({"prompt": [{"role": "user", "content": "2+2?"}], "completion": "4"}, ASKED),
        (
            {
                "conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}],
                "system": "s",
            },
            [("system", "s"), *ASKED],
        ),
    ],
)
def test_shapes_of_a_question_with_its_answer(value: dict, turns: list[tuple[str, str]]) -> None:
    assert talk(value) == turns


def test_texts_without_a_template() -> None:
    assert example({"prompt": "a", "completion": "b"}) == Completion(prompt="a", completion="b", origin=HERE)
    assert example({"text": "all"}) == PlainText(text="all", origin=HERE)


def test_answers_in_a_prompt_or_switched_off_are_context() -> None:
    turn = {"role": "assistant", "content": "x"}
    asked = {"role": "user", "content": "q"}
    in_prompt = example({"prompt": [asked, turn, asked], "completion": [turn], "system": "s"})
    switched = example({"messages": [asked, {**turn, "loss": False}, asked, {**turn, "weight": 1}]})
    assert isinstance(in_prompt, Conversation) and isinstance(switched, Conversation)
    assert in_prompt.trained("assistant") == [4]
    assert switched.trained("assistant") == [3]
    assert all(message.keys() == {"role", "content"} for message in switched.messages)


def test_null_and_empty_content() -> None:
    rows = list(read(case("05-null-content.jsonl")))
    refused = {}
    for row in rows:
        try:
            to_example(row)
        except UserError as error:
            refused[row.origin.line] = str(error)
    assert sorted(refused) == expected("05-null-content")["rejected_lines"]
    assert "content of message 1 is null" in refused[2]
    assert "content of message 2 is null" in refused[3]
    assert "empty" in refused[4]
    assert all(f"05-null-content.jsonl:{line}: " in message for line, message in refused.items())


@pytest.mark.parametrize(
    ("value", "rule"),
    [
        ({"q": "2+2?", "a": "4"}, "no known row shape with the keys 'q', 'a'"),
        ({}, "no known row shape with the keys none"),
        ({"question": "2+2?", "answer": None}, "'answer' is null"),
        ({"question": "2+2?", "answer": " "}, "is empty"),
        ({"question": 4, "answer": "4"}, "question is text or a list of text parts, not 4"),
        ({"messages": []}, "messages with role and content"),
        ({"messages": "hi"}, "the conversation is a list, not 'hi'"),
        ({"messages": "[1"}, "the conversation is not valid JSON"),
        ({"messages": ["hi"]}, "message 1 is no object"),
        ({"messages": [{"role": "usr", "content": "x"}]}, "unknown role 'usr'; did you mean user"),
        ({"messages": [{"role": "tool", "content": None}]}, "content of message 1 is null"),
        ({"messages": [{"role": "user", "content": "x"}], "tools": ["f"]}, "description of a tool is not"),
        ({"messages": [{"role": "user", "content": "x"}], "tools": {"name": "f"}}, "'tools' is a list"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, r"not text \('image'\)"),
        ({"text": None}, "'text' is null"),
        ({"text": ""}, "text is empty"),
        ({"prompt": "a", "completion": ""}, "completion is empty"),
        ({"prompt": 3, "completion": "b"}, "'prompt' is text or a list of messages"),
        ({"text": json.loads(r'"half \ud800"')}, "lone surrogate"),
        ({"query": "a", "response": "b", "history": ["x"]}, "pairs"),
    ],
)
def test_rows_that_are_refused(value: dict, rule: str) -> None:
    with pytest.raises(UserError, match=r"^rows\.jsonl:7: .*" + rule):
        example(value)
