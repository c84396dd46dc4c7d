"""Any bytes in: either rows, or one error that names file and line; no trace, and no row lost unsaid."""

from __future__ import annotations

import codecs
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest

from swiftkit.data import RowError, prepare, read, to_example
from swiftkit.errors import UserError
from tests.cases.toy import tokenizer

pytest.importorskip("hypothesis")

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

FUZZ = settings(
    max_examples=int(os.environ.get("SWIFTKIT_FUZZ", "150")),
    deadline=None,
    derandomize=False,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
TOY = tokenizer()
ROWS = (
    {"text": "a"},
    {"question": "q\r\nq", "answer": "漢🌊"},
    {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": None}]},
    {"prompt": "", "completion": "x", "n": [1, 2.5, None, True]},
    [1],
    "words",
)
# Pieces that a damaged file is made of; joined at random, with raw bytes between.
PIECES = st.one_of(
    st.sampled_from(
        [
            *(json.dumps(row).encode() for row in ROWS),
            *(json.dumps(row, ensure_ascii=False).encode("utf-16-le") for row in ROWS[:2]),
            *(b"\n", b"\r\n", b"\r", b"\n\n", b"[", b"]", b",", b"{", b"}", b'"', b"\t", b";", b"\x00"),
            *(codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE),
            *(b"question,answer\n", b'a,"b\n', b"NaN", b"1e999", b"\xed\xa0\x80", b'{"text": "\\ud800"}'),
            *(b"[" * 5000, b'{"a":' * 3000, b"9" * 5000, b"PAR1"),
        ]
    ),
    st.binary(max_size=12),
)
FILES = st.lists(PIECES, max_size=12).map(b"".join)
PLACE = re.compile(r"^(?:row \d+|\d+): ")


def assert_named(error: UserError, path: str) -> None:
    said = str(error)
    assert "\n" not in said and said.startswith(f"{path}:") and PLACE.match(said.removeprefix(f"{path}:")), (
        said
    )


@FUZZ
@example(content=codecs.BOM_UTF8 * 2, suffix=".jsonl")  # empty files, joined
@example(content=codecs.BOM_UTF8 + b" " + codecs.BOM_UTF8 + b'{"text": "a"}', suffix=".jsonl")
@example(content=codecs.BOM_UTF8 * 2 + b'[{"text": "a"}]', suffix=".json")
@given(content=FILES, suffix=st.sampled_from([".jsonl", ".json", ".csv", ".tsv", ".txt", ".parquet"]))
def test_any_bytes_are_rows_or_one_error(content: bytes, suffix: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / f"rows{suffix}")
        Path(path).write_bytes(content)
        strict, first = outcome(path, None)
        bad: list[RowError] = []
        lenient, stop = outcome(path, bad.append)
        for error in [*bad, *filter(None, (first, stop))]:
            assert_named(error, path)
        if isinstance(first, RowError):
            assert bad and str(bad[0]) == str(first)
        else:
            assert not bad and str(first) == str(stop)
        if suffix == ".txt" and bad:
            return
        assert lenient[: len(strict)] == strict
        if suffix == ".jsonl" and stop is None:
            assert len(lenient) + len(bad) == lines_with_something(content)


def outcome(path: str, on_bad: Any) -> tuple[list[str], UserError | None]:
    """What is read before the end, or before an error; anything else than a UserError fails the test."""
    rows: list[str] = []
    try:
        rows.extend(f"{row.origin} {row.value}" for row in read(path, on_bad=on_bad))
    except UserError as error:
        return rows, error
    return rows, None


def lines_with_something(content: bytes) -> int:
    """Lines of a jsonl file that are not blank, counted another way."""
    if content[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        codec = "utf-16-le" if content[:2] == codecs.BOM_UTF16_LE else "utf-16-be"
        content += b"\xdf" if len(content) % 2 and codec == "utf-16-le" else b""
        text = content.decode(codec, "replace")
    else:
        text = content.decode("utf-8", "replace")
    return sum(bool(line.lstrip(" \t\r\ufeff").rstrip(" \t\r")) for line in text.split("\n"))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda part: st.lists(part, max_size=3) | st.dictionaries(st.text(max_size=4), part, max_size=3),
    max_leaves=8,
)
CALLS = st.fixed_dictionaries(
    {"function": st.fixed_dictionaries({"name": st.text(max_size=3) | JSON, "arguments": JSON})}
)
TURNS = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "tool", "tool_call", "gpt", "x"]) | JSON},
    optional={
        "content": JSON | st.text(st.characters(), max_size=6),
        "from": st.sampled_from(["human", "gpt"]),
        "value": JSON,
        "tool_calls": st.lists(CALLS, max_size=2) | JSON,
        "function_call": JSON,
        "reasoning_content": JSON,
        "train": JSON,
        "weight": JSON,
    },
)
TALKS = st.lists(TURNS, max_size=4) | JSON
ROW_VALUES = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(("messages", "conversations", "chosen", "rejected", "prompt", "completion"), TALKS),
        **{
            key: JSON | st.text(max_size=6)
            for key in ("instruction", "input", "output", "query", "response", "question", "answer", "text")
        },
        **dict.fromkeys(("system", "history", "tools", "rejected_response"), JSON),
    },
)


@FUZZ
@given(
    values=st.lists(ROW_VALUES, min_size=1, max_size=4),
    train_on=st.sampled_from(["assistant", "last", "all"]),
    thinking_history=st.sampled_from(["template", "keep"]),
    source=st.sampled_from(["hermes", "headered", "thinking", "bracketed", "chatml"]),
)
def test_any_json_is_a_document_or_one_error(
    values: list[dict[str, Any]], train_on: str, thinking_history: str, source: str
) -> None:
    from tests.chat_templates import WITH_CALLS

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        path.write_text("".join(json.dumps(value) + "\n" for value in values))
        chat_template = source
        if source in WITH_CALLS:
            chat_template = str(Path(folder) / "t.jinja")
            Path(chat_template).write_text(WITH_CALLS[source], encoding="utf-8")
        knobs: dict[str, Any] = {
            "tokenizer": TOY,
            "max_length": 64,
            "packing": True,
            "truncation_strategy": "left",
            "system": None,
            "chat_template": chat_template,
            "train_on": train_on,
            "thinking_history": thinking_history,
        }
        try:
            found = prepare([str(path)], skip_bad_rows=True, **knobs)
        except UserError as error:
            assert "no row has a trainable token" in str(error) or "there are no rows" in str(error), error
            found = None
        if found is not None:
            report = found.report
            assert report.rows_read + report.rows_skipped == len(values)
            assert report.rows_read == report.rows_kept + report.rows_dropped
            assert report.rows_kept == len(found.documents)
            assert all(document.targets for document in found.documents)
        try:
            prepare([str(path)], **knobs)
        except RowError as error:
            assert_named(error, str(path))
        except UserError:
            assert found is None
        else:
            assert found is not None and not found.report.skipped


@FUZZ
@given(values=st.lists(ROW_VALUES, min_size=1, max_size=4))
def test_any_parquet_row_is_an_example_or_one_error(values: list[dict[str, Any]]) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "rows.parquet")
        try:
            pq.write_table(pa.Table.from_pylist(values), path)
        except (pa.ArrowException, UnicodeError, OverflowError, TypeError):
            return  # columns have one type
        for row in read(path):
            try:
                to_example(row)
            except RowError as error:
                assert_named(error, path)
