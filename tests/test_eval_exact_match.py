"""What counts as the same answer."""

from __future__ import annotations

import json
import math
import re
from decimal import Decimal
from pathlib import Path

import pytest

from swiftkit.data import Renderer, read, to_example
from swiftkit.methods.exact_match import (
    as_number,
    extract,
    final_number,
    question_of,
    rule_of,
    wilson,
)
from tests.cases import toy


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so 2 + 2 = 4\n#### 4", "4"),
        ("#### 1,234", "1234"),
        ("####1,234,567.50", "1234567.5"),
        ("#### 18.", "18"),
        ("#### 18.00", "18"),
        ("#### 007", "7"),
        ("#### -5", "-5"),
        ("#### \N{MINUS SIGN}5", "-5"),
        ("#### +5", "5"),
        ("#### -0", "0"),
        ("#### $1,234.5", "1234.5"),
        ("#### -$5", "-5"),
        ("#### $-5", "-5"),
        ("#### € 20", "20"),
        ("#### 50%", "50"),
        ("#### 18 dollars", "18"),
        ("#### 3 hours and 2 minutes", "3"),
        ("#### .5", "0.5"),
        ("####    12  \n", "12"),
        ("#### 3\n#### 4", "3"),  # the first counts, as in GSM8K's own script
        ("#### twelve\nwell, #### 12", "12"),
        ("#### 3/4", None),
        ("#### 10:30", None),
        ("#### 1.234,5", None),
        ("#### 1.2.3", None),
        ("#### 1e5", None),
        ("#### about 12", None),
        ("### 12", None),
        ("12", None),
        ("", None),
    ],
)
def test_final_numbers(text: str, number: str | None) -> None:
    assert final_number(text) == (None if number is None else Decimal(number))
    assert extract(text, "final number") == number
    assert rule_of(text, None) == ("text" if number is None else "final number")
    assert rule_of(text, "x") == "pattern"


@pytest.mark.parametrize(
    ("text", "number"),
    [("1,000 ", "1000"), ("$3.50 each", "3.5"), ("3/4", None), ("2 or 3", None), ("x", None), ("", None)],
)
def test_a_text_that_is_a_number(text: str, number: str | None) -> None:
    assert as_number(text) == (None if number is None else Decimal(number))


@pytest.mark.parametrize(
    ("pattern", "text", "found"),
    [
        (r"answer is (.+?)\.", "the answer is 7. No, the answer is  1,000.0 kg.", "1000"),
        (r"answer is (.+?)\.", "the answer is\n a  hat.", None),  # . is no line break
        (r"(?s)answer is(.+)\.", "the answer is\n a  hat.", "a hat"),
        (r"\b[A-D]\b", "A or B, so B", "B"),
        (r"\b[A-D]\b", "none", None),
        (r"x(y)?", "x", ""),
        (r"(-?[\d,.]+\d)", "from 3 to -1,200.50.", "-1200.5"),
    ],
)
def test_patterns(pattern: str, text: str, found: str | None) -> None:
    assert extract(text, "pattern", pattern) == found


def test_texts_are_compared_word_for_word() -> None:
    assert extract(" I am\n\n Lumen. ", "text") == "I am Lumen."
    assert extract("I am lumen.", "text") != extract("I am Lumen.", "text")


def test_wilson_intervals() -> None:
    # Newcombe 1998, Statistics in Medicine 17:857, table I, method 3.
    for right, n, low, high in [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611),
                                (1, 29, 0.0061, 0.1718)]:  # fmt: skip
        assert wilson(right, n) == pytest.approx((low, high), abs=5e-5)
    low, high = wilson(20, 20)
    assert high == 1.0 and low == pytest.approx(1 - wilson(0, 20)[1])
    # Its ends are where the score test has exactly the chosen width.
    p = wilson(7, 50)[1]
    assert abs(7 / 50 - p) / math.sqrt(p * (1 - p) / 50) == pytest.approx(1.959964, abs=1e-5)


def questions(tmp_path: Path, *rows: dict[str, object], **rules: object) -> list[tuple[str, str] | None]:
    """(prompt's text, target) of rows."""
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    tokenizer = toy.tokenizer("bos")
    renderer = Renderer(tokenizer, chat_template=toy.template("bos-headers"), **rules)  # type: ignore[arg-type]
    documents = renderer.documents([to_example(row) for row in read(str(file))])
    stops = {tokenizer.eos_token_id, *tokenizer.get_added_vocab().values()}
    asked = [question_of(document, tokenizer, stops) for document in documents]
    return [one and (tokenizer.decode(one.prompt), one.target) for one in asked]


def test_the_last_question_of_a_row_is_asked_as_in_a_chat(tmp_path: Path) -> None:
    tokenizer = toy.tokenizer("bos")
    tokenizer.chat_template = Path(toy.template("bos-headers")).read_text(encoding="utf-8")
    turns = [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "Two."},
        {"role": "user", "content": "Three?"},
        {"role": "assistant", "content": "Four, five."},
    ]
    found = questions(
        tmp_path,
        {"messages": turns},
        {"question": "One?", "answer": "#### 2"},
        {"prompt": "a b ", "completion": "c d"},
        {"text": "all of it"},
    )
    whole, single, completion, text = found
    assert whole == (
        tokenizer.apply_chat_template(turns[:3], tokenize=False, add_generation_prompt=True),
        "Four, five.",
    )
    assert single is not None and single[1] == "#### 2"
    assert completion is not None and completion[0].endswith("a b ") and completion[1] == "c d"
    assert text is None


def test_where_everything_is_trained_nothing_is_asked(tmp_path: Path) -> None:
    assert questions(tmp_path, {"question": "One?", "answer": "Two."}, train_on="all") == [None]


def test_every_answer_of_gsm8k_has_its_number(shared_data: Path) -> None:
    """The reference takes `#### (\\-?[0-9\\.\\,]+)`, without commas."""
    counted = 0
    for name in ("train", "test"):
        for line in (shared_data / "gsm8k" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
            answer = json.loads(line)["answer"]
            reference = re.search(r"#### (\-?[0-9\.\,]+)", answer)
            assert reference is not None
            assert final_number(answer) == Decimal(reference[1].replace(",", ""))
            counted += 1
    assert counted == 8792
