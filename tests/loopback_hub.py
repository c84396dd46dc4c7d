"""A loopback server with the few addresses of the hub that a download asks for; it answers well or badly."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

REPO, COMMIT, TOKEN = "someone/tiny", "c0ffee" * 6 + "c0ff", "hf_secretsecretsecret"


class Hub(ThreadingHTTPServer):
    """What went over the wire is in `asked`; the other attributes are how the hub behaves."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.files = dict(files)  # what is on record
        self.served = dict(files)  # what bodies are sent, which may differ from what is on record
        self.asked: list[str] = []
        self.model_type = "llama"  # as the hub tells it
        self.refuse: tuple[int, str] | None = None  # status and the hub's error code
        self.refuse_files: tuple[int, str] | None = None  # the same for files alone
        self.html = False  # whatever is asked, a login page
        self.html_files: set[str] = set()  # files that come as a login page
        self.cut: set[str] = set()  # files whose first body breaks off
        self.ranges = True  # whether a part of a file can be asked for
        self.before_body: Callable[[str], None] = lambda name: None

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def bodies(self, name: str) -> int:
        """How often the content of a file was asked for."""
        return sum(line.startswith("GET") and line.endswith(f"/{name}") for line in self.asked)


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
        file = re.fullmatch(rf"/{REPO}/resolve/(main|{COMMIT})/(.+)", path)
        refuse = hub.refuse or (hub.refuse_files if file else None)
        if refuse is not None:
            status, code = refuse
            said = f'{{"error": "no, {self.headers.get("Authorization")}"}}'.encode()
            self.send(status, said, body=body, **{"X-Error-Code": code} if code else {})
        elif hub.html or (file and file[2] in hub.html_files):
            self.send(200, b"<html>log in</html>", body=body, **{"Content-Type": "text/html"})
        elif re.fullmatch(rf"/api/models/{REPO}(/revision/(main|{COMMIT}))?", path):
            self.send(200, json.dumps(self.repository()).encode(), body=body)
        elif path.startswith(f"/api/models/{REPO}/tree/"):
            self.send(200, json.dumps(self.tree()).encode(), body=body)
        elif file:
            self.send_file(file[2], body=body)
        elif path.startswith(f"/api/models/{REPO}/revision/"):
            self.send(404, b"{}", body=body, **{"X-Error-Code": "RevisionNotFound"})
        else:
            self.send(404, b"{}", body=body, **{"X-Error-Code": "RepoNotFound"})

    def repository(self) -> dict[str, Any]:
        siblings = [
            {"rfilename": name, "size": len(content), "blobId": blob_id(content), **lfs(name, content)}
            for name, content in self.server.files.items()
        ]
        config = {"model_type": self.server.model_type}
        return {"id": REPO, "modelId": REPO, "sha": COMMIT, "siblings": siblings, "config": config}

    def tree(self) -> list[dict[str, Any]]:
        return [
            {
                "type": "file",
                "path": name,
                "size": len(content),
                "oid": blob_id(content),
                **lfs(name, content),
            }
            for name, content in self.server.files.items()
        ]

    def send_file(self, name: str, *, body: bool) -> None:
        hub = self.server
        content, record = hub.served[name], hub.files[name]
        etag = hashlib.sha256(record).hexdigest() if lfs(name, record) else blob_id(record)
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        found = re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))
        start = int(found[1]) if found and hub.ranges else 0
        status = 206 if start else 200
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        if body:
            hub.before_body(name)
        if body and name in hub.cut:
            hub.cut.remove(name)
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
            with suppress(ConnectionError):  # the other side was killed
                self.wfile.write(content[:keep])


def blob_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def lfs(name: str, content: bytes) -> dict[str, Any]:
    if not name.endswith(".safetensors"):
        return {}
    sha256 = hashlib.sha256(content).hexdigest()
    return {"lfs": {"oid": sha256, "sha256": sha256, "size": len(content), "pointerSize": 134}}


@contextmanager
def serving(server: ThreadingHTTPServer) -> Iterator[None]:
    """A server that answers as long as this lasts."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def environment(hub: Hub, cache: Path, **more: str) -> dict[str, str]:
    """For a process that knows this hub only, has an empty cache, and a token that must never be seen."""
    return {
        **os.environ,
        "HF_ENDPOINT": hub.address,
        "HF_HOME": str(cache / "hf"),
        "SWIFTKIT_CACHE": str(cache / "own"),
        "HF_TOKEN": TOKEN,
        "HF_HUB_DISABLE_XET": "1",
        "NO_PROXY": "127.0.0.1",
        **more,
    }


def start(hub: Hub, cache: Path, *arguments: str, **more: str) -> subprocess.Popen[str]:
    """`swiftkit download someone/tiny` in a process of its own."""
    command = [sys.executable, "-m", "swiftkit", "download", REPO, *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment(hub, cache, **more), stdout=pipe, stderr=pipe, text=True)


def done(process: subprocess.Popen[str]) -> Path:
    """The folder that a download ends with."""
    out, complaints = process.communicate(timeout=120)
    assert process.returncode == 0, out + complaints
    assert TOKEN not in out + complaints
    return Path(out.splitlines()[-1])


def refused(process: subprocess.Popen[str]) -> str:
    """What a download complains about, in words for its user."""
    out, complaints = process.communicate(timeout=120)
    assert process.returncode == 2, out + complaints
    assert TOKEN not in out + complaints
    assert "Traceback" not in complaints
    return complaints[complaints.rindex("swiftkit: ") :]
