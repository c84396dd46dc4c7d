"""A folder with a final name is complete, whatever happens while it is written."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from swiftkit.config import TrainKnobs
from swiftkit.engine import Engine
from swiftkit.errors import UserError
from swiftkit.formats.peft import CONFIG, WEIGHTS, load_adapter
from swiftkit.train import artifact as artifact_module
from swiftkit.train import checkpoint
from swiftkit.train.artifact import Artifact
from swiftkit.train.checkpoint import (
    FACTS,
    STATE,
    checkpoint_files,
    clear_partial,
    damage,
    read_snapshot,
    remove_old,
    write_checkpoint,
)
from swiftkit.train.optim import adamw
from swiftkit.train.run import ARGS
from swiftkit.train.space import SETTINGS_BYTES, check_space, checkpoint_bytes, standing_at_once
from swiftkit.train.state import OptimizerState, RandomState, Snapshot, TrainingState, flatten, unflatten
from tests import tiny, training
from tests.cases import toy
from tests.training import CPU, keeper_of, losses, persona, saved, train

FACTS_OF_RUN = {**training.FACTS, "log": {"step": 0, "bytes": 0, "seconds": 0.0}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy-model")
    tiny.make_toy(folder)
    return folder


@pytest.fixture(scope="module")
def engine(model: Path) -> Engine:
    made = training.engine_of(model)
    tiny.randomise_adapter(made.parameters)
    return made


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    return checkpoint_files(toy.tokenizer(), {"eos_token_id": [2, 6]})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / ARGS).write_text("{}")
    return tmp_path


def state_of(engine: Engine, step: int = 0) -> TrainingState:
    """With moments after one update."""
    optimizer = torch.optim.AdamW(engine.parameters.values(), lr=0.0)
    for parameter in engine.parameters.values():
        parameter.grad = torch.randn(parameter.shape)
    optimizer.step()
    optimizer.zero_grad()
    parts = {"optimizer": OptimizerState(optimizer, engine.parameters), "random": RandomState(CPU)}
    state = TrainingState(engine.parameters, parts)
    state.step = step
    return state


def save(run: Path, step: int, engine: Engine, files: dict[str, bytes]) -> Path:
    made = Artifact(tiny_spec(), "toy", tuple(engine.linear_names))
    snapshot = state_of(engine, step).snapshot()
    return write_checkpoint(run, snapshot, artifact=made, files=files, facts=FACTS_OF_RUN)


def tiny_spec() -> Any:
    from swiftkit.engine import LoraSpec

    return LoraSpec(rank=4, alpha=8)


# ---- what is written -------------------------------------------------------------------------------------


def test_a_checkpoint_is_enough_by_itself(run: Path, engine: Engine, files: dict[str, bytes]) -> None:
    folder = save(run, 10, engine, files)
    assert folder == run / "checkpoint-10"
    names = {path.name for path in folder.iterdir()}
    assert {CONFIG, WEIGHTS, ARGS, STATE, FACTS, "tokenizer.json"} <= names
    assert not [name for name in names if name.endswith((".pt", ".bin", ".pkl"))], "no pickle"
    _, tensors = load_adapter(folder)
    assert all(torch.equal(tensors[name], p) for name, p in engine.parameters.items())
    assert sorted(path.name for path in run.iterdir()) == [ARGS, "checkpoint-10"]
    assert damage(folder) is None


def test_other_tools_stop_where_the_model_learnt_to(
    run: Path, engine: Engine, files: dict[str, bytes]
) -> None:
    from transformers import GenerationConfig

    assert GenerationConfig.from_pretrained(save(run, 1, engine, files)).eos_token_id == [2, 6]


def test_all_files_can_be_read_by_the_same_people(run: Path, engine: Engine, files: dict[str, bytes]) -> None:
    before = os.umask(0o022)
    try:
        (run / ARGS).chmod(0o644)
        folder = save(run, 1, engine, files)
    finally:
        os.umask(before)
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in folder.iterdir()}
    assert set(modes.values()) == {"0o644"}, modes


def test_numbers_that_are_not_finite_are_not_blamed_on_the_disk(
    run: Path, engine: Engine, files: dict[str, bytes]
) -> None:
    parameter = next(iter(engine.parameters.values())).detach()
    kept = parameter.clone()
    parameter[0, 0] = float("nan")
    try:
        save(run, 1, engine, files)
    finally:
        parameter.copy_(kept)
    assert saved(run) == [1]


@pytest.mark.compat
def test_state_goes_to_disk_and_back_bit_for_bit(run: Path, engine: Engine, files: dict[str, bytes]) -> None:
    state = state_of(engine, 7)
    wanted = state.snapshot()
    folder = write_checkpoint(
        run,
        wanted,
        artifact=Artifact(tiny_spec(), "toy", tuple(engine.linear_names)),
        files=files,
        facts=FACTS_OF_RUN,
    )
    other = state_of(engine)
    torch.rand(3)
    other.restore(read_snapshot(folder))
    found = other.snapshot()
    assert found.step == 7 and found.facts == wanted.facts
    for mine, theirs in ((found.tensors, wanted.tensors), (found.model, wanted.model)):
        assert mine.keys() == theirs.keys() and mine
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_nested_states_are_taken_apart_and_put_together() -> None:
    state = {
        "a": {"x": torch.ones(2), "deep": {"y": torch.zeros(()), "n": 3, "none": None}},
        "list": [1, 2],
        "z": torch.ones(1),
    }
    tensors, rest = flatten(state)
    assert set(tensors) == {"a/x", "a/deep/y", "z"} and json.loads(json.dumps(rest)) == rest
    again = unflatten(tensors, rest)
    assert again["a"]["deep"]["n"] == 3 and again["list"] == [1, 2] and again["a"]["deep"]["none"] is None
    assert torch.equal(again["a"]["x"], torch.ones(2)) and again.keys() == state.keys()


# ---- old ones --------------------------------------------------------------------------------------------


def test_older_ones_go_when_the_new_one_stands(run: Path, engine: Engine, files: dict[str, bytes]) -> None:
    for step in (2, 4, 6, 10, 40):
        save(run, step, engine, files)
    remove_old(run, newest=10, keep=None, kept=[])
    assert saved(run) == [2, 4, 6, 10, 40], "without a limit all stay"
    remove_old(run, newest=10, keep=2, kept=[2, None])
    assert saved(run) == [2, 6, 10, 40], "by number, not by name; not the spared one, nor what is later"


def test_the_same_step_again_replaces_what_stands(run: Path, engine: Engine, files: dict[str, bytes]) -> None:
    (run / "checkpoint-5").mkdir()
    (run / "checkpoint-5" / WEIGHTS).write_bytes(b"cut")
    assert damage(save(run, 5, engine, files)) is None
    assert sorted(path.name for path in run.iterdir()) == [ARGS, "checkpoint-5"]


# ---- faults ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("broken", ["fsync", "save_adapter", "rename", "write_bytes"])
def test_a_fault_leaves_no_final_folder_and_the_older_ones(
    run: Path, engine: Engine, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    save(run, 5, engine, files)
    before = {path.name: path.read_bytes() for path in (run / "checkpoint-5").iterdir()}

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    owner: Any = {"fsync": os, "save_adapter": artifact_module}.get(broken, Path)
    with monkeypatch.context() as patched:
        patched.setattr(owner, broken, fail)
        with pytest.raises(OSError, match="No space left"):
            save(run, 10, engine, files)
    assert saved(run) == [5]
    assert {path.name: path.read_bytes() for path in (run / "checkpoint-5").iterdir()} == before
    assert not list(run.glob(".checkpoint*")), "what was written makes room again"
    save(run, 10, engine, files)
    assert saved(run) == [5, 10]


def test_a_write_that_reads_back_otherwise_is_an_error(
    run: Path, engine: Engine, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = next(iter(engine.parameters))

    def lossy(folder: Path, tensors: dict[str, torch.Tensor], **options: Any) -> None:
        whole(folder, {**tensors, first: torch.zeros_like(tensors[first])}, **options)

    whole = artifact_module.save_adapter
    monkeypatch.setattr(artifact_module, "save_adapter", lossy)
    with pytest.raises(OSError, match=f"{first} reads back other than it was written"):
        save(run, 3, engine, files)
    assert saved(run) == []


def test_files_are_on_the_disk_before_the_name_is(
    run: Path, engine: Engine, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
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
    folder = save(run, 8, engine, files)
    named = told.index("rename to checkpoint-8")
    assert {path.name for path in folder.iterdir()} <= set(told[:named])
    assert told[named - 1] == ".checkpoint-8.partial" and told[named + 1 :] == [run.name]


def test_every_kind_of_damage_is_named(run: Path, engine: Engine, files: dict[str, bytes]) -> None:
    whole = {path.name: path.read_bytes() for path in save(run, 1, engine, files).iterdir()}
    folder = run / "checkpoint-1"
    for name in sorted(whole):
        (folder / name).unlink()
        assert damage(folder) == f"{folder / name} is missing"
        for content in (b"", whole[name][:-2]):
            (folder / name).write_bytes(content)
            sentence = damage(folder) or ""
            assert sentence.startswith(f"{folder / name} is cut or damaged"), (name, sentence)
        (folder / name).write_bytes(whole[name])
    assert damage(folder) is None
    (folder / FACTS).write_text(json.dumps({**json.loads(whole[FACTS]), "format": 99}))
    assert damage(folder) == f"{folder / FACTS} is of another version of swiftkit"


def test_what_a_crash_left_is_cleared(run: Path, engine: Engine, files: dict[str, bytes]) -> None:
    save(run, 1, engine, files)
    for name in (".checkpoint-2.partial", ".checkpoint-1.removed"):
        (run / name).mkdir()
        (run / name / WEIGHTS).write_bytes(b"half")
    clear_partial(run)
    assert sorted(path.name for path in run.iterdir()) == [ARGS, "checkpoint-1"]


# ---- room on the disk ------------------------------------------------------------------------------------


def test_the_size_is_known_from_shapes(run: Path, engine: Engine, files: dict[str, bytes]) -> None:
    """Before the optimizer has moments; heads of files are rounded up, numbers are exact."""
    optimizer = torch.optim.AdamW(engine.parameters.values(), lr=0.0)
    state = TrainingState(engine.parameters, {"optimizer": OptimizerState(optimizer, engine.parameters)})
    reckoned = checkpoint_bytes(state, optimizer, files)
    folder = save(run, 1, engine, files)
    real = sum(path.stat().st_size for path in folder.iterdir())
    numbers = 12 * sum(p.numel() for p in engine.parameters.values())
    assert numbers < real <= reckoned < real + 100_000


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_8bit"])
def test_the_moments_are_known_before_they_are_there(optim: str, dtype: torch.dtype) -> None:
    if optim == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    shapes = {"embed_tokens.weight": (512, 64), "layer.weight": (256, 128), "layer.bias": (256,)}
    parameters = {name: torch.zeros(shape, dtype=dtype, requires_grad=True) for name, shape in shapes.items()}
    optimizer = adamw(parameters, TrainKnobs(optim=optim))
    state = TrainingState(parameters, {"optimizer": OptimizerState(optimizer, parameters)})
    reckoned = checkpoint_bytes(state, optimizer, {}) - SETTINGS_BYTES
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    tensors = {**state.state_dict()[0], **parameters}
    real = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    assert real <= reckoned < 1.02 * real + 4 * 256 * len(parameters)


@pytest.mark.parametrize(("saves", "keep", "together"), [(9, None, 9), (9, 2, 4), (3, 2, 3), (1, 1, 1)])
def test_with_a_limit_few_stand_together(saves: int, keep: int | None, together: int) -> None:
    assert standing_at_once(saves, keep) == together


def test_too_little_room_is_said_before_the_first_step(model: Path, tmp_path: Path) -> None:
    engine, folder = training.engine_of(model), tmp_path / "run"
    check_space(tmp_path, each=1, saves=3, keep=None)
    rule = (
        r"3 checkpoints of 4096\.00 GiB need 12288\.00 GiB, and [\d,.]+ GiB are free; give a smaller --save"
    )
    with pytest.raises(UserError, match=rule):
        check_space(tmp_path, each=2**42, saves=3, keep=None)
    keeper = keeper_of(folder, engine)
    keeper.files = {"tokenizer.json": _Huge()}  # type: ignore[dict-item]
    with pytest.raises(UserError, match="1 checkpoints of"):
        train(engine, persona(), folder, max_steps=3, save_steps=3, keeper=keeper)
    assert saved(folder) == [] and losses(training.logged(folder)) == []


class _Huge:
    def __len__(self) -> int:
        return 2**62


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 3 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip("a small file system can only be mounted by root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("choice", ["stop", "continue"])
def test_a_disk_that_fills_up_keeps_the_last_good_checkpoint(
    model: Path, small_disk: Path, choice: str
) -> None:
    """Something else eats the room in mid-run, after the check before the first step."""
    engine, folder = training.engine_of(model), small_disk / "run"
    said: list[str] = []
    keeper = keeper_of(folder, engine, on_error=choice, say=said.append)
    eaten = small_disk / "eaten"

    def eat(step: int) -> None:
        if step in (3, 7):  # not before the checkpoint of the step before is done with
            keeper.wait()
        if step == 3:
            with eaten.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
                while True:
                    file.write(b"x" * 65_536)
        if step == 7:
            eaten.unlink()

    options: dict[str, Any] = dict(
        max_steps=8, save_steps=2, global_batch_size=1, keeper=keeper, loss=_at(eat)
    )
    if choice == "stop":
        with pytest.raises(
            UserError, match=r"checkpoint-4 could not be written: .*No space.*; checkpoint-2 is"
        ):
            train(engine, persona(), folder, **options)
        assert saved(folder) == [2]
    else:
        train(engine, persona(), folder, **options)
        assert saved(folder) == [2, 8] and len(said) == 2
        assert "checkpoint-6 could not be written" in said[1] and "training goes on" in said[1]
    assert damage(folder / "checkpoint-2") is None
    assert not list(folder.glob(".checkpoint*"))


def _at(call: Any) -> Any:
    """The loss of runs with one micro-batch a step, telling the step's number first."""
    from swiftkit.methods.sft import loss

    steps = iter(range(1, 1000))

    def told(*arguments: Any) -> Any:
        call(next(steps))
        return loss(*arguments)

    return told


def test_the_last_checkpoint_cannot_be_gone_over(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, folder = training.engine_of(model), tmp_path / "run"
    keeper = keeper_of(folder, engine, on_error="continue", say=lambda _: None)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "_flush", full)
    with pytest.raises(UserError, match="checkpoint-4 could not be written: No space left on device; there"):
        train(engine, persona(), folder, max_steps=4, save_steps=2, keeper=keeper)


# ---- the writing thread ----------------------------------------------------------------------------------


def test_training_goes_on_while_a_checkpoint_is_written(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write that waits for the next step to be done: it would wait for ever if the loop stood still."""
    import threading

    engine, folder = training.engine_of(model), tmp_path / "run"
    third, whole = threading.Event(), checkpoint._fill
    order: list[str] = []

    def slow(beside: Path, snapshot: Snapshot, **options: Any) -> None:
        if snapshot.step == 2:
            assert third.wait(60)
        order.append(f"write {snapshot.step}")
        whole(beside, snapshot, **options)

    def told(step: int) -> None:
        order.append(f"step {step}")
        if step == 4:
            third.set()

    monkeypatch.setattr(checkpoint, "_fill", slow)
    train(
        engine, persona(), folder, max_steps=4, save_steps=2, global_batch_size=1, loss=_at(told),
        keeper=keeper_of(folder, engine),
    )  # fmt: skip
    assert order == ["step 1", "step 2", "step 3", "step 4", "write 2", "write 4"]
    assert saved(folder) == [2, 4]


def test_what_is_written_is_the_state_of_its_step(model: Path, tmp_path: Path) -> None:
    """Later steps change the tensors in place; the copies must not see it."""
    engine, folder = training.engine_of(model), tmp_path / "run"
    train(engine, persona(), folder, max_steps=4, save_steps=2, keeper=keeper_of(folder, engine))
    alone, other = training.engine_of(model), tmp_path / "other"
    train(alone, persona(), other, max_steps=4, save_steps=9, lr_scheduler_type="cosine", keeper=None)
    second, last = (read_snapshot(folder / f"checkpoint-{step}") for step in (2, 4))
    assert all(torch.equal(last.model[name], p) for name, p in alone.parameters.items())
    assert not all(torch.equal(second.model[name], last.model[name]) for name in last.model)
    assert {float(t) for name, t in second.tensors.items() if name.endswith("/step")} == {2.0}
