"""`--push_to_hub` against a loopback hub: what arrives there, and what is refused before the work."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.adapters import make_base, make_checkpoint
from tests.loopback_hub import REPO, TOKEN, environment, serving
from tests.loopback_uploads import UploadHub

pytest.importorskip("peft")


@pytest.fixture
def hub() -> Iterator[UploadHub]:
    server = UploadHub()
    with serving(server):
        yield server


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("push")
    make_base(folder / "base")
    make_checkpoint(folder / "checkpoint", folder / "base", args={"dataset": ["hf::someone/rows#500"]})
    return folder / "checkpoint"


def run(hub: UploadHub, checkpoint: Path, tmp: Path, *words: str, **more: str) -> tuple[int, str]:
    """Merge and push in a process of its own; its exit code and all that it said."""
    command = [
        sys.executable, "-m", "swiftkit", "merge", str(checkpoint), str(tmp / "out"), "--push_to_hub", REPO,
        "--merge_check", "layers", *words,
    ]  # fmt: skip
    env = environment(hub, tmp / "cache", **more)
    env = {key: value for key, value in env.items() if value}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    said = done.stdout + done.stderr
    assert TOKEN not in said
    assert "Traceback" not in said, said
    return done.returncode, said


@pytest.mark.compat
def test_the_merged_folder_arrives_whole_and_private(
    hub: UploadHub, checkpoint: Path, tmp_path: Path
) -> None:
    code, said = run(hub, checkpoint, tmp_path, "--private", "--max_shard_size", "200KB")
    assert code == 0, said
    assert f"pushed    {hub.address}/{REPO}" in said
    out = tmp_path / "out"
    local = {path.name: path.read_bytes() for path in out.iterdir()}
    assert hub.committed == local and sum(name.endswith(".safetensors") for name in local) > 1
    assert hub.private and hub.tokens == {TOKEN}
    card = local["README.md"].decode()
    assert card.startswith("---\n") and "Trained on hf::someone/rows#500" in card and "## Licence" in card
    assert str(tmp_path) not in card and str(checkpoint.parent) not in card


# What a merge asks first, without the rest of it.
PREPARE = """
import sys
from swiftkit.errors import UserError
from swiftkit.export import push
try:
    push.prepare(sys.argv[1], private="--private" in sys.argv)
except UserError as mistake:
    print(mistake)
"""


@pytest.mark.parametrize(
    ("changes", "words", "more", "says"),
    [
        ({"role": "read"}, [], {}, "may only read"),
        ({"exists": True}, ["--private"], {}, "exists and is public, so --private would not hold"),
        ({"refuse": (401, "")}, [], {}, "HTTP 401: the token that is set is not accepted"),
        ({}, [], {"HF_TOKEN": ""}, "needs a token"),
        ({}, [], {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set"),
        ({}, [], {"HF_ENDPOINT": "http://127.0.0.1:9"}, "cannot be reached"),
    ],
    ids=["read-only", "public", "401", "no token", "offline", "unreachable"],
)
def test_refusals_come_before_the_work(
    hub: UploadHub, tmp_path: Path, changes: dict[str, object], words: list[str],
    more: dict[str, str], says: str,
) -> None:  # fmt: skip
    for name, value in changes.items():
        setattr(hub, name, value)
    said = prepared(hub, tmp_path, REPO, *words, **more)
    assert says in said and not hub.committed


def prepared(hub: UploadHub, tmp: Path, repo: str, *words: str, **more: str) -> str:
    """What is said about pushing there."""
    env = {key: value for key, value in environment(hub, tmp / "cache", **more).items() if value}
    command = [sys.executable, "-c", PREPARE, repo, *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and TOKEN not in done.stdout + done.stderr, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("repo", "says"),
    [("other/model", "who writes for someone, a-club"), ("a//b", "is no hub id"), ("a/b/c", "is no hub id")],
)
def test_a_name_that_cannot_be_written_to(hub: UploadHub, tmp_path: Path, repo: str, says: str) -> None:
    assert says in prepared(hub, tmp_path, repo)


def test_a_refusal_ends_the_command_before_the_merge(
    hub: UploadHub, checkpoint: Path, tmp_path: Path
) -> None:
    hub.role = "read"
    code, said = run(hub, checkpoint, tmp_path)
    assert code == 2 and "may only read" in said and not (tmp_path / "out").exists()


def test_a_refused_upload_leaves_the_merged_model(hub: UploadHub, checkpoint: Path, tmp_path: Path) -> None:
    hub.refuse_uploads = 403
    code, said = run(hub, checkpoint, tmp_path)
    assert code == 2 and "HTTP 403" in said, said
    assert f"the merged model stands in {tmp_path / 'out'}" in said and "hf upload" in said
    assert (tmp_path / "out" / "model.safetensors").is_file()
