"""Downloads from a hub: a small loopback server answers as the hub does, well and badly."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

REPO, COMMIT, TOKEN = "someone/tiny", "c0ffee" * 6 + "c0ff", "hf_secretsecretsecret"
HEADER = json.dumps({"w": {"dtype": "F32", "shape": [256], "data_offsets": [0, 1024]}}).encode()
WEIGHTS = len(HEADER).to_bytes(8, "little") + HEADER + bytes(range(256)) * 4
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b'{"version": "1.0"}',
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": b"not wanted",
    "onnx/model.safetensors": b"not wanted",
}


class Hub(ThreadingHTTPServer):
    """The few addresses of the hub that a download asks for. What went over the wire is in `asked`."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.asked: list[str] = []
        self.served = dict(FILES)  # what bodies are sent, which may differ from what is on record
        self.refuse: tuple[int, str] | None = None  # status and the hub's error code
        self.html = False
        self.cut: set[str] = set()  # files whose first body breaks off

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Answer(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, format: str, *args: Any) -> None:
        """Be quiet."""

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, *, body: bool) -> None:
        hub, path = self.server, self.path.split("?")[0]
        hub.asked.append(f"{self.command} {path}")
        if hub.refuse is not None:
            status, code = hub.refuse
            self.send(status, b'{"error": "no"}', body=body, **{"X-Error-Code": code} if code else {})
        elif hub.html:
            self.send(200, b"<html>log in</html>", body=body, **{"Content-Type": "text/html"})
        elif re.fullmatch(rf"/api/models/{REPO}(/revision/(main|{COMMIT}))?", path):
            self.send(200, json.dumps(self.repository()).encode(), body=body)
        elif path.startswith(f"/api/models/{REPO}/tree/"):
            self.send(200, json.dumps(self.tree()).encode(), body=body)
        elif found := re.fullmatch(rf"/{REPO}/resolve/(main|{COMMIT})/(.+)", path):
            self.send_file(found[2], body=body)
        elif path.startswith(f"/api/models/{REPO}/revision/"):
            self.send(404, b"{}", body=body, **{"X-Error-Code": "RevisionNotFound"})
        else:
            self.send(404, b"{}", body=body, **{"X-Error-Code": "RepoNotFound"})

    def repository(self) -> dict[str, Any]:
        siblings = [
            {"rfilename": name, "size": len(content), "blobId": blob_id(content), **lfs(name, content)}
            for name, content in FILES.items()
        ]
        return {"id": REPO, "modelId": REPO, "sha": COMMIT, "siblings": siblings}

    def tree(self) -> list[dict[str, Any]]:
        return [
            {
                "type": "file",
                "path": name,
                "size": len(content),
                "oid": blob_id(content),
                **lfs(name, content),
            }
            for name, content in FILES.items()
        ]

    def send_file(self, name: str, *, body: bool) -> None:
        content = self.server.served[name]
        record = FILES[name]
        etag = hashlib.sha256(record).hexdigest() if lfs(name, record) else blob_id(record)
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        start = int(found[1]) if (found := re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))) else 0
        status = 206 if start else 200
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        if body and name in self.server.cut:
            self.server.cut.remove(name)
            self.send(status, content[start:], body=True, keep=len(content) * 6 // 10, **headers)
            self.close_connection = True
        else:
            self.send(status, content[start:], body=body, **headers)

    def send(
        self, status: int, content: bytes, *, body: bool, keep: int | None = None, **headers: str
    ) -> None:
        self.send_response(status)
        for key, value in {"Content-Type": "application/json", **headers}.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content[:keep])


def blob_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def lfs(name: str, content: bytes) -> dict[str, Any]:
    if not name.endswith(".safetensors"):
        return {}
    sha256 = hashlib.sha256(content).hexdigest()
    return {"lfs": {"oid": sha256, "sha256": sha256, "size": len(content), "pointerSize": 134}}


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


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


def fetch(hub: Hub, cache: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`hub.fetch` in a process of its own: the endpoint and the switches are read when it starts."""
    own = {
        "HF_ENDPOINT": hub.address,
        "HF_HOME": str(cache / "hf"),
        "SWIFTKIT_CACHE": str(cache / "own"),
        "HF_TOKEN": TOKEN,
        "HF_HUB_DISABLE_XET": "1",
        "NO_PROXY": "127.0.0.1",
    }
    command = [sys.executable, "-c", FETCH, *arguments]
    return subprocess.run(
        command, env={**os.environ, **own, **environment}, capture_output=True, text=True, timeout=120
    )


def refused(hub: Hub, cache: Path, *arguments: str, **environment: str) -> str:
    run = fetch(hub, cache, *arguments, **environment)
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
    for environment in ({}, {"HF_HUB_OFFLINE": "1"}):
        assert Path(fetch(hub, tmp_path, **environment).stdout.splitlines()[-1]) == folder
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
        ((500, ""), "answered HTTP 500; try again later"),
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
