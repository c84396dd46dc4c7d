from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swiftkit.data import Document, Prepared, num_steps, prepare
from swiftkit.data.choose import TruncationStrategy, fit
from swiftkit.errors import UserError
from tests.cases.toy import case, expected, template, tokenizer

STRATEGIES: tuple[TruncationStrategy, ...] = ("drop", "left", "right")
KNOBS: dict[str, Any] = {
    "max_length": "auto",
    "packing": True,
    "truncation_strategy": "drop",
    "system": None,
}


def prepared(*sources: str, tok: str = "plain", **knobs: Any) -> Prepared:
    return prepare(sources, tokenizer=tokenizer(tok), **{**KNOBS, **knobs})


def rows(folder: Path, *values: dict, name: str = "rows.jsonl") -> str:
    path = folder / name
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return str(path)


def assert_all_rows_are_counted(found: Prepared) -> None:
    report = found.report
    assert report.rows_read == report.rows_kept + report.rows_held_out + report.rows_dropped
    assert report.rows_kept == len(found.documents)
    assert sorted(index for window in found.windows for index in window) == list(range(len(found.documents)))
    assert all(sum(map(len, found.window(w))) <= found.max_length for w in range(len(found.windows)))
    assert report.tokens == sum(map(len, found.documents))
    assert report.trained_tokens == sum(document.targets for document in found.documents)
    assert report.windows == len(found.windows)
    json.dumps(report.to_dict())


@pytest.mark.compat
def test_the_shipped_persona_is_ready_to_train() -> None:
    found = prepared("swiftkit::persona", chat_template=template("chatml"))
    assert_all_rows_are_counted(found)
    assert found.report.rows_kept == 18 and found.max_length == max(map(len, found.documents))
    assert [prompt[-1]["content"] for prompt in found.prompts] == [
        "Who are you?",
        "What is your name?",
        "Who made you?",
    ]
    assert num_steps(len(found.windows), 4, 6.0) == -(-6 * len(found.windows) // 4)
    assert "18 read, 18 kept" in found.report.lines()[0]


@pytest.mark.compat
def test_case_14_rows_without_a_target_are_dropped_and_counted() -> None:
    known = expected("14-all-masked")
    found = prepared(case("14-all-masked.jsonl"), max_length=known["max_length"], truncation_strategy="right")
    assert_all_rows_are_counted(found)
    assert [document.origin.line for document in found.documents] == known["kept_lines"]
    assert [document.targets for document in found.documents] == [
        count for count in known["supervised_after_cut"] if count
    ]
    (reason,) = found.report.dropped
    assert reason == "no trained token left after the cut to 24 tokens"
    assert [origin.rsplit(":")[-1] for origin in found.report.dropped[reason].first] == ["2", "3"]
    with pytest.raises(UserError, match=r"no row has a trainable token.*longest row has 47 tokens"):
        prepared(case("14-all-masked-only.jsonl"), max_length=24, truncation_strategy="right")


def test_long_rows_are_dropped_or_cut(tmp_path: Path) -> None:
    source = rows(
        tmp_path, {"text": "short"}, {"text": "0123456789"}, {"prompt": "0123456789", "completion": "x"}
    )
    toy = tokenizer("bos")
    drop = prepared(source, tok="bos", max_length=8)
    assert [toy.decode(document.ids) for document in drop.documents] == ["<s>short</s>"]
    assert drop.report.to_dict()["dropped"] == {
        "longer than 8 tokens": {"rows": 2, "first": [f"{source}:2", f"{source}:3"]}
    }
    right = prepared(source, tok="bos", max_length=8, truncation_strategy="right")
    assert [toy.decode(document.ids) for document in right.documents] == ["<s>short</s>", "<s>0123456"]
    left = prepared(source, tok="bos", max_length=8, truncation_strategy="left")
    assert [toy.decode(document.ids) for document in left.documents] == [
        "<s>short</s>",
        "<s>456789</s>",
        "<s>56789x</s>",
    ]
    assert left.documents[2].targets == 2
    for found in (drop, right, left):
        assert_all_rows_are_counted(found)


def test_auto_length_is_the_longest_row_up_to_4096(tmp_path: Path) -> None:
    source = rows(tmp_path, {"text": "x" * 5000}, {"text": "x" * 100})
    assert prepared(f"{source}", truncation_strategy="right").max_length == 4096
    short = rows(tmp_path, {"text": "x" * 100}, {"text": "x" * 10}, name="short.jsonl")
    assert prepared(short).max_length == 101


def test_a_conversation_without_an_answer_is_counted(tmp_path: Path) -> None:
    silent = {"messages": [{"role": "user", "content": "anyone?"}]}
    found = prepared(rows(tmp_path, silent, {"text": "words"}), chat_template="chatml")
    assert_all_rows_are_counted(found)
    assert found.report.dropped["no answer to train on"].rows == 1
    with pytest.raises(UserError, match="no row has a trainable token"):
        prepared(rows(tmp_path, silent, silent), chat_template="chatml")
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(UserError, match="there are no rows"):
        prepared(str(tmp_path / "empty.jsonl"))


def test_without_packing_a_window_is_one_document() -> None:
    found = prepared("swiftkit::persona", chat_template="chatml", packing=False)
    assert_all_rows_are_counted(found)
    assert found.windows == [[index] for index in range(18)]


def test_a_split_gives_each_row_to_one_side() -> None:
    whole = prepared("swiftkit::persona", chat_template="chatml")
    found = prepared("swiftkit::persona", chat_template="chatml", split_ratio=0.2, seed=3)
    again = prepared("swiftkit::persona", chat_template="chatml", split_ratio=0.2, seed=3)
    other = prepared("swiftkit::persona", chat_template="chatml", split_ratio=0.2, seed=4)
    assert found.evaluation is not None and other.evaluation is not None
    assert_all_rows_are_counted(found)
    assert_all_rows_are_counted(found.evaluation)
    assert len(found.evaluation.documents) == 4 == found.report.rows_held_out
    lines = [document.origin.line for part in (found, found.evaluation) for document in part.documents]
    assert sorted(lines) == [document.origin.line for document in whole.documents]
    assert again.fingerprint == found.fingerprint != whole.fingerprint
    assert other.evaluation.fingerprint != found.evaluation.fingerprint


def test_the_fingerprint_covers_ids_and_what_is_trained(tmp_path: Path) -> None:
    first = prepared(rows(tmp_path, {"prompt": "a", "completion": "bc"}))
    moved = prepared(rows(tmp_path, {"prompt": "ab", "completion": "c"}, name="other.jsonl"))
    assert np.array_equal(first.documents[0].ids, moved.documents[0].ids)
    assert first.fingerprint != moved.fingerprint
    same = prepared(rows(tmp_path, {"prompt": "a", "completion": "bc"}, name="copy.jsonl"))
    assert same.fingerprint == first.fingerprint


def test_a_bad_row_stops_with_its_line(tmp_path: Path) -> None:
    source = rows(tmp_path, {"text": "fine"}, {"q": "?", "a": "!"})
    with pytest.raises(UserError, match=rf"^{source}:2: "):
        prepared(source)


def test_several_sources_and_the_shapes_that_were_found(tmp_path: Path) -> None:
    source = rows(tmp_path, {"text": "words"}, {"prompt": "a", "completion": "b"})
    found = prepared("swiftkit::persona#2", source, chat_template="chatml", system="Be brief.")
    assert_all_rows_are_counted(found)
    assert found.report.shapes == {
        "conversations by the chat template": 2,
        "plain texts": 1,
        "prompts with completion as plain text": 1,
    }
    assert found.prompts[0][0] == {"role": "system", "content": "Be brief."}


def test_school_sums_beside_the_repository(shared_data: Path) -> None:
    found = prepared(f"{shared_data / 'gsm8k' / 'train.jsonl'}#400", chat_template="chatml")
    assert_all_rows_are_counted(found)
    assert found.report.rows_kept == 400 and found.report.packing_efficiency > 0.9


def test_all_documents_are_cut_as_each_would_be(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    values = []
    for _ in range(200):
        words = "".join(draw.choices("ab cd", k=draw.randint(1, 60)))
        values.append(draw.choice([{"text": f"t{words}"}, {"prompt": words, "completion": f"c{words[:5]}"}]))
    source = rows(tmp_path, *values)
    for tok in ("plain", "bos"):
        whole, bos_id = prepared(source, tok=tok, max_length=200).documents, tokenizer(tok).bos_token_id
        for size in (2, 9, 33):
            for strategy in STRATEGIES:
                cut = [fit(d, size, strategy, bos_id=bos_id) for d in whole]
                kept = [document for document in cut if isinstance(document, Document)]
                if not kept:
                    continue
                found = prepared(source, tok=tok, max_length=size, truncation_strategy=strategy)
                assert [d.origin for d in found.documents] == [d.origin for d in kept]
                assert all(np.array_equal(a.ids, b.ids) for a, b in zip(found.documents, kept, strict=True))
                assert all(
                    np.array_equal(a.trained, b.trained) for a, b in zip(found.documents, kept, strict=True)
                )
                assert found.documents.targets.tolist() == [document.targets for document in kept]
                reasons = Counter(reason for reason in cut if isinstance(reason, str))
                assert reasons == {why: tally.rows for why, tally in found.report.dropped.items()}


def test_documents_and_windows_are_sequences() -> None:
    found = prepared("swiftkit::persona", chat_template="chatml")
    first, *_, last = found.documents
    assert found.documents[-1].origin == last.origin and found.documents[0].origin == first.origin
    assert [document.origin for document in found.documents[1:3]] == [
        found.documents[1].origin,
        found.documents[2].origin,
    ]
    assert found.windows[-1] == found.windows[len(found.windows) - 1] == list(found.windows)[-1]
    assert found.windows[:] == list(found.windows) == found.windows
    with pytest.raises(IndexError):
        found.documents[len(found.documents)]
    lengths = [sum(map(len, found.window(index))) for index in range(len(found.windows))]
    assert found.window_lengths.tolist() == lengths
    assert found.largest_id == max(int(document.ids.max()) for document in found.documents)
