"""The larger public data sets beside the repository, through every path that applies to them."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from swiftkit.data import Prepared, prepare, read
from swiftkit.errors import UserError
from tests.cases.toy import tokenizer


def prepared(*sources: Path | str, **knobs: Any) -> Prepared:
    settings: dict[str, Any] = {
        "max_length": "auto",
        "packing": True,
        "truncation_strategy": "drop",
        "system": None,
        "chat_template": "chatml",
    }
    found = prepare([str(source) for source in sources], tokenizer=tokenizer(), **{**settings, **knobs})
    report = found.report
    assert report.rows_read == (
        report.rows_kept + report.rows_held_out + report.rows_dropped + report.rows_left_out
    )
    return found


def test_school_sums_are_the_same_from_every_kind_of_file(shared_data: Path, tmp_path: Path) -> None:
    source = shared_data / "gsm8k" / "test.jsonl"
    lines = source.read_text(encoding="utf-8").splitlines()[:500]
    rows = [json.loads(line) for line in lines]
    wanted = prepared(f"{source}#500")
    assert wanted.report.rows_kept == 500 and wanted.report.packing_efficiency > 0.9
    (tmp_path / "rows.json").write_text(json.dumps(rows, indent=1))
    (tmp_path / "wide.jsonl").write_bytes(("\r\n\r\n".join(lines)).encode("utf-16"))
    with (tmp_path / "rows.csv").open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, ["question", "answer"])
        writer.writeheader()
        writer.writerows(rows)
    made = ["rows.json", "wide.jsonl", "rows.csv"]
    pa = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    for name in [*made, "rows.parquet"]:
        assert prepared(tmp_path / name).fingerprint == wanted.fingerprint, name


def test_the_whole_of_the_school_sums(shared_data: Path) -> None:
    folder = shared_data / "gsm8k"
    for name, count in (("train.jsonl", 7473), ("test.jsonl", 1319)):
        rows = list(read(str(folder / name)))
        assert len(rows) == count and [row.origin.line for row in rows] == list(range(1, count + 1))
    mix = prepared(f"{folder / 'train.jsonl'}#300", f"{folder / 'test.jsonl'}#100", interleave_prob=[1, 1])
    assert [counts.kept for counts in mix.report.counts] == [100, 100]


def test_model_solutions_by_their_own_column_names(shared_data: Path) -> None:
    source = shared_data / "gsm8k" / "example_model_solutions.jsonl"
    with pytest.raises(UserError, match=r"solutions\.jsonl:1: no known row shape with the keys 'question'"):
        prepared(f"{source}#50")
    found = prepared(f"{source}#50", columns={"answer": "ground_truth"})
    assert found.report.rows_kept == 50


def test_seed_tasks_have_no_answer_where_one_is_looked_for(shared_data: Path) -> None:
    source = shared_data / "alpaca" / "seed_tasks.jsonl"
    assert len(list(read(str(source)))) == 175
    with pytest.raises(UserError, match=r"seed_tasks\.jsonl:1: .*'instances'"):
        prepared(source)
    with pytest.raises(UserError, match=r"there are no rows \(175 skipped: "):
        prepared(source, skip_bad_rows=True)
    names = prepared(source, columns={"text": "instruction"}, max_length=512, truncation_strategy="right")
    assert names.report.rows_kept == 175


def test_wikitext_in_windows(shared_data: Path) -> None:
    source = shared_data / "wikitext2" / "valid.txt"
    found = prepared(f"{source}#40", max_length=2048)
    assert found.report.rows_kept == 40 == found.report.windows
    text = source.read_text(encoding="utf-8")
    ids = [token for document in found.documents for token in document.ids.tolist()]
    assert text.startswith(tokenizer().decode(ids)) and len(ids) == 40 * 2048
    for document in found.documents[1:]:
        assert text.split("\n")[document.origin.line - 1]
