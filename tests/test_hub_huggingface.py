"""Downloads from Hugging Face: a small loopback server answers as the hub does, well and badly."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.loopback_hub import TOKEN, Hub, environment, serving, start
from tests.loopback_hub import refused as complaint

HEADER = json.dumps({"w": {"dtype": "F32", "shape": [256], "data_offsets": [0, 1024]}}).encode()
WEIGHTS = len(HEADER).to_bytes(8, "little") + HEADER + bytes(range(256)) * 4
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b'{"version": "1.0"}',
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": b"not wanted",
    "onnx/model.safetensors": b"not wanted",
    "modeling_tiny.py": b"raise SystemExit('code of a repository is never run')",
    "tokenizer_tiny.py": b"raise SystemExit('nor that of its tokenizer')",
}


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub(FILES)
    with serving(server):
        yield server


FETCH = """
import sys
from swiftkit import hub
from swiftkit.errors import UserError
try:
    got = hub.fetch(hub.Location("tiny", hf="someone/tiny"), revision=sys.argv[1] if sys.argv[1:] else None)
except UserError as error:
    sys.exit(f"UserError: {error}")
print(got.path)
"""


def fetch(hub: Hub, cache: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """`hub.fetch` in a process of its own: the endpoint and the switches are read when it starts."""
    return subprocess.run(
        [sys.executable, "-c", FETCH, *arguments],
        env=environment(hub, cache, **more),
        capture_output=True,
        text=True,
        timeout=120,
    )


def refused(hub: Hub, cache: Path, *arguments: str, **more: str) -> str:
    run = fetch(hub, cache, *arguments, **more)
    assert run.returncode == 1, run.stdout
    assert TOKEN not in run.stdout + run.stderr
    assert "Traceback" not in run.stderr
    return run.stderr[run.stderr.index("UserError: ") :]


@pytest.mark.compat
def test_what_training_needs_and_then_no_connection(hub: Hub, tmp_path: Path) -> None:
    run = fetch(hub, tmp_path)
    assert run.returncode == 0, run.stderr
    assert "downloading someone/tiny from Hugging Face: 3 files" in run.stdout
    folder = Path(run.stdout.splitlines()[-1])
    names = ["config.json", "model.safetensors", "tokenizer.json"]
    assert sorted(path.name for path in folder.iterdir()) == names
    assert all((folder / name).read_bytes() == FILES[name] for name in names)

    hub.asked.clear()
    for more in ({}, {"HF_HUB_OFFLINE": "1"}):
        assert Path(fetch(hub, tmp_path, **more).stdout.splitlines()[-1]) == folder
    assert hub.asked == []


def test_a_broken_off_download_goes_on(hub: Hub, tmp_path: Path) -> None:
    hub.cut.add("model.safetensors")
    run = fetch(hub, tmp_path)
    if run.returncode:  # whether one run tries again by itself is the hub client's affair
        run = fetch(hub, tmp_path)
    assert not hub.cut
    assert (Path(run.stdout.splitlines()[-1]) / "model.safetensors").read_bytes() == WEIGHTS


def test_a_changed_byte_is_found_and_not_kept(hub: Hub, tmp_path: Path) -> None:
    hub.served["model.safetensors"] = WEIGHTS[:-1] + b"x"
    message = refused(hub, tmp_path)
    assert "model.safetensors has sha256" in message
    assert hashlib.sha256(WEIGHTS).hexdigest() in message
    assert not list((tmp_path / "hf").rglob("model.safetensors"))
    offline = refused(hub, tmp_path, HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE is set and the cache lacks model.safetensors" in offline

    hub.served = dict(FILES)
    assert fetch(hub, tmp_path).returncode == 0


def test_a_login_page_for_a_file(hub: Hub, tmp_path: Path) -> None:
    hub.served["config.json"] = b"<html>please log in</ht>"[: len(FILES["config.json"])]
    message = refused(hub, tmp_path)
    assert "the downloaded config.json is not JSON" in message
    assert hub.address in message


@pytest.mark.parametrize(
    ("refuse", "said"),
    [
        ((401, "GatedRepo"), r"access is gated; accept the licence at .*/someone/tiny, .* `hf auth login`"),
        ((403, "GatedRepo"), r"access is gated; accept the licence at .*/someone/tiny, .* `hf auth login`"),
        ((401, ""), r"access refused \(HTTP 401\).* HF_TOKEN"),
        ((403, ""), r"access refused \(HTTP 403\).* HF_TOKEN"),
        ((404, "RepoNotFound"), "knows no such model; check the name"),
        ((416, ""), r"HTTP 416\); run the same command again"),
        ((429, ""), r"wants fewer requests \(HTTP 429\); wait some minutes"),
        ((500, ""), "answered HTTP 500, a fault on its side; run the same command again later"),
        ((503, ""), "answered HTTP 503, a fault on its side; run the same command again later"),
        ((418, ""), "answered HTTP 418, unexpected"),
    ],
)
def test_refusals_say_what_to_do(hub: Hub, tmp_path: Path, refuse: tuple[int, str], said: str) -> None:
    hub.refuse = refuse
    message = refused(hub, tmp_path)
    assert re.search(said, message), message
    assert "someone/tiny" in message


def test_no_such_revision(hub: Hub, tmp_path: Path) -> None:
    message = refused(hub, tmp_path, "v9")
    assert "someone/tiny at revision v9: the repository has no such branch, tag or commit" in message


def test_a_page_that_is_no_hub(hub: Hub, tmp_path: Path) -> None:
    hub.html = True
    assert "gave no hub's answer (a login page?)" in refused(hub, tmp_path)


def test_no_connection(hub: Hub, tmp_path: Path) -> None:
    message = refused(hub, tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    assert "http://127.0.0.1:9 cannot be reached" in message


def test_no_token_is_said_too(hub: Hub, tmp_path: Path) -> None:
    hub.refuse = (401, "GatedRepo")
    assert "the token that is set was sent" in refused(hub, tmp_path)
    assert "no token is set" in refused(hub, tmp_path, HF_TOKEN="")


def test_a_small_file_of_other_content_is_found(hub: Hub, tmp_path: Path) -> None:
    hub.served["tokenizer.json"] = b'{"version": "2.0"}'
    message = refused(hub, tmp_path)
    assert re.search(
        r"the downloaded tokenizer\.json has blob id \w{40}, the hub has \w{40} on record", message
    )
    assert not list((tmp_path / "hf").rglob("tokenizer.json"))


def test_a_full_disk_is_seen_before_the_download(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import shutil\nreal = shutil.disk_usage\n"
        "shutil.disk_usage = lambda path: real(path)._replace(free=7)\n"
    )
    message = refused(hub, tmp_path, PYTHONPATH=f"{tmp_path}:{os.getcwd()}")
    assert re.search(
        r"downloading someone/tiny needs 0 MB in .*/hf/hub, but only 0 MB are free there", message
    )
    assert hub.bodies("model.safetensors") == 0


def test_what_a_killed_run_left_is_checked_before_it_is_trusted(hub: Hub, tmp_path: Path) -> None:
    assert fetch(hub, tmp_path).returncode == 0
    (log,) = (tmp_path / "own").rglob("*.json")
    log.write_text(json.dumps({**json.loads(log.read_text()), "checked": False}))
    weights = next((tmp_path / "hf").rglob("model.safetensors")).resolve()
    weights.write_bytes(WEIGHTS[:-1] + b"x")

    offline = refused(hub, tmp_path, HF_HUB_OFFLINE="1")
    assert "its last download broke off before it was checked" in offline
    assert "model.safetensors has sha256" in refused(hub, tmp_path)
    assert fetch(hub, tmp_path).returncode == 0
    assert weights.read_bytes() == WEIGHTS


def test_a_run_killed_in_the_middle_leaves_nothing_that_is_trusted(hub: Hub, tmp_path: Path) -> None:
    process = start(hub, tmp_path)

    def kill(name: str) -> None:
        if name == "model.safetensors" and process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.wait()

    hub.before_body = kill
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    offline = complaint(start(hub, tmp_path, HF_HUB_OFFLINE="1"))
    assert re.search("the cache lacks .*(every file|model.safetensors)", offline), offline
    hub.before_body = lambda name: None
    assert fetch(hub, tmp_path).returncode == 0


@pytest.mark.parametrize(
    ("verb", "refuse"),
    [
        ("download", (401, "GatedRepo")),
        ("download", (500, "")),
        ("sft", (403, "")),
        ("chat", (401, "GatedRepo")),
    ],
)
def test_no_verb_ever_shows_the_token(hub: Hub, tmp_path: Path, verb: str, refuse: tuple[int, str]) -> None:
    hub.refuse = refuse
    words = {
        "download": ["download", "someone/tiny"],
        "sft": ["sft", "--model", "someone/tiny", "--dataset", "swiftkit::persona"],
        "chat": ["chat", "--model", "someone/tiny", "--prompt", "hello"],
    }[verb]
    run = subprocess.run(
        [sys.executable, "-m", "swiftkit", *words],
        env=environment(hub, tmp_path, HF_HUB_VERBOSITY="debug"),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 2, run.stderr
    assert ("access is gated" if refuse[1] else f"HTTP {refuse[0]}") in run.stderr
    assert TOKEN not in run.stdout + run.stderr
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(TOKEN.encode() in path.read_bytes() for path in written)


def test_a_model_that_cannot_be_trained_is_refused_before_its_files(hub: Hub, tmp_path: Path) -> None:
    hub.model_type = "mixtral"
    run = subprocess.run(
        [sys.executable, "-m", "swiftkit", "chat", "--model", "someone/tiny", "--prompt", "hello"],
        env=environment(hub, tmp_path),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 2
    assert "someone/tiny: this version cannot train models of type mixtral yet" in run.stderr
    assert hub.asked and not any("/resolve/" in line for line in hub.asked)
    assert start(hub, tmp_path).wait(timeout=60) == 0, "`download` takes it all the same"
