"""Data that were prepared before are found again: the same to the byte, and never those of other settings."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swiftkit.data import Prepared, prepare
from swiftkit.data.arrays import INDEX, DamagedError, open_arrays, write_arrays
from swiftkit.data.cache import DRAFT, DataCache, look_at
from swiftkit.data.document import Origin
from swiftkit.data.read import is_text
from swiftkit.errors import UserError
from tests.cases.toy import case, template, tokenizer

ROOT = Path(__file__).resolve().parents[1]
TOY = {name: tokenizer(name) for name in ("plain", "bos")}


def prepared(*sources: str, tok: str = "plain", **knobs: Any) -> Prepared:
    settings: dict[str, Any] = {
        "max_length": "auto",
        "packing": True,
        "truncation_strategy": "drop",
        "system": None,
        "chat_template": "chatml",
    }
    return prepare(sources, tokenizer=TOY[tok], **{**settings, **knobs})


def rows(path: Path, count: int, *, longest: int = 60) -> str:
    """Conversations of unlike lengths, one in ten of them bad."""
    lines = []
    for number in range(count):
        words = "x" * (number * 7 % longest + 1)
        answered = [{"role": "user", "content": f"{number}?"}, {"role": "assistant", "content": words}]
        lines.append(json.dumps({"messages": answered} if number % 10 else {"q": number}))
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


def everything(found: Prepared) -> list[Any]:
    """All that a run sees of its data, bytes of every window included."""
    own = [
        [
            [(d.ids.tobytes(), d.ids.dtype, d.trained.tobytes(), str(d.origin)) for d in found.window(index)]
            for index in range(len(found.windows))
        ],
        list(found.windows),
        found.window_lengths.tolist(),
        found.max_length,
        found.report.to_dict(),
        found.fingerprint,
        found.prompts,
        found.largest_id,
    ]
    return [own, everything(found.evaluation) if found.evaluation else None]


def entries(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


MANY_KNOBS: dict[str, dict[str, Any]] = {
    "skipped": {"skip_bad_rows": True, "max_dropped": 0.2},
    "cut from the left": {
        "max_length": 48,
        "truncation_strategy": "left",
        "skip_bad_rows": True,
        "tok": "bos",
    },
    "cut from the right": {"max_length": 32, "truncation_strategy": "right", "skip_bad_rows": True},
    "dropped": {"max_length": 48, "skip_bad_rows": True, "packing": False},
    "split": {"split_ratio": 0.2, "skip_bad_rows": True, "seed": 5, "max_length": 512},
    "mixed": {"interleave_prob": [3, 1], "stopping_strategy": "all_exhausted", "skip_bad_rows": True},
}


@pytest.mark.compat
@pytest.mark.parametrize("name", MANY_KNOBS)
def test_cold_warm_and_no_cache_are_the_same(tmp_path: Path, name: str) -> None:
    text = tmp_path / "book.txt"
    text.write_text("".join(f"line {number} of a book\n" for number in range(60)))
    sources = [rows(tmp_path / "a.jsonl", 90), f"{text}#12"]
    without = prepared(*sources, **MANY_KNOBS[name])
    cold = prepared(*sources, cache=tmp_path / "cache", **MANY_KNOBS[name])
    warm = prepared(*sources, cache=tmp_path / "cache", **MANY_KNOBS[name])
    assert everything(without) == everything(cold) == everything(warm)
    assert without.report.cache == "" and without.report.lines() == cold.report.lines()[:-1]
    assert cold.report.lines()[-1].startswith("cache     written for the next start")
    assert warm.report.lines()[-1].startswith("cache     from cache: ")
    assert not warm.documents[0].ids.flags.writeable
    assert len(entries(tmp_path / "cache")) == 2


def test_processes_change_nothing(tmp_path: Path) -> None:
    source = rows(tmp_path / "a.jsonl", 2500)
    knobs: dict[str, Any] = {"skip_bad_rows": True, "max_length": 64}
    one = prepared(f"{source}#2100", **knobs)
    two = prepared(f"{source}#2100", num_proc=2, **knobs)
    assert everything(one) == everything(two) and one.report.rows_read == 2100
    book = tmp_path / "book.txt"
    lines = [f"line {number} of a book\n".encode() for number in range(20_000)]
    lines[40] = lines[18_000] = b"\xff\n"
    book.write_bytes(b"".join(lines))
    for limit in ("", "#900"):
        one, two = (prepared(f"{book}{limit}", **knobs, num_proc=number) for number in (1, 2))
        assert everything(one) == everything(two) and one.report.rows_skipped == (1 if limit else 2)
    broken = tmp_path / "b.jsonl"
    broken.write_text('{"text": "fine"}\n{"text": ""}\n{not JSON}\n')
    for processes in (1, 2):
        with pytest.raises(UserError, match=r"b\.jsonl:2: .*empty"):
            prepared(str(broken), num_proc=processes)


def test_a_worker_that_dies_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from swiftkit.data import workers

    monkeypatch.setattr(workers, "START", "import os; os.kill(os.getpid(), 9)")
    with pytest.raises(UserError, match=r"ended early \(code -9: .*memory\); .*--dataset_num_proc 1"):
        prepared(rows(tmp_path / "a.jsonl", 20), num_proc=2, skip_bad_rows=True)


def test_every_setting_and_every_byte_counts(tmp_path: Path) -> None:
    source, cache = rows(tmp_path / "a.jsonl", 30), tmp_path / "cache"
    other = Path(tmp_path / "other.jinja")
    other.write_text(Path(template("chatml")).read_text() + "{# another #}")
    knobs: dict[str, Any] = {"skip_bad_rows": True, "cache": cache}
    prepared(source, **knobs)
    changes: list[dict[str, Any]] = [
        {"system": "Be brief."},
        {"chat_template": str(other)},
        {"tok": "bos"},
        {"train_on": "last"},
        {"thinking_history": "keep"},
        {"columns": {"text": "q"}},
    ]
    for change in changes:
        assert "written" in prepared(source, **{**knobs, **change}).report.cache, change
    for change in ({"max_length": 40}, {"packing": False}, {"split_ratio": 0.5}, {"seed": 1}):
        assert "tokens from cache, packed anew" in prepared(source, **knobs, **change).report.cache, change
    assert "from cache: " in prepared(source, **knobs).report.cache
    status = os.stat(source)
    Path(source).write_text(Path(source).read_text().replace("xx", "xy", 1))
    os.utime(source, ns=(status.st_atime_ns, status.st_mtime_ns))  # neither size nor time tell
    assert "written" in prepared(source, **knobs).report.cache


def test_a_template_that_writes_the_date_is_of_its_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from swiftkit.data import render

    class Tomorrow(render.date):
        @classmethod
        def today(cls) -> Any:
            return cls(2031, 5, 17)

    dated = tmp_path / "dated.jinja"
    dated.write_text("{{ strftime_now('%Y') }}" + Path(template("chatml")).read_text())
    knobs: dict[str, Any] = {"skip_bad_rows": True, "cache": tmp_path / "cache", "chat_template": str(dated)}
    source = rows(tmp_path / "a.jsonl", 12)
    assert "written" in prepared(source, **knobs).report.cache
    assert "from cache: " in prepared(source, **knobs).report.cache
    monkeypatch.setattr(render, "date", Tomorrow)
    assert "written" in prepared(source, **knobs).report.cache


def test_damaged_entries_are_made_again(tmp_path: Path, seed: int) -> None:
    draw = np.random.default_rng(seed)
    source, cache = rows(tmp_path / "a.jsonl", 40), tmp_path / "cache"
    knobs: dict[str, Any] = {"skip_bad_rows": True, "cache": cache}
    wanted = everything(prepared(source, **knobs))
    for file in [file for entry in entries(cache) for file in sorted(entry.iterdir())]:
        whole = file.read_bytes()
        flipped = bytearray(whole)
        flipped[draw.integers(len(whole))] ^= 1 << int(draw.integers(8))
        for damage in (bytes(flipped), whole[:-1], whole + b"x", b"", None):
            file.unlink()
            if damage is not None:
                file.write_bytes(damage)
            found = prepared(source, **knobs)
            assert everything(found) == wanted
            assert "from cache: " not in found.report.cache, file.name
            assert "from cache: " in prepared(source, **knobs).report.cache


def test_arrays_come_back_as_they_were(tmp_path: Path) -> None:
    arrays = {
        "a": np.arange(5, dtype=np.int32),
        "none": np.empty(0, np.int64),
        "yes": np.array([True, False]),
    }
    write_arrays(tmp_path, arrays, {"words": "é\udc80"})
    found, facts = open_arrays(tmp_path)
    assert facts == {"words": "é\udc80"}
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype and found[name].tolist() == array.tolist()
    (tmp_path / INDEX).unlink()
    with pytest.raises(DamagedError):
        open_arrays(tmp_path)


TWICE = """
import json, sys
from pathlib import Path
from tests.test_data_cache import everything, prepared
source, cache = sys.argv[1:]
print("ready", flush=True)
sys.stdin.readline()
found = prepared(source, skip_bad_rows=True, cache=Path(cache))
print(json.dumps([found.report.cache, found.fingerprint, found.report.to_dict()]))
"""


def test_two_processes_at_once_build_one_entry(tmp_path: Path) -> None:
    source, cache = rows(tmp_path / "a.jsonl", 4000), tmp_path / "cache"
    command = [sys.executable, "-c", TWICE, source, str(cache)]
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    both = [subprocess.Popen(command, cwd=ROOT, text=True, **pipes) for _ in range(2)]
    for process in both:
        assert process.stdout.readline() == "ready\n"  # type: ignore[union-attr]
    for process in both:
        process.stdin.write("go\n")  # type: ignore[union-attr]
        process.stdin.flush()  # type: ignore[union-attr]
    ends = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], ends
    found = [json.loads(out.splitlines()[-1]) for out, _ in ends]
    assert found[0][1:] == found[1][1:]
    built = ["written" in said for said, *_ in found]
    assert any(built), found
    assert len(entries(cache)) == 2
    assert not [path for path in cache.iterdir() if DRAFT in path.name]


def test_a_build_that_was_killed_leaves_nothing_that_counts(tmp_path: Path) -> None:
    source, cache = rows(tmp_path / "a.jsonl", 30), tmp_path / "cache"
    killed = """
import os, sys
from pathlib import Path
from swiftkit.data.cache import DataCache
def build(folder):
    (folder / "ids.bin").write_bytes(b"half")
    os.kill(os.getpid(), 9)
DataCache(Path(sys.argv[1]), print).obtain("tokens-x", build)
"""
    ended = subprocess.run([sys.executable, "-c", killed, str(cache)], cwd=ROOT, check=False)
    assert ended.returncode == -9 and entries(cache) == []
    (draft,) = [path for path in cache.iterdir() if DRAFT in path.name]
    assert "written" in prepared(source, skip_bad_rows=True, cache=cache).report.cache
    assert draft.exists()  # it may belong to a build that still goes on
    old = time.time() - 100_000
    os.utime(draft, (old, old))
    assert "written" in prepared(source, skip_bad_rows=True, cache=cache, system="r").report.cache
    assert draft.exists()  # a file in it was written not long ago
    os.utime(draft / "ids.bin", (old, old))
    assert "written" in prepared(source, skip_bad_rows=True, cache=cache, system="s").report.cache
    assert not draft.exists()


def test_what_was_not_used_for_longest_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(folder: Path) -> None:
        write_arrays(folder, {"a": np.zeros(1000, np.uint8)}, {})

    monkeypatch.setenv("SWIFTKIT_DATA_CACHE_GB", "3.9e-6")  # room for three
    cache = DataCache(tmp_path, print)
    for age, name in enumerate(["c", "b", "a"]):
        cache.obtain(name, build)
        when = time.time() - 1000 + age
        os.utime(tmp_path / name / INDEX, (when, when))
    assert cache.obtain("c", build).found  # which makes it the one used last
    assert not cache.obtain("new", build).found
    assert [path.name for path in entries(tmp_path)] == ["a", "c", "new"]
    monkeypatch.setenv("SWIFTKIT_DATA_CACHE_GB", "0")
    assert not DataCache(tmp_path, print).obtain("newest", build).found
    assert [path.name for path in entries(tmp_path)] == ["newest"]
    monkeypatch.setenv("SWIFTKIT_DATA_CACHE_GB", "much")
    with pytest.raises(UserError, match="SWIFTKIT_DATA_CACHE_GB is a number of gigabytes, not 'much'"):
        DataCache(tmp_path, print)


def test_windows_outlive_their_entry(tmp_path: Path) -> None:
    found = prepared(rows(tmp_path / "a.jsonl", 30), skip_bad_rows=True, cache=tmp_path / "cache")
    before = everything(found)
    shutil.rmtree(tmp_path / "cache")
    assert everything(found) == before


def test_a_file_that_changes_meanwhile_is_refused(tmp_path: Path) -> None:
    source = Path(rows(tmp_path / "a.jsonl", 3))
    seen = look_at([str(source)], streaming=False)
    assert seen is not None
    seen.check_unchanged()
    with source.open("a") as file:
        file.write("\n{}")
    with pytest.raises(UserError, match=r"a\.jsonl was changed while it was read"):
        seen.check_unchanged()


def test_errors_are_never_kept(tmp_path: Path) -> None:
    source, cache = rows(tmp_path / "a.jsonl", 30), tmp_path / "cache"
    for _ in range(2):
        with pytest.raises(UserError, match=r"a\.jsonl:1: "):
            prepared(source, cache=cache)
        with pytest.raises(UserError, match="of the rows are lost"):
            prepared(source, cache=cache, skip_bad_rows=True, max_dropped=0.01)
    assert [path.name.split("-")[0] for path in entries(cache)] == ["tokens"]
    assert not [path for path in cache.iterdir() if DRAFT in path.name]


def test_the_data_sets_of_a_hub_by_their_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    own, cache = tmp_path / "own", tmp_path / "cache"
    own.mkdir()
    rows(own / "train.jsonl", 9)
    shutil.copy(case("03-plain.jsonl"), own / "train.jsonl")
    cold = prepared(f"hf::{own}", cache=cache)
    warm = prepared(f"hf::{own}", cache=cache)
    assert "written" in cold.report.cache and "from cache: " in warm.report.cache
    assert everything(cold) == everything(warm)
    streamed = prepared(f"hf::{own}", cache=cache, streaming=True)
    assert streamed.report.cache.startswith("none: ") and streamed.fingerprint == cold.fingerprint


NAMED = "from swiftkit.data.cache import key_of; print(key_of([1]))"


def test_other_code_has_other_names(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "swiftkit", tmp_path / "swiftkit", ignore=shutil.ignore_patterns("__pycache__"))

    def name(folder: Path) -> str:
        environment = {**os.environ, "PYTHONPATH": str(folder)}
        ran = subprocess.run(
            [sys.executable, "-c", NAMED],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        return ran.stdout

    before = name(tmp_path)
    assert before == name(tmp_path)
    with (tmp_path / "swiftkit" / "data" / "shapes.py").open("a") as file:
        file.write("# another\n")
    assert name(tmp_path) != before


def test_text_files_are_known_by_their_name() -> None:
    assert is_text(Origin("a/b.TXT", 1)) and not is_text(Origin("hf::b.txt", 1, "row"))
