"""The preview: what it shows is what training takes, in the terminal and as a page."""

from __future__ import annotations

import io
import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from swiftkit.cli import main
from swiftkit.data import RowError, collate, prepare
from swiftkit.data.preview import Preview, RowView, pieces, preview
from swiftkit.data.preview_page import preview_page
from swiftkit.data.preview_text import show
from swiftkit.errors import UserError
from tests.cases.toy import case, template, tokenizer
from tests.pages import stands_alone

ROLES = ("user", "assistant")
HOSTILE = "</script><img src=x onerror=alert(1)>"
ROWS: list[dict[str, Any]] = [
    {"question": "Why is the sky blue? 🙂", "answer": "Rayleigh.\n\tIt scatters 🙂🙂."},
    {"messages": [
        {"role": "user", "content": "One?"}, {"role": "assistant", "content": "Two."},
        {"role": "user", "content": "Three?"}, {"role": "assistant", "content": "Four, or " + "more " * 9},
    ]},
    {"prompt": "2 + 2 = ", "completion": "4 and " * 20},
    {"text": "Ein kurzer Text, mit Ümläuten. " * 4},
    {"instruction": "Say it", "input": HOSTILE, "output": HOSTILE},
    {"question": "?", "answer": "!"},
    {"messages": [{"role": "user", "content": "Nobody answers."}]},
]  # fmt: skip


def rows_file(folder: Path, rows: list[Any], name: str = "rows.jsonl") -> str:
    path = folder / name
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def chatty(tok: str = "plain") -> Any:
    found = tokenizer(tok)
    found.chat_template = Path(template("chatml")).read_text(encoding="utf-8")
    return found


def labels(view: RowView) -> tuple[list[int], list[int], list[int]]:
    """(place, id) of the labels, and all ids, of what is in a window."""
    kept = [token for token in view.tokens if token.kept]
    places = [place for place, token in enumerate(kept) if token.trained]
    return places, [kept[place].id for place in places], [token.id for token in kept]


def taken(document: Any) -> tuple[list[int], list[int], list[int]]:
    """The same of a prepared document, as the loss gets it."""
    batch = collate([[document]], pad_id=0)
    places = (np.flatnonzero(batch.labels != -100) + 1).tolist()
    return places, batch.labels[batch.labels != -100].tolist(), batch.input_ids.tolist()


@pytest.mark.compat
@pytest.mark.parametrize("tok", ["plain", "bos", "merge"])
@pytest.mark.parametrize("strategy", ["drop", "left", "right"])
@pytest.mark.parametrize(
    ("max_length", "knobs"),
    [("auto", {}), (90, {}), (40, {"train_on": "last"}), (64, {"train_on": "all", "system": "Be brief."})],
)
def test_what_is_shown_is_what_is_trained(
    tmp_path: Path, tok: str, strategy: Any, max_length: Any, knobs: dict[str, Any]
) -> None:
    source = rows_file(tmp_path, ROWS)
    common = dict(tokenizer=chatty(tok), max_length=max_length, truncation_strategy=strategy, **knobs)
    found = preview([source], rows=len(ROWS), **common)
    views = [view for view in found.views() if view.kept]
    documents = prepare([source], packing=True, **{"system": None, **common}).documents
    assert [view.origin for view in views] == [document.origin for document in documents]
    for view, document in zip(views, documents, strict=True):
        assert labels(view) == taken(document)
    lost = [view for view in found.views() if not view.kept]
    assert all(view.fate.startswith("dropped: ") and not view.used and not view.trained for view in lost)
    assert len(lost) + len(views) == len(ROWS)


@pytest.mark.parametrize("tok", ["plain", "bos", "merge"])
def test_the_words_of_the_tokens_are_the_text(tmp_path: Path, tok: str) -> None:
    found = preview([rows_file(tmp_path, ROWS)], tokenizer=chatty(tok), rows=2)
    first, _ = found.views()
    words = "".join(token.text for token in first.tokens)
    assert words.startswith("<|im_start|>user\nWhy is the sky blue? 🙂<|im_end|>\n")
    assert "".join(token.text for token in first.tokens if token.trained) == (
        "Rayleigh.\n\tIt scatters 🙂🙂.<|im_end|>"
    )
    assert [token.text for token in first.tokens if token.special].count("<|im_end|>") == 2
    assert first.shape == "question + answer" and first.origin.line == 1


def test_random_rows(tmp_path: Path, seed: int) -> None:
    def words() -> str:
        return (
            "".join(random.choices(["a", " ", "é", "🙂", "\n", "<|im_end|>", "中", "}", "\u200d"], k=9)) + "."
        )

    def row() -> dict[str, Any]:
        turns = [{"role": role, "content": words()} for _ in range(random.randrange(1, 4)) for role in ROLES]
        if random.random() < 0.3:
            turns[-1]["train"] = random.random() < 0.5
        other = [{"text": words()}, {"prompt": words(), "completion": words()}]
        return random.choice([{"messages": turns}, *other])

    source = rows_file(tmp_path, [row() for _ in range(60)])
    for tok, strategy, length in (("merge", "left", 60), ("bos", "right", 90), ("plain", "drop", 120)):
        common = dict(tokenizer=chatty(tok), max_length=length, truncation_strategy=strategy)
        views = [view for view in preview([source], rows=60, **common).views() if view.kept]
        documents = prepare([source], packing=True, system=None, **common).documents
        assert [labels(view) for view in views] == [taken(document) for document in documents]


def test_pieces_are_the_whole_text(seed: int) -> None:
    tok = tokenizer("merge")
    for _ in range(50):
        text = "".join(random.choices("ab 🙂é\n\t<|im_end|>中", k=random.randrange(1, 40)))
        offsets = tok(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        assert "".join(pieces(text, np.array(offsets, np.int64).reshape(-1, 2))) == text


@pytest.mark.parametrize("packing", [True, False])
def test_windows_are_those_of_training(tmp_path: Path, packing: bool) -> None:
    sources = [rows_file(tmp_path, [*ROWS, "{broken"]), "swiftkit::persona"]
    common = dict(
        tokenizer=chatty(), max_length=180, packing=packing, truncation_strategy="right", system=None
    )
    found = preview(sources, windows=3, **common)
    prepared = prepare(sources, skip_bad_rows=True, **common)
    assert found.more == len(prepared.windows) - 3 and found.rows == []
    for index, window in enumerate(found.windows):
        assert [labels(view) for view in window] == [taken(part) for part in prepared.window(index)]
    limited = preview(sources, windows=1, longest=120, **{**common, "max_length": "auto"})
    assert limited.max_length == 120 and limited.settings["max_length"] == "120"


def test_windows_of_a_text_file(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_bytes("Erste Zeile, äöü 🙂\nzweite\n".encode() * 8 + b"\xff\n" + b"Ende\n" * 9)
    common = dict(tokenizer=tokenizer("bos"), max_length=50)
    found = preview([str(path)], rows=99, **common)
    bad = [row for row in found.rows if isinstance(row, RowError)]
    assert [error.origin.line for error in bad] == [17]
    documents = prepare(
        [str(path)], packing=False, truncation_strategy="drop", system=None, skip_bad_rows=True, **common
    ).documents
    assert [labels(view) for view in found.views()] == [taken(document) for document in documents]
    words = ["".join(token.text for token in view.tokens) for view in found.views()]
    assert words[0].startswith("<s>Erste Zeile, äöü 🙂\nzweite\n") and words[-1].endswith("Ende\n</s>")
    assert {view.shape for view in found.views()} == {"text file"}


def test_refused_rows_are_shown_in_their_place(tmp_path: Path) -> None:
    source = rows_file(tmp_path, [ROWS[0], "{broken", {"unknown": 1}, "", ROWS[2], ROWS[3]])
    found = preview([source], tokenizer=chatty())
    lines = [(row.origin.line, isinstance(row, RowError)) for row in found.rows]
    assert lines == [(1, False), (2, True), (3, True), (5, False), (6, False)]
    assert [row.origin.line for row in preview([source], tokenizer=chatty(), row=3, rows=2).rows] == [3, 5]
    assert [row.origin.line for row in preview([source], tokenizer=chatty(), row=4, rows=1).rows] == [5]
    assert [row.origin.line for row in preview([f"{source}#2"], tokenizer=chatty()).rows] == [1, 2, 3, 5]
    with pytest.raises(
        UserError, match=r"no row begins at line 7 or behind it; the last is .*rows\.jsonl:6$"
    ):
        preview([source], tokenizer=chatty(), row=7)
    with pytest.raises(UserError, match="there are no rows"):
        preview([rows_file(tmp_path, [], "none.jsonl")], tokenizer=chatty())


def test_another_chat_template(tmp_path: Path) -> None:
    common = dict(
        tokenizer=chatty("bos"), chat_template=template("bos-headers"), max_length="auto", packing=True
    )
    source = rows_file(tmp_path, ROWS[:2])
    documents = prepare([source], truncation_strategy="drop", system=None, **common).documents
    assert [labels(view) for view in preview([source], **common).views()] == [taken(d) for d in documents]
    assert "<|start_header_id|>" in printed(preview([source], **common))


def test_named_columns_and_notes(tmp_path: Path) -> None:
    source = rows_file(tmp_path, [{"q": "Who?", "a": "Me.", "text": "not this"}])
    (row,) = preview([source], tokenizer=chatty(), columns={"question": "q", "a": "answer"}).views()
    assert row.shape == "question + answer"
    (folded, *_) = preview(
        [case("08-no-system-role.jsonl")], tokenizer=with_template("alternate-nosystem"), rows=1
    ).views()
    assert folded.notes == (
        "system words put in front of the first question, as the chat template has no system turn",
    )


def with_template(name: str) -> Any:
    found = tokenizer("bos")
    found.chat_template = Path(template(name)).read_text(encoding="utf-8")
    return found


# ---- the terminal ----------------------------------------------------------------------------------------


def printed(found: Preview, **options: Any) -> str:
    screen = io.StringIO()
    show(found, Console(file=screen, width=100, **options))
    return screen.getvalue()


def test_brackets_where_there_is_no_colour(tmp_path: Path) -> None:
    found = preview([rows_file(tmp_path, [ROWS[0], "{broken", *ROWS[2:]])], tokenizer=chatty(), max_length=60)
    text = printed(found)
    assert "\x1b" not in text
    assert "⟦trained⟧" in text.splitlines()[0]
    tokens = len(found.views()[0].tokens)
    fate = f"question + answer, {tokens} tokens, 0 trained, dropped: longer than 60 tokens"
    assert f"== {tmp_path}/rows.jsonl:1  {fate}\n<|im_start|>user⏎\nWhy is" in text
    assert (
        f"== {tmp_path}/rows.jsonl:2  refused\ntraining stops here, unless --skip_bad_rows: not valid" in text
    )
    left = preview([rows_file(tmp_path, ROWS)], tokenizer=chatty(), max_length=60, truncation_strategy="left")
    text = printed(left)
    assert f"cut to 60 tokens: {tokens - 60} at its beginning are gone" in text
    assert f"✂ {tokens - 60} tokens are cut here ✂" in text
    assert "⟦Rayleigh.⏎\n→   It scatters 🙂🙂.<|im_end|>⟧" in text
    assert "⟦Rayleigh." in printed(left, force_terminal=True, color_system="standard", no_color=True)


def test_colours_in_a_terminal(tmp_path: Path) -> None:
    found = preview([rows_file(tmp_path, ROWS)], tokenizer=chatty(), rows=2)
    text = printed(found, force_terminal=True, color_system="standard")
    assert "⟦" not in text
    assert "\x1b[30;42mR" in text or "\x1b[30;102mR" in text  # of Rayleigh: dark on green
    assert "\x1b[1;35m<|im_start|>" in text
    assert "\x1b[38;2;11;61;44;48;2;" in printed(found, force_terminal=True, color_system="truecolor")


def test_rows_cannot_steer_the_terminal(tmp_path: Path) -> None:
    row = {"question": "\x1b[31m\x07\u202eevil\x9b", "answer": "a\rb"}
    found = preview([rows_file(tmp_path, [row])], tokenizer=chatty())
    for text in (printed(found), preview_page(found, model="m")):
        assert not set("\x1b\x07\u202e\x9b\r") & set(text)
        assert "\u241b" in text and "\\u202e" in text
    windows = preview([rows_file(tmp_path, ROWS)], tokenizer=chatty(), windows=2, max_length=180)
    text = printed(windows)
    assert text.count("== window ") == 2 and "more windows" in text and "of 180 tokens" in text


# ---- the page --------------------------------------------------------------------------------------------


def test_the_page_has_every_token_and_stands_alone(tmp_path: Path) -> None:
    name = f"{HOSTILE.replace('/', '')}.jsonl"
    source = rows_file(tmp_path, [*ROWS[:5], "{broken"], name)
    found = preview(
        [source], tokenizer=chatty(), rows=6, max_length=120, truncation_strategy="right", system=HOSTILE
    )
    page = stands_alone(preview_page(found, model=HOSTILE))
    spans = [span for span in page.all("span") if "data-i" in span]
    tokens = [token for view in found.views() for token in view.tokens]
    assert [int(span["data-i"]) for span in spans] == [token.id for token in tokens]
    worn = [set(span.get("class", "").split()) for span in spans]
    assert [("t" in names, "s" in names, "x" not in names) for names in worn] == [
        (token.trained, token.special, token.kept) for token in tokens
    ]
    said = page.said()
    assert said.count(HOSTILE) >= 4 and "refused" in said and "not valid JSON" in said
    assert "cut to 120 tokens" in said and f"{sum(token.trained for token in tokens):,}" in said


def test_the_page_of_windows_sets_documents_apart(tmp_path: Path) -> None:
    found = preview(["swiftkit::persona"], tokenizer=chatty(), windows=2, max_length=400)
    page = stands_alone(preview_page(found, model="m"))
    sections = [section for section in page.all("section") if section.get("class") == "document"]
    assert len(sections) == sum(map(len, found.windows)) > 2
    assert "Documents share the window, and never see each other." in page.said()


def test_long_cuts_are_counted_not_written(tmp_path: Path) -> None:
    source = rows_file(tmp_path, [{"text": "word " * 2_000}])
    found = preview([source], tokenizer=tokenizer(), max_length=100, truncation_strategy="right")
    page = stands_alone(preview_page(found, model="m"))
    assert len([span for span in page.all("span") if "data-i" in span]) == 2_100
    assert "and 7,901 more tokens that are in no window" in page.said()


# ---- the door --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer and the context of its model, and no weights."""
    folder = tmp_path_factory.mktemp("models") / "toy"
    chatty().save_pretrained(folder)
    shutil.copy(case("00-toy/model-dense.json"), folder / "config.json")
    return folder


def run(*words: str | Path, code: int = 0) -> None:
    with pytest.raises(SystemExit) as end:
        main([str(word) for word in words])
    assert end.value.code == code


def test_the_command(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows_file(tmp_path, [*ROWS, "{broken"])
    run("data", "preview", "rows.jsonl", "swiftkit::persona", "--model", model, "-n", "9", "--max_length=512")
    heard = capsys.readouterr().out
    assert (
        heard.count("\n== ") == 9
        and "== rows.jsonl:8  refused" in heard
        and "== swiftkit::persona:1 " in heard
    )
    run("data", "preview", "rows.jsonl", "--row", "2", "--model", model, "--html", "out.html")
    assert capsys.readouterr().out == "wrote out.html\n"
    page = stands_alone(Path("out.html").read_text(encoding="utf-8"))
    assert "rows.jsonl:2" in page.said() and "rows.jsonl:1" not in page.said()
    run("data", "preview", "--dataset", "rows.jsonl", "--model", model, "--windows", "1")
    assert "== window 1  " in capsys.readouterr().out
    run("data", "stats", "rows.jsonl", "--model", model, "--json=out.json")
    assert json.loads(Path("out.json").read_text())["rows"] == len(ROWS)
    assert "rows      7 (" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("data", "data takes preview or stats, then a file"),
        ("data prview x", "data takes preview or stats, then a file, not prview; did you mean preview?"),
        ("data preview", "--model and --dataset are missing"),
        ("data preview rows.jsonl", "--model is missing"),
        (
            "data preview rows.jsonl --model M --html rows.jsonl",
            "--html rows.jsonl: the file's name ends in .html",
        ),
        ("data preview rows.jsonl --model M --html no/x.html", "--html no/x.html: there is no folder no"),
        ("data preview rows.jsonl --model M -n 0", "--rows: at least 1, or auto, not 0"),
        ("data preview rows.jsonl --model M -n 2 --windows 2", "--windows N shows windows in place of rows"),
        ("data preview gone.jsonl --model M", "no file gone.jsonl"),
        (
            "data preview rows.jsonl --model M --max_length 9999",
            "--max_length 9999 is more than the model's context",
        ),
        (
            "data preview rows.jsonl --model M --chat_template chatm",
            "--chat_template chatm: neither a file nor",
        ),
        ("data stats rows.jsonl --model M --json out.txt", "--json out.txt: the file's name ends in .json"),
        (
            "data stats a.jsonl --dataset b.jsonl --model M",
            "a.jsonl in front is --dataset already; give it once",
        ),
        ("data stats rows.jsonl --model M --rows 5", "unknown name --rows"),
    ],
)
def test_mistakes_are_one_sentence(
    words: str, sentence: str, tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    rows_file(tmp_path, ROWS)
    run(*(str(model) if word == "M" else word for word in words.split()), code=2)
    heard = capsys.readouterr()
    assert heard.err.startswith(f"swiftkit: {sentence}") and heard.err.count("\n") == 1, heard.err
