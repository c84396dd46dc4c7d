"""What a name means: a folder, a name of the registry or a hub id, and which files its recipe needs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from swiftkit import registry
from swiftkit.errors import UserError
from swiftkit.formats.named import folder_name, is_model_folder, known_recipe, locate, open_model, recipe_of
from tests.loopback_hub import REPO, Hub, environment, serving

ROOT = Path(__file__).resolve().parents[1]
CONFIG = b'{"model_type": "llama"}'
FILES = {"config.json": CONFIG, "tokenizer.json": b"{}", "model.safetensors": b"not read"}


@pytest.fixture(autouse=True)
def _somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))


def test_a_run_s_folder_does_not_take_a_model_s_name() -> None:
    run = Path("smollm2-135m/v0-20250102-120000")
    run.mkdir(parents=True)
    assert not is_model_folder("smollm2-135m")
    assert locate("smollm2-135m").folder is None
    assert recipe_of("smollm2-135m") == known_recipe("smollm2-135m") == registry.find("smollm2-135m")
    assert folder_name("smollm2-135m") == "smollm2-135m"
    assert locate("./smollm2-135m").folder == Path("smollm2-135m")
    Path("smollm2-135m/config.json").write_bytes(CONFIG)  # now it is a model
    assert locate("smollm2-135m").folder == Path("smollm2-135m")
    assert known_recipe("smollm2-135m") is None
    assert recipe_of("smollm2-135m").name == "smollm2-135m" and recipe_of("smollm2-135m").hf is None


def test_folders_however_they_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("deep/mine").mkdir(parents=True)
    Path("plain").mkdir()
    for name in ("deep/mine", "./deep/mine", "~/deep/mine", str(tmp_path / "deep" / "mine"), "deep/mine/"):
        folder = locate(name).folder
        assert folder is not None and folder.resolve() == (tmp_path / "deep" / "mine").resolve()
        assert folder_name(name) == "mine"
    assert is_model_folder("plain")  # no model of the registry is called so
    monkeypatch.chdir("deep/mine")
    assert (folder_name("."), folder_name("..")) == ("mine", "deep")
    assert folder_name("owner/name") == "owner/name"


@pytest.mark.parametrize(
    "name", ["./no/x", "./no", "../no/x", "/no", "/no/x", "~/no", "~no-such-user/x", "a/b/c", "owner/name/"]
)
def test_a_path_without_a_folder(name: str) -> None:
    for ask in (known_recipe, locate, open_model, recipe_of):
        with pytest.raises(UserError) as caught:
            ask(name)
        assert str(caught.value) == (
            f"{name} is no folder; give a model folder, a hub id (owner/name) or a name of `swiftkit ls`"
        )


def test_a_folder_s_recipe_needs_its_config_alone() -> None:
    Path("mine").mkdir()
    with pytest.raises(UserError, match=r"^mine lacks config\.json, "):
        recipe_of("mine")
    Path("mine/config.json").write_bytes(CONFIG)
    for name in ("mine", "~/mine"):
        recipe = recipe_of(name)
        assert (recipe.name, recipe.model_type, recipe.hf) == (name, "llama", None)


# ---- a hub id: one small file ---------------------------------------------------------------------------


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub(FILES)
    with serving(server):
        yield server


def show(hub: Hub, cache: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "swiftkit", "show", REPO]
    around = environment(hub, cache)
    return subprocess.run(command, cwd=ROOT, env=around, capture_output=True, text=True, timeout=120)


@pytest.mark.compat
def test_the_recipe_of_a_hub_id_fetches_its_config_alone(hub: Hub, tmp_path: Path) -> None:
    done = show(hub, tmp_path)
    assert (done.returncode, REPO in done.stdout) == (0, True), done.stderr
    assert {name: hub.bodies(name) for name in FILES} == {
        "config.json": 1,
        "tokenizer.json": 0,
        "model.safetensors": 0,
    }


@pytest.mark.compat
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((404, "EntryNotFound"), f"{REPO} has no config.json; choose a repository that has a model"),
        ((403, "GatedRepo"), f"{REPO}: access is gated; accept its licence on the hub, then log in with"),
        ((403, ""), f"{REPO}: config.json could not be fetched (HfHubHTTPError); check network and access"),
    ],
)
def test_a_config_that_does_not_come(answer: tuple[int, str], words: str, hub: Hub, tmp_path: Path) -> None:
    hub.refuse_files = answer
    done = show(hub, tmp_path)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr and f"swiftkit: {words}" in done.stderr
