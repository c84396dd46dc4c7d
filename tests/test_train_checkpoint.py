"""A folder with a final name is complete, whatever happens while it is written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from swiftkit.config import SftConfig
from swiftkit.engine import Engine, LoraSpec
from swiftkit.engine.build import build_model
from swiftkit.formats.peft import CONFIG, WEIGHTS, load_adapter
from swiftkit.train import checkpoint
from swiftkit.train.checkpoint import save_checkpoint
from swiftkit.train.run import ARGS, checkpoints, write_args
from tests import tiny
from tests.cases import toy

SPEC = LoraSpec(rank=2, alpha=4)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp("toy-model")
    tiny.make_toy(folder)
    made = Engine(build_model(folder, dtype=torch.float32, device=torch.device("cpu"), lora=SPEC))
    tiny.randomise_adapter(made.parameters)
    return made


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_args(
        tmp_path, method="sft", config=SftConfig(model="toy", dataset="toy.jsonl").model_dump(), facts={}
    )
    return tmp_path


def save(run: Path, step: int, engine: Engine, **options: Any) -> Path:
    return save_checkpoint(
        run,
        step,
        engine=engine,
        spec=SPEC,
        tokenizer=toy.tokenizer(),
        base_model="toy",
        generation={"eos_token_id": [2, 6]},
        **options,
    )


def numbers(run: Path) -> list[int]:
    return [int(path.name.removeprefix("checkpoint-")) for path in checkpoints(run)]


def test_a_checkpoint_is_enough_by_itself(run: Path, engine: Engine) -> None:
    folder = save(run, 10, engine)
    assert folder == run / "checkpoint-10"
    assert {CONFIG, WEIGHTS, ARGS, "tokenizer.json"} <= {path.name for path in folder.iterdir()}
    _, tensors = load_adapter(folder)
    assert all(torch.equal(tensors[name], p) for name, p in engine.parameters.items())
    assert sorted(path.name for path in run.iterdir()) == [ARGS, "checkpoint-10"]


def test_other_tools_stop_where_the_model_learnt_to(run: Path, engine: Engine) -> None:
    from transformers import GenerationConfig

    assert GenerationConfig.from_pretrained(save(run, 1, engine)).eos_token_id == [2, 6]


def test_all_files_can_be_read_by_the_same_people(run: Path, engine: Engine) -> None:
    before = os.umask(0o022)
    try:
        folder = save(run, 1, engine)
    finally:
        os.umask(before)
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in folder.iterdir() if path.name != ARGS}
    assert set(modes.values()) == {"0o644"}, modes


def test_numbers_that_are_not_finite_are_not_blamed_on_the_disk(run: Path, engine: Engine) -> None:
    parameter = next(iter(engine.parameters.values())).detach()
    kept = parameter.clone()
    parameter[0, 0] = float("nan")
    try:
        save(run, 1, engine)
    finally:
        parameter.copy_(kept)
    assert numbers(run) == [1]


def test_older_ones_go_when_the_new_one_stands(run: Path, engine: Engine) -> None:
    for step in (2, 4, 6, 10):
        save(run, step, engine, keep=2)
    assert numbers(run) == [6, 10], "by number, not by name"
    save(run, 12, engine)
    assert numbers(run) == [6, 10, 12], "without a limit all stay"
    save(run, 14, engine, keep=1)
    assert numbers(run) == [14]


@pytest.mark.parametrize("broken", ["fsync", "save_adapter", "copy2", "rename"])
def test_a_crash_leaves_no_final_folder_and_the_older_ones(
    run: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    save(run, 5, engine, keep=1)
    before = {path.name: path.read_bytes() for path in (run / "checkpoint-5").iterdir()}

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    owner: Any = {"fsync": os, "save_adapter": checkpoint, "copy2": checkpoint.shutil, "rename": Path}[broken]
    with monkeypatch.context() as patched:
        patched.setattr(owner, broken, fail)
        with pytest.raises(OSError, match="No space left"):
            save(run, 10, engine, keep=1)
    assert numbers(run) == [5]
    assert {path.name: path.read_bytes() for path in (run / "checkpoint-5").iterdir()} == before

    folder = save(run, 10, engine, keep=1)  # what the crash left does not stand in the way
    assert numbers(run) == [10]
    assert not [path for path in run.iterdir() if path.name.startswith(".checkpoint")]
    load_adapter(folder)


def test_a_write_that_reads_back_otherwise_is_an_error(
    run: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = next(iter(engine.parameters))

    def lossy(folder: Path, tensors: dict[str, torch.Tensor], **options: Any) -> None:
        whole(folder, {**tensors, first: torch.zeros_like(tensors[first])}, **options)

    whole = checkpoint.save_adapter
    monkeypatch.setattr(checkpoint, "save_adapter", lossy)
    with pytest.raises(OSError, match=f"{first} reads back other than it was written"):
        save(run, 3, engine)
    assert numbers(run) == []


def test_files_are_on_the_disk_before_the_name_is(
    run: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def log_fsync(handle: int) -> None:
        told.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        fsync(handle)

    def log_rename(self: Path, target: Path) -> Path:
        told.append(f"rename to {target.name}")
        return rename(self, target)

    if not Path("/proc/self/fd").is_dir():
        pytest.skip("needs /proc to tell which file is flushed")
    monkeypatch.setattr(os, "fsync", log_fsync)
    monkeypatch.setattr(Path, "rename", log_rename)
    folder = save(run, 8, engine)
    named = told.index("rename to checkpoint-8")
    assert {path.name for path in folder.iterdir()} <= set(told[:named])
    assert told[named - 1] == ".checkpoint-8.partial" and told[named + 1 :] == [run.name]
