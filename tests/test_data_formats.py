"""Every kind of source: its rows, its places, and what is said when it is damaged."""

from __future__ import annotations

import codecs
import csv
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from swiftkit.data import Row, RowError, read
from swiftkit.data import lines as lines_of_text
from swiftkit.errors import UserError
from tests.cases.toy import case, expected


def write(folder: Path, name: str, content: bytes | str) -> str:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def values(source: str, **knobs: Any) -> list[dict[str, Any]]:
    return [row.value for row in read(source, **knobs)]


def places(rows: list[Row]) -> list[int]:
    return [row.origin.line for row in rows]


def test_case_04_bad_lines_are_skipped_and_counted() -> None:
    known = expected("04-malformed-lines")
    bad: list[RowError] = []
    rows = list(read(case("04-malformed-lines.jsonl"), on_bad=bad.append))
    assert places(rows) == known["good_lines"]
    assert [error.origin.line for error in bad] == known["bad_lines"]
    assert (len(rows), len(bad)) == (known["skip_bad"]["rows"], known["skip_bad"]["skipped"])


@pytest.mark.parametrize("codec", ["utf-16-le", "utf-16-be"])
def test_utf16_by_its_mark(tmp_path: Path, codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines_of_text, "CHUNK", 7)  # pairs and code units fall apart at its borders
    mark = codecs.BOM_UTF16_LE if codec == "utf-16-le" else codecs.BOM_UTF16_BE
    text = '{"a": "漢🌊\u2028"}\r\n\r\n{"a": "b\ufeff"}\n'
    source = write(tmp_path, "rows.jsonl", mark + text.encode(codec))
    assert values(source) == [{"a": "漢🌊\u2028"}, {"a": "b\ufeff"}]
    assert places(list(read(source))) == [1, 3]
    joined = write(tmp_path, "joined.jsonl", (mark + text.encode(codec)) * 2)
    assert values(joined) == values(source) * 2
    cut = write(tmp_path, "cut.jsonl", mark + text.encode(codec)[:-3])
    with pytest.raises(UserError, match=r"cut\.jsonl:3: "):
        values(cut)
    lone = write(tmp_path, "lone.jsonl", mark + '{"a": "\ud83c"}\n{"a": 1}'.encode(codec, "surrogatepass"))
    bad: list[RowError] = []
    assert values(lone, on_bad=bad.append) == [{"a": 1}]
    assert [error.origin.line for error in bad] == [1]


def test_utf16_without_its_mark_is_told(tmp_path: Path) -> None:
    source = write(tmp_path, "rows.jsonl", '{"a": 1}\n'.encode("utf-16-le"))
    with pytest.raises(UserError, match=r"rows\.jsonl:1: .*UTF-16 without its mark"):
        values(source)


def test_a_json_file_is_an_array_or_lines(tmp_path: Path) -> None:
    rows = [{"a": 5}, {"a": 5.0}, {"a": None, "b": {"c": [1, "1", True]}}]
    pretty = write(tmp_path, "pretty.json", "\ufeff\n" + json.dumps(rows, indent=2) + "\n\n")
    tight = write(tmp_path, "tight.json", json.dumps(rows))
    lines = write(tmp_path, "lines.json", "\n".join(map(json.dumps, rows)))
    for source in (pretty, tight, lines):
        assert json.dumps(values(source)) == json.dumps(rows)
    assert places(list(read(pretty))) == [3, 6, 9]
    assert values(write(tmp_path, "none.json", " [ ] ")) == values(write(tmp_path, "void.json", "\n")) == []
    mixed: list[RowError] = []
    assert values(write(tmp_path, "mixed.json", '[{"a": 1},\n2,\n{"a": 3}]'), on_bad=mixed.append) == [
        {"a": 1},
        {"a": 3},
    ]
    assert [str(error).partition("mixed.json:")[2][:2] for error in mixed] == ["2:"]


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('[{"a": 1},\n{"a": 2', "2: not valid JSON"),
        ('[{"a": 1}\n{"a": 2}]', "2: a comma stands"),
        ('[{"a": 1},\n]', "2: a comma stands"),
        ('[{"a": 1},\n\n,{"a": 2}]', "3: not valid JSON"),
        ('[{"a": NaN}]', "1: not valid JSON in this object of the array: NaN"),
        ('[{"a": 1}]\n[{"a": 2}]', "2: more follows the array"),
        ("[", "1: not valid JSON"),
    ],
)
def test_an_array_that_is_damaged_stops_even_where_bad_rows_are_skipped(
    tmp_path: Path, text: str, place: str
) -> None:
    source = write(tmp_path, "rows.json", text)
    with pytest.raises(UserError, match=rf"rows\.json:{place}") as stop:
        values(source, on_bad=lambda error: None)
    assert not isinstance(stop.value, RowError)


def test_csv_fields_stay_text(tmp_path: Path) -> None:
    text = 'question,answer,system\r\n007,"a ""b"",\nc",\r\n\r\ntrue,1e5,x\r\n'
    source = write(tmp_path, "rows.csv", "\ufeff" + text)
    assert values(source) == [
        {"question": "007", "answer": 'a "b",\nc', "system": None},
        {"question": "true", "answer": "1e5", "system": "x"},
    ]
    assert places(list(read(source))) == [2, 5]
    tabs = write(tmp_path, "rows.tsv", "question\tanswer\na,b\tc\n")
    assert values(tabs) == [{"question": "a,b", "answer": "c"}]
    wide = "x" * 200_000  # beyond the csv module's own limit
    assert values(write(tmp_path, "wide.csv", f"text\n{wide}\n")) == [{"text": wide}]


@pytest.mark.parametrize(
    ("content", "rule", "fatal"),
    [
        (b"a,b\n1,2\n3\n", r"3: 1 fields, where the first line names 2 columns", False),
        (b'a,b\n1,"2\n3,4\n', r"2: the row that begins here is not sound csv: unexpected end", True),
        (b'a,b\n1,"2"3\n', r"2: the row that begins here is not sound csv", True),
        (b"a,a\n1,2\n", r"1: the first line names the columns, and has 'a' twice", True),
        (b"a,\n1,2\n", r"1: .* a column without a name", True),
        (b"a,b\n1,\xe9\n", r"2: byte 3 is not UTF-8", True),
    ],
)
def test_damaged_csv(tmp_path: Path, content: bytes, rule: str, fatal: bool) -> None:
    source = write(tmp_path, "rows.csv", content)
    with pytest.raises(UserError, match=rf"rows\.csv:{rule}") as stop:
        values(source)
    assert isinstance(stop.value, RowError) != fatal


def test_parquet_keeps_its_types(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    rows = [{"n": 1, "x": [1.5, None], "s": {"a": "b"}}, {"n": None, "x": [], "s": {"a": None}}]
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows * 1000), path)
    found = list(read(str(path)))
    assert [row.value for row in found] == rows * 1000
    assert str(found[1999].origin).endswith("rows.parquet:row 2000")
    assert len(list(read(f"{path}#1500"))) == 1500
    for damaged in (path.read_bytes()[:-20], b"", b"PAR1PAR1"):
        with pytest.raises(UserError, match=r"bad\.parquet:row 1: the file is no sound parquet"):
            values(write(tmp_path, "bad.parquet", damaged))


def test_parquet_without_its_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"pip install 'swiftkit\[parquet\]'"):
        values(write(tmp_path, "rows.parquet", b""))


def test_a_text_file_comes_in_stretches(tmp_path: Path) -> None:
    lines = [f"line {number} é漢🌊\n" for number in range(20_000)]
    source = write(tmp_path, "book.txt", "\ufeff" + "".join(lines).replace("\n", "\r\n"))
    rows = list(read(source))
    assert len(rows) > 3 and all(row.stretch for row in rows)
    assert "".join(row.value["text"] for row in rows) == "".join(lines)
    for row in rows:
        assert row.value["text"].startswith(lines[row.origin.line - 1])
    long = "word " * 60_000
    rows = list(read(write(tmp_path, "long.txt", long)))
    assert len(rows) > 1 and "".join(row.value["text"] for row in rows) == long
    bad: list[RowError] = []
    rows = list(read(write(tmp_path, "bad.txt", b"one\n\xff\nthree"), on_bad=bad.append))
    assert [row.value["text"] for row in rows] == ["one\nthree"] and bad[0].origin.line == 2


def test_a_folder_is_all_its_files_in_order(tmp_path: Path) -> None:
    write(tmp_path, "b.jsonl", '{"n": 3}\n')
    write(tmp_path, "a.csv", "n\n1\n2\n")
    write(tmp_path, "more/c.json", '[{"n": 4}]')
    write(tmp_path, "README.md", "words")
    write(tmp_path, ".cache/x.jsonl", "broken")
    for name in (str(tmp_path), f"{tmp_path}/"):
        rows = list(read(name))
        assert [row.value["n"] for row in rows] == ["1", "2", 3, 4]
        assert [str(row.origin) for row in rows] == [
            f"{tmp_path}/{place}" for place in ("a.csv:2", "a.csv:3", "b.jsonl:1", "more/c.json:1")
        ]
    assert len(list(read(f"{tmp_path}#3"))) == 3


def test_a_hubs_data_set_through_the_datasets_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("datasets")
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    write(tmp_path, "own/train.csv", "question,answer\na,b\nc,d\n")
    write(tmp_path, "own/test.csv", "question,answer\ne,f\n")
    name = f"hf::{tmp_path / 'own'}"
    wanted = [{"question": "a", "answer": "b"}, {"question": "c", "answer": "d"}]
    for streaming in (False, True):
        rows = list(read(name, streaming=streaming))
        assert [row.value for row in rows] == wanted and all(row.columnar for row in rows)
        assert str(rows[1].origin) == f"{name}:row 2"
        assert values(f"{name}#1", streaming=streaming) == wanted[:1]
        assert values(f"{name}::test", streaming=streaming) == [{"question": "e", "answer": "f"}]
    with pytest.raises(UserError, match=r"cannot be loaded: .*validation.*hf::ID:CONFIG:SPLIT"):
        values(f"{name}::validation")
    with pytest.raises(UserError, match=r"hf::nowhere: |cannot be loaded"):
        values(f"hf::{tmp_path / 'nowhere'}")


@pytest.mark.parametrize(("hub", "library"), [("hf", "datasets"), ("ms", "modelscope")])
def test_hubs_without_their_library(hub: str, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(UserError, match=rf"{hub}::a/b needs .*pip install 'swiftkit\[{library}\]'"):
        values(f"{hub}::a/b")
    with pytest.raises(UserError, match=r"stand an id, and perhaps :config and :split"):
        values(f"{hub}::a:b:c:d")


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path, "rows.jsonl", "{}")

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)  # root may read everything
    with pytest.raises(UserError, match=r"rows\.jsonl cannot be read: Permission denied"):
        values(source)


def test_rows_survive_every_kind_of_file(tmp_path: Path) -> None:
    """The same texts, written by each format's own writer, come back the same."""
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    texts = ['a,"b"\n\t', "漢🌊\u2028\u0085", " padded ", "\\n {} []", "\ufeffx"]
    rows = [{"question": text, "answer": text[::-1]} for text in texts]
    write(tmp_path, "rows.json", json.dumps(rows, ensure_ascii=False))
    write(tmp_path, "rows.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\r\n" for row in rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    for suffix, dialect in (("csv", "excel"), ("tsv", "excel-tab")):
        with (tmp_path / f"rows.{suffix}").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, ["question", "answer"], dialect=dialect)
            writer.writeheader()
            writer.writerows(rows)
    for suffix in ("json", "jsonl", "parquet", "csv", "tsv"):
        assert values(str(tmp_path / f"rows.{suffix}")) == rows, suffix
