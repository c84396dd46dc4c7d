"""The loopback hub with the addresses of an upload: who am I, make a repository, large files, commit."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from typing import Any

from tests.loopback_hub import COMMIT, REPO, Answer, Hub


class UploadHub(Hub):
    """What was sent is in `committed`; the other attributes are how the hub behaves."""

    def __init__(self) -> None:
        super().__init__({})
        self.RequestHandlerClass = Uploads
        self.role = "write"
        self.exists = False
        self.private = False
        self.stored: dict[str, bytes] = {}  # large files by sha256
        self.committed: dict[str, bytes] = {}
        self.refuse_uploads: int | None = None  # status of what is sent once the repository is there
        self.tokens: set[str] = set()  # that came with requests


class Uploads(Answer):
    server: UploadHub

    def do_POST(self) -> None:
        hub, path = self.server, self.path.split("?")[0]
        hub.asked.append(f"POST {path}")
        hub.tokens.add(str(self.headers.get("Authorization")).removeprefix("Bearer "))
        content = self.content()
        if path == "/api/repos/create":
            asked = json.loads(content)
            hub.private = bool(asked.get("private")) or asked.get("visibility") == "private"
            hub.exists = True
            self.tell({"url": f"{hub.address}/{REPO}", "name": REPO, "id": REPO})
        elif path == "/api/validate-yaml":
            self.tell({"errors": [], "warnings": []})
        elif hub.refuse_uploads is not None:
            self.tell({"error": f"no, {self.headers.get('Authorization')}"}, hub.refuse_uploads)
        elif path.startswith(f"/api/models/{REPO}/preupload/"):
            self.tell({"files": [upload_mode(file["path"]) for file in json.loads(content)["files"]]})
        elif path == f"/{REPO}.git/info/lfs/objects/batch":
            actions = [self.action(wanted) for wanted in json.loads(content)["objects"]]
            self.tell({"transfer": "basic", "objects": actions})
        elif path == "/verify":
            self.tell({})
        elif path == f"/api/models/{REPO}/commit/main":
            self.commit([json.loads(line) for line in content.splitlines()])
            self.tell({"commitUrl": f"{hub.address}/{REPO}/commit/{COMMIT}", "commitOid": COMMIT})
        else:
            self.tell({}, 404)

    def do_PUT(self) -> None:
        content = self.content()
        oid = hashlib.sha256(content).hexdigest()
        if self.path != f"/store/{oid}":
            self.tell({"error": "other content than announced"}, 400)
            return
        self.server.stored[oid] = content
        self.tell({})

    def answer(self, *, body: bool) -> None:
        hub, path = self.server, self.path.split("?")[0]
        if path == "/api/whoami-v2" and hub.refuse is None:
            hub.asked.append(f"GET {path}")
            known = {"name": "someone", "orgs": [{"name": "a-club"}]}
            self.tell({**known, "type": "user", "auth": {"accessToken": {"role": hub.role}}})
        elif path == f"/api/models/{REPO}" and not hub.exists:
            self.send(404, b"{}", body=body, **{"X-Error-Code": "RepoNotFound"})
        elif re.fullmatch(r"/[^/]+/[^/]+/resolve/main/.*", path):
            self.send(404, b"{}", body=body, **{"X-Error-Code": "EntryNotFound"})
        else:
            super().answer(body=body)

    def repository(self) -> dict[str, Any]:
        return {**super().repository(), "private": self.server.private}

    def action(self, wanted: dict[str, Any]) -> dict[str, Any]:
        at = self.server.address
        actions = {"upload": {"href": f"{at}/store/{wanted['oid']}"}, "verify": {"href": f"{at}/verify"}}
        return {**wanted, "actions": actions}

    def commit(self, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                self.server.committed[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.server.committed[value["path"]] = self.server.stored[value["oid"]]

    def content(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def tell(self, content: dict[str, Any], status: int = 200) -> None:
        self.send(status, json.dumps(content).encode(), body=True)


def upload_mode(path: str) -> dict[str, Any]:
    mode = "lfs" if path.endswith((".safetensors", "tokenizer.json")) else "regular"
    return {"path": path, "uploadMode": mode, "shouldIgnore": False}
