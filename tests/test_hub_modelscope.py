"""Downloads from ModelScope, through its own package where it is installed, against a loopback server."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from swiftkit import hub, registry
from swiftkit.errors import UserError
from swiftkit.formats.named import locate
from tests.loopback_hub import TOKEN, serving

REPO = "someone/tiny"
HEADER = json.dumps({"w": {"dtype": "F32", "shape": [256], "data_offsets": [0, 1024]}}).encode()
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b'{"version": "1.0"}',
    "model.safetensors": len(HEADER).to_bytes(8, "little") + HEADER + bytes(range(256)) * 4,
    "README.md": b"not wanted",
    "configuration.json": b"{}",
    "modeling_tiny.py": b"raise SystemExit('code of a repository is never run')",
}
installed = pytest.mark.skipif(find_spec("modelscope_hub") is None, reason="needs the extra `modelscope`")


class Scope(ThreadingHTTPServer):
    """The two addresses of ModelScope that a download asks for."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.asked: list[str] = []
        self.served = dict(FILES)
        self.refuse = 0  # HTTP status

    def environment(self, cache: Path) -> dict[str, str]:
        return {
            "MODELSCOPE_ENDPOINT": f"http://127.0.0.1:{self.server_port}",
            "MODELSCOPE_API_TOKEN": TOKEN,
            "MODELSCOPE_CACHE": str(cache / "ms"),
            "MODELSCOPE_HOME": str(cache / "ms-home"),
            "SWIFTKIT_CACHE": str(cache / "own"),
            "HF_HOME": str(cache / "hf"),
            "HF_ENDPOINT": "http://127.0.0.1:9",  # nothing listens there
            "NO_PROXY": "127.0.0.1",
        }


class Answer(BaseHTTPRequestHandler):
    server: Scope

    def log_message(self, format: str, *args: Any) -> None:
        """Be quiet."""

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, *, body: bool) -> None:
        address = urlsplit(self.path)
        query = parse_qs(address.query)
        self.server.asked.append(f"{self.command} {self.path}")
        if self.server.refuse:
            self.send(self.server.refuse, b'{"Code": 1, "Message": "no"}', body=body)
        elif query.get("Revision", ["master"]) != ["master"]:
            self.send(404, b'{"Code": 10010205001, "Message": "no such revision"}', body=body)
        elif address.path == f"/api/v1/models/{REPO}/repo/files":
            files = [
                {
                    "Path": name,
                    "Name": name,
                    "Type": "blob",
                    "Size": len(content),
                    "Sha256": hashlib.sha256(content).hexdigest(),
                }
                for name, content in FILES.items()
            ]
            self.send(200, json.dumps({"Code": 200, "Data": {"Files": files}}).encode(), body=body)
        elif address.path == f"/api/v1/models/{REPO}/repo":
            self.send_part(self.server.served[query["FilePath"][0]], body=body)
        else:
            self.send(404, b'{"Code": 404, "Message": "no such address"}', body=body)

    def send_part(self, content: bytes, *, body: bool) -> None:
        found = re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if found is None:
            self.send(200, content, body=body)
            return
        first, last = int(found[1]), min(int(found[2] or len(content)), len(content) - 1)
        spread = {"Content-Range": f"bytes {first}-{last}/{len(content)}"}
        self.send(206, content[first : last + 1], body=body, **spread)

    def send(self, status: int, content: bytes, *, body: bool, **headers: str) -> None:
        self.send_response(status)
        for key, value in {"Content-Type": "application/json", **headers}.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)


@pytest.fixture
def scope(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scope]:
    server = Scope()
    for key, value in server.environment(tmp_path).items():
        monkeypatch.setenv(key, value)
    with serving(server):
        yield server


def download(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "swiftkit", "download", REPO, *words]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert TOKEN not in run.stdout + run.stderr
    assert "Traceback" not in run.stderr
    return run


def refused(*words: str) -> str:
    run = download("--source", "modelscope", *words)
    assert run.returncode == 2, run.stdout + run.stderr
    return run.stderr[run.stderr.rindex("swiftkit: ") :]


@installed
def test_what_training_needs_and_then_no_connection(scope: Scope, monkeypatch: pytest.MonkeyPatch) -> None:
    run = download("--source", "modelscope")
    assert run.returncode == 0, run.stderr
    assert "downloading someone/tiny from ModelScope: 3 files" in run.stdout
    folder = Path(run.stdout.splitlines()[-1])
    content = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    wanted = ("config.json", "model.safetensors", "tokenizer.json")
    assert {name: body for name, body in content.items() if not name.startswith(".")} == {
        name: FILES[name] for name in wanted
    }

    scope.asked.clear()
    again = download()  # by itself, with a Hugging Face that cannot be reached
    assert again.returncode == 0 and Path(again.stdout.splitlines()[-1]) == folder
    assert scope.asked == []


@installed
def test_a_changed_byte_is_found_and_not_kept(scope: Scope, tmp_path: Path) -> None:
    scope.served["model.safetensors"] = FILES["model.safetensors"][:-1] + b"x"
    message = refused()
    assert "someone/tiny at revision master" in message and "model.safetensors" in message
    assert not list((tmp_path / "own").rglob("master"))
    scope.served = dict(FILES)
    assert download("--source", "modelscope").returncode == 0


@installed
@pytest.mark.parametrize(
    ("status", "said"),
    [
        (401, r"access refused \(HTTP 401\); accept the terms on http.*/models/someone/tiny"),
        (403, r"access refused \(HTTP 403\).*MODELSCOPE_API_TOKEN"),
        (404, "ModelScope knows no such model or revision, or it is private"),
    ],
)
def test_refusals_say_what_to_do(scope: Scope, status: int, said: str) -> None:
    scope.refuse = status
    message = refused()
    assert re.search(said, message), message


@installed
def test_no_such_revision(scope: Scope) -> None:
    message = refused("--revision", "v9")
    assert "someone/tiny at revision v9: ModelScope knows no such model or revision" in message


def test_offline(scope: Scope, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE is set and the cache has no such model" in refused()
    assert scope.asked == []


def test_without_the_package_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    from swiftkit.hub import modelscope

    monkeypatch.setattr(modelscope, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'swiftkit\[modelscope\]'"):
        hub.fetch(hub.Location("tiny", modelscope=REPO), source="modelscope")


def test_a_name_brings_its_id(monkeypatch: pytest.MonkeyPatch) -> None:
    assert locate("llama3-70b").modelscope == "LLM-Research/Meta-Llama-3-70B-Instruct"
    assert locate("LLM-Research/Meta-Llama-3-70B-Instruct").hf == "meta-llama/Meta-Llama-3-70B-Instruct"
    assert locate("someone/tiny").modelscope == "someone/tiny"
    without = next(recipe.name for recipe in registry.recipes() if recipe.modelscope is None)
    with pytest.raises(UserError, match="no id on ModelScope is known"):
        hub.fetch(locate(without), source="modelscope")
