"""A tokenizer without weights: from a folder, and from a loopback server that answers as the hub does."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from swiftkit.data.tokenizer import load_tokenizer
from swiftkit.errors import UserError
from swiftkit.formats.tokenizer_only import tokenizer_folder
from tests.cases.toy import case, template
from tests.loopback_hub import REPO, TOKEN, Hub, environment, serving

TOK = Path(case("00-toy/tok-plain"))
FETCH = """
import sys
from swiftkit.errors import UserError
from swiftkit.formats.tokenizer_only import tokenizer_folder
try:
    print(tokenizer_folder(sys.argv[1]))
except UserError as error:
    sys.exit(f"UserError: {error}")
"""


@pytest.fixture
def hub() -> Iterator[Hub]:
    files = {path.name: path.read_bytes() for path in TOK.iterdir()}
    server = Hub(
        {
            **files,
            "config.json": Path(case("00-toy/model-dense.json")).read_bytes(),
            "chat_template.jinja": Path(template("chatml")).read_bytes(),
            "model.safetensors": b"weights",
            "model.safetensors.index.json": b"{}",
            "modeling_tiny.py": b"never fetched",
        }
    )
    with serving(server):
        yield server


def fetch(hub: Hub, cache: Path) -> tuple[str, Path]:
    """What is said, and the folder, from a process of its own."""
    run = run_fetch(hub, cache)
    assert run.returncode == 0, run.stderr
    *said, folder = run.stdout.splitlines()
    return "\n".join(said), Path(folder)


def refused(hub: Hub, cache: Path) -> str:
    run = run_fetch(hub, cache)
    assert run.returncode == 1 and "Traceback" not in run.stderr, run.stderr
    return run.stderr[run.stderr.index("UserError: ") :]


def run_fetch(hub: Hub, cache: Path) -> subprocess.CompletedProcess[str]:
    run = subprocess.run(
        [sys.executable, "-c", FETCH, REPO],
        env=environment(hub, cache), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert TOKEN not in run.stdout + run.stderr
    return run


def test_only_the_tokenizer_is_fetched(hub: Hub, tmp_path: Path) -> None:
    said, folder = fetch(hub, tmp_path)
    assert said == f"fetching the tokenizer of {REPO} from Hugging Face, commit c0ffeec0ffee"
    tokenizer = load_tokenizer(folder)
    assert tokenizer.chat_template == hub.files["chat_template.jinja"].decode()
    names = {"config.json", "chat_template.jinja", *(path.name for path in TOK.iterdir())}
    assert {path.name for path in folder.iterdir()} == names
    assert all(hub.bodies(name) == 1 for name in names)
    assert fetch(hub, tmp_path)[1] == folder and hub.bodies("tokenizer.json") == 1  # from the cache


def test_refusals_are_one_sentence(hub: Hub, tmp_path: Path) -> None:
    hub.refuse_files = (403, "GatedRepo")
    assert "access is gated; accept its licence" in refused(hub, tmp_path)
    hub.refuse_files = None
    hub.served["tokenizer.json"] = hub.files["tokenizer.json"][:-1] + b" "
    said = refused(hub, tmp_path)
    assert said.startswith(f"UserError: {REPO}: the downloaded tokenizer.json ") and "it was removed" in said
    hub.served["tokenizer.json"] = hub.files["tokenizer.json"]
    assert fetch(hub, tmp_path)[1].is_dir()
    del hub.files["tokenizer.json"]
    assert f"{REPO} has no tokenizer.json" in refused(hub, tmp_path)


def test_a_folder_needs_no_weights(tmp_path: Path) -> None:
    assert tokenizer_folder(str(TOK)) == TOK
    with pytest.raises(UserError, match=f"{tmp_path} lacks config.json, tokenizer.json, model.safetensors"):
        tokenizer_folder(str(tmp_path))
