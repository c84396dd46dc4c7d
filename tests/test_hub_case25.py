"""Downloads that break, ten ways, against a loopback server (`cases/25-download.*.json`)."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.loopback_hub import COMMIT, REPO, Hub, done, refused, serving, start

CASES = Path(__file__).parent / "cases"
PAYLOAD = {
    name: base64.b64decode(content)
    for name, content in json.loads((CASES / "25-download.payload.json").read_text()).items()
}
EXPECTED = json.loads((CASES / "25-download.expect.json").read_text()) | json.loads(
    (CASES / "25-download.scenarios.json").read_text()
)
SUMS = {name: facts["sha256"] for name, facts in EXPECTED["files"].items()}
WEIGHTS = "weights.safetensors"


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub(PAYLOAD)
    with serving(server):
        yield server


def check(folder: Path) -> None:
    """Every file is there, whole, and nothing else."""
    assert {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()} == SUMS


def test_all_ten_are_here() -> None:
    tested = {name.removeprefix("test_").replace("_", "-") for name in globals() if name.startswith("test_")}
    assert {scenario["name"] for scenario in EXPECTED["scenarios"]} <= tested


@pytest.mark.compat
def test_cut(hub: Hub, tmp_path: Path) -> None:
    named: list[list[Path]] = []
    hub.before_body = lambda name: named.append(list(tmp_path.rglob(WEIGHTS)) if name == WEIGHTS else [])
    hub.cut.add(WEIGHTS)
    check(done(start(hub, tmp_path)))
    assert hub.bodies(WEIGHTS) == 2
    assert not any(named), "an unfinished file has no final name"


@pytest.mark.compat
def test_range_ignored(hub: Hub, tmp_path: Path) -> None:
    hub.cut.add(WEIGHTS)
    hub.ranges = False
    check(done(start(hub, tmp_path)))


@pytest.mark.compat
def test_flipped_byte(hub: Hub, tmp_path: Path) -> None:
    content = bytearray(PAYLOAD[WEIGHTS])
    content[-5] ^= 1
    hub.served[WEIGHTS] = bytes(content)
    message = refused(start(hub, tmp_path))
    assert WEIGHTS in message and SUMS[WEIGHTS] in message and hashlib.sha256(content).hexdigest() in message
    left = [path for path in tmp_path.rglob("*") if path.is_file() and path.read_bytes() == bytes(content)]
    assert left == []
    assert WEIGHTS in refused(start(hub, tmp_path, HF_HUB_OFFLINE="1"))
    hub.served = dict(PAYLOAD)
    check(done(start(hub, tmp_path)))


@pytest.mark.compat
@pytest.mark.parametrize("recorded", [True, False], ids=["etag", "no-etag"])
def test_login_page(hub: Hub, tmp_path: Path, recorded: bool) -> None:
    if recorded:  # a page of the right length under the file's own headers
        hub.served["config.json"] = b"<html>please log in</ht>"[: len(PAYLOAD["config.json"])]
    else:
        hub.html_files.add("config.json")
    message = refused(start(hub, tmp_path))
    assert "config.json" in message and "JSON" in message and hub.address in message
    hub.served, hub.html_files = dict(PAYLOAD), set()
    check(done(start(hub, tmp_path)))


@pytest.mark.compat
@pytest.mark.parametrize("code", ["", "GatedRepo"], ids=["plain", "with-code"])
@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize("files_alone", [False, True], ids=["all", "files"])
def test_gated(hub: Hub, tmp_path: Path, status: int, code: str, files_alone: bool) -> None:
    setattr(hub, "refuse_files" if files_alone else "refuse", (status, code))
    message = refused(start(hub, tmp_path))
    assert "access" in message and REPO in message and "main" in message
    assert (
        "hf auth login" in message and "HF_TOKEN" in message and "the token that is set was sent" in message
    )
    assert f"{hub.address}/{REPO}" in message, "where to accept"
    assert "exist" not in message and "no such" not in message


@pytest.mark.compat
def test_no_such_revision(hub: Hub, tmp_path: Path) -> None:
    message = refused(start(hub, tmp_path, "--revision", "v9"))
    assert f"{REPO} at revision v9: the repository has no such branch, tag or commit" in message


@pytest.mark.compat
def test_offline_complete(hub: Hub, tmp_path: Path) -> None:
    done(start(hub, tmp_path))
    hub.asked.clear()
    check(done(start(hub, tmp_path, HF_HUB_OFFLINE="1")))
    check(done(start(hub, tmp_path, "--revision", COMMIT, HF_HUB_OFFLINE="1")))
    assert hub.asked == []


@pytest.mark.compat
def test_offline_missing(hub: Hub, tmp_path: Path) -> None:
    (done(start(hub, tmp_path)) / WEIGHTS).unlink()
    hub.asked.clear()
    message = refused(start(hub, tmp_path, HF_HUB_OFFLINE="1"))
    assert f"the cache lacks {WEIGHTS}" in message
    assert hub.asked == []


@pytest.mark.compat
def test_two_at_once(hub: Hub, tmp_path: Path) -> None:
    both_asked = threading.Event()

    def wait_for_the_other(name: str) -> None:
        while sum("/api/models/" in line and "tree" not in line for line in hub.asked) < 2:
            if both_asked.wait(0.02):
                return
        both_asked.set()

    hub.before_body = wait_for_the_other
    for process in [start(hub, tmp_path), start(hub, tmp_path)]:
        check(done(process))
    assert {name: hub.bodies(name) for name in PAYLOAD} == dict.fromkeys(PAYLOAD, 1)


@pytest.mark.compat
def test_no_symlinks(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os\ndef symlink(*_, **__):\n    raise OSError('no symlinks here')\nos.symlink = symlink\n"
    )
    folder = done(start(hub, tmp_path, PYTHONPATH=str(tmp_path)))
    check(folder)
    assert not any(path.is_symlink() for path in folder.iterdir())
