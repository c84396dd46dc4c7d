"""A resumed run equals the unbroken one, and a checkpoint of another run is refused."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from swiftkit.config import SftConfig
from swiftkit.data import Prepared
from swiftkit.engine import Batch, Engine, Head, Loss, Sums
from swiftkit.errors import UserError
from swiftkit.formats.peft import WEIGHTS
from swiftkit.methods import sft
from swiftkit.methods.sft import loss
from swiftkit.train import resume
from swiftkit.train.artifact import read_model
from swiftkit.train.checkpoint import FACTS, STATE, damage
from swiftkit.train.run import Run, owned
from swiftkit.train.stop import Terminated
from tests import tiny, training
from tests.cases import toy
from tests.training import data_of, keeper_of, logged, losses, persona, saved, train

EXACT = ("step", "loss", "grad_norm", "learning_rate", "epoch", "eval_loss", "eval_perplexity")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "toy"
    tiny.make_toy(folder, template="chatml")
    return folder


def exact(folder: Path) -> list[dict[str, Any]]:
    """The log without what a clock decides."""
    return [{name: line[name] for name in EXACT if name in line} for line in logged(folder)]


def recording(rows: list[list[int]], *, stop_in: int | None = None) -> Loss:
    """The loss; tells the tokens of each micro-batch, and asks for a stop in the n-th one of this process."""

    def told(head: Head, hidden: torch.Tensor, batch: Batch) -> Sums:
        if torch.is_grad_enabled():
            rows.append(batch.input_ids.tolist())
            if len(rows) == stop_in:
                os.kill(os.getpid(), signal.SIGTERM)
        return loss(head, hidden, batch)

    return told


def broken_run(
    model: Path, data: Prepared, folder: Path, *, stops: list[int], dropout: float, **knobs: Any
) -> tuple[list[list[int]], Engine]:
    """A run that is stopped in the given micro-batches, each counted from the stop before."""
    rows: list[list[int]] = []
    resumed = None
    for stop in [*stops, None]:
        engine = training.engine_of(model, dropout=dropout)
        torch.rand(7)  # a new process has drawn other numbers before
        keeper = keeper_of(folder, engine, resumed=resumed)
        own: list[list[int]] = []
        try:
            train(engine, data, folder, keeper=keeper, loss=recording(own, stop_in=stop), **knobs)
        except Terminated:
            resumed = folder / f"checkpoint-{saved(folder)[-1]}"
        rows += own
    return rows, engine


# ---- bit for bit -----------------------------------------------------------------------------------------

KNOWN_17 = toy.expected("17-resume-order")


@pytest.mark.compat
@pytest.mark.parametrize("stop", KNOWN_17["stop_points"])
def test_case_17_rows_rates_losses_and_tensors_do_not_depend_on_a_stop(
    model: Path, tmp_path: Path, stop: int
) -> None:
    data = data_of(toy.case("17-resume-order.jsonl"))
    knobs: dict[str, Any] = dict(
        per_device_train_batch_size=KNOWN_17["batch"], gradient_accumulation_steps=1, warmup_ratio=0.2,
        num_train_epochs=KNOWN_17["epochs"], lr_scheduler_type="cosine", save_steps=100,
    )  # fmt: skip
    rows, whole = broken_run(model, data, tmp_path / "whole", stops=[], dropout=0.1, **knobs)
    again, resumed = broken_run(model, data, tmp_path / "cut", stops=[stop], dropout=0.1, **knobs)
    assert len(rows) == KNOWN_17["steps"] and saved(tmp_path / "cut") == [stop, KNOWN_17["steps"]]
    assert again == rows, "the rows of every step, in order"
    assert exact(tmp_path / "cut") == exact(tmp_path / "whole")
    assert len({line["learning_rate"] for line in exact(tmp_path / "whole")}) > 10
    for name, parameter in whole.parameters.items():
        assert torch.equal(resumed.parameters[name], parameter), name
    text = toy.tokenizer()
    per_epoch = KNOWN_17["steps_per_epoch"]
    for epoch in range(KNOWN_17["epochs"]):
        seen = "".join(text.decode(row) for row in rows[epoch * per_epoch : (epoch + 1) * per_epoch])
        assert sorted(seen[i + 1] for i, letter in enumerate(seen) if letter == "q") == list("0123456789")


@pytest.mark.parametrize("stops", [[3], [2, 1], [5, 9, 3]])
def test_stops_inside_accumulation_and_between_log_lines_change_nothing(
    model: Path, tmp_path: Path, stops: list[int]
) -> None:
    """Two micro-batches a step, a log line every four steps, evaluations between them."""
    data = persona(split_ratio=0.2)
    knobs: dict[str, Any] = dict(
        global_batch_size=2, per_device_train_batch_size=1, max_steps=11, logging_steps=4, eval_steps=3,
        save_steps=100, weight_decay=0.1, evaluation=data.evaluation, loss_spike_factor=50.0,
    )  # fmt: skip
    rows, whole = broken_run(model, data, tmp_path / "whole", stops=[], dropout=0.3, **knobs)
    again, resumed = broken_run(model, data, tmp_path / "cut", stops=stops, dropout=0.3, **knobs)
    assert again == rows
    assert exact(tmp_path / "cut") == exact(tmp_path / "whole")
    assert [line["step"] for line in exact(tmp_path / "cut") if "loss" in line] == [1, 4, 8, 11]
    assert all(torch.equal(resumed.parameters[n], p) for n, p in whole.parameters.items())


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma2", "granite"])
def test_every_family_goes_on_bit_for_bit(family: str, tmp_path: Path) -> None:
    tiny.make(family, tmp_path / "model")
    data = data_of(toy.case("17-resume-order.jsonl"))
    knobs: dict[str, Any] = dict(global_batch_size=2, max_steps=4, save_steps=100)
    rows, whole = broken_run(tmp_path / "model", data, tmp_path / "whole", stops=[], dropout=0.1, **knobs)
    again, resumed = broken_run(tmp_path / "model", data, tmp_path / "cut", stops=[2], dropout=0.1, **knobs)
    assert again == rows and exact(tmp_path / "cut") == exact(tmp_path / "whole")
    assert all(torch.equal(resumed.parameters[name], p) for name, p in whole.parameters.items())


@pytest.mark.slow
def test_a_real_model_goes_on_bit_for_bit(smollm2: Path, tmp_path: Path) -> None:
    knobs: dict[str, Any] = dict(
        dataset="swiftkit::persona", max_steps=3, save_steps=2, global_batch_size=1, max_length=128
    )
    whole, _ = run(tmp_path, smollm2, **knobs)
    adapter, lines = read_model(whole.adapter_dir), exact(whole.folder)
    cut_back(whole.folder, 2)
    done, _ = run(tmp_path, smollm2, resume_from_checkpoint="auto", **knobs)
    assert done.folder == whole.folder and exact(done.folder) == lines
    again = read_model(done.adapter_dir)
    assert all(torch.equal(again[name], tensor) for name, tensor in adapter.items())


def test_another_micro_batch_size_after_the_resume(model: Path, tmp_path: Path) -> None:
    data, folder = persona(), tmp_path / "run"
    knobs: dict[str, Any] = dict(global_batch_size=4, max_steps=20, save_steps=10)
    engine = training.engine_of(model)
    whole = losses(
        train(engine, data, folder, keeper=keeper_of(folder, engine), per_device_train_batch_size=4, **knobs)
    )
    shutil.rmtree(folder / "checkpoint-20")
    engine = training.engine_of(model)
    keeper = keeper_of(folder, engine, resumed=folder / "checkpoint-10")
    found = losses(train(engine, data, folder, keeper=keeper, per_device_train_batch_size=1, **knobs))
    assert len(found) == 20 and found[:10] == whole[:10] and found[10:] != whole[10:]
    np.testing.assert_allclose(found[10:], whole[10:], rtol=1e-5)


def test_a_finished_run_has_nothing_left(model: Path, tmp_path: Path) -> None:
    data, folder = persona(), tmp_path / "run"
    broken_run(model, data, folder, stops=[], dropout=0.0, max_steps=3)
    before, lines = read_model(folder / "checkpoint-3"), logged(folder)
    again = training.engine_of(model)
    train(again, data, folder, keeper=keeper_of(folder, again, resumed=folder / "checkpoint-3"), max_steps=3)
    assert logged(folder) == lines
    assert all(torch.equal(again.parameters[name], tensor) for name, tensor in before.items())


# ---- whole runs ------------------------------------------------------------------------------------------


def run(folder: Path, model: Path, **knobs: Any) -> tuple[Run, str]:
    """A run through the method, and what it said."""
    source = folder / "rows.jsonl"
    if not source.exists():
        rows = [{"prompt": f"say {n}: ", "completion": "abcdefgh"[: 1 + n % 8]} for n in range(24)]
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    defaults: dict[str, Any] = dict(
        model=str(model), dataset=str(source), output_dir=str(folder / "output"), device="cpu",
        report_to="none", learning_rate=5e-3, logging_steps=1, sample_prompts="none", max_steps=12,
        lora_dropout=0.1, save_steps=5, global_batch_size=2,
    )  # fmt: skip
    with (folder / "console.txt").open("w") as file:
        done = sft.run(SftConfig.model_validate({**defaults, **knobs}), Console(file=file, width=400))
    return done, (folder / "console.txt").read_text()


@pytest.fixture(scope="module")
def done(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A finished run that tests only look at."""
    return run(tmp_path_factory.mktemp("done"), model)[0]


def cut_back(folder: Path, step: int) -> None:
    """As a crash behind that step's checkpoint leaves a run."""
    for path in folder.glob("checkpoint-*"):
        if int(path.name.removeprefix("checkpoint-")) > step:
            shutil.rmtree(path)
    with (folder / "logging.jsonl").open("a") as file:
        file.write('{"step": 9, "loss": 1.0')  # half a line


@pytest.mark.compat
@pytest.mark.parametrize("asked", ["auto", "folder", "checkpoint"])
def test_a_run_goes_on_in_its_own_folder(model: Path, tmp_path: Path, asked: str) -> None:
    whole, _ = run(tmp_path, model)
    adapter, lines = read_model(whole.adapter_dir), exact(whole.folder)
    cut_back(whole.folder, 5)
    paths = {"auto": "auto", "folder": whole.folder, "checkpoint": whole.folder / "checkpoint-5"}
    done, said = run(tmp_path, model, resume_from_checkpoint=str(paths[asked]))
    assert done.folder == whole.folder and saved(done.folder) == [5, 10, 12]
    assert "resume    from step 5, 7 left; it goes on in its own run folder" in said
    assert exact(done.folder) == lines, "no line twice, none lost"
    again = read_model(done.adapter_dir)
    assert all(torch.equal(again[name], tensor) for name, tensor in adapter.items())
    assert done.args["resumed"] == [5] and done.args["config"]["resume_from_checkpoint"] is None


@pytest.mark.parametrize(
    "knobs",
    [
        dict(tuner_type="full"),
        dict(init_lora_weights="pissa"),
        pytest.param(dict(use_dora=True, loraplus_lr_ratio=4.0), marks=pytest.mark.slow),
        pytest.param(dict(modules_to_save=["lm_head"]), marks=pytest.mark.slow),
        pytest.param(dict(new_tokens=["<new>"]), marks=pytest.mark.slow),
        pytest.param(dict(optim="adamw_8bit", tuner_type="full"), marks=pytest.mark.slow),
    ],
    ids=lambda knobs: next(iter(knobs)),
)
def test_whatever_is_trained_resumes_bit_for_bit(model: Path, tmp_path: Path, knobs: dict[str, Any]) -> None:
    adapter = {} if "tuner_type" in knobs else dict(lora_dropout=0.1, lora_rank=4)
    knobs = {**dict(lora_dropout=0.0, max_steps=8), **adapter, **knobs}
    whole, _ = run(tmp_path, model, **knobs)
    trained, lines = read_model(whole.adapter_dir), exact(whole.folder)
    cut_back(whole.folder, 5)
    done, _ = run(tmp_path, model, resume_from_checkpoint="auto", **knobs)
    assert exact(done.folder) == lines
    again = read_model(done.adapter_dir)
    assert all(torch.equal(again[name], tensor) for name, tensor in trained.items())


def test_auto_without_a_checkpoint_starts_afresh_with_a_word(model: Path, tmp_path: Path) -> None:
    first, said = run(tmp_path, model, resume_from_checkpoint="auto", max_steps=2)
    assert "has no checkpoint of this run: a fresh start" in said
    other, said = run(tmp_path, model, resume_from_checkpoint="auto", max_steps=2, lora_rank=2)
    assert other.folder != first.folder and saved(other.folder) == [2]
    assert f"{first.folder}/checkpoint-2 is of another run: lora_rank 16 -> 2" in said


def test_a_fresh_start_never_takes_an_old_folder(model: Path, tmp_path: Path) -> None:
    first, _ = run(tmp_path, model, max_steps=2)
    kept = {path.name: path.read_bytes() for path in first.folder.iterdir() if path.is_file()}
    second, _ = run(tmp_path, model, max_steps=2)
    assert second.folder != first.folder
    assert kept == {path.name: path.read_bytes() for path in first.folder.iterdir() if path.is_file()}


def test_two_processes_never_train_in_one_folder(model: Path, tmp_path: Path) -> None:
    done, _ = run(tmp_path, model)
    cut_back(done.folder, 5)
    with owned(done.folder), pytest.raises(UserError, match="another process is training in this run folder"):
        run(tmp_path, model, resume_from_checkpoint="auto")
    run(tmp_path, model, resume_from_checkpoint="auto")


@pytest.mark.parametrize(
    ("knobs", "named"),
    [
        (dict(learning_rate=1e-3), "learning_rate 0.005 -> 0.001"),
        (dict(seed=1, lora_dropout=0.0), "seed 42 -> 1"),
        (dict(max_steps=20), "max_steps 12 -> 20"),
        (dict(global_batch_size=4), "global_batch_size 2 -> 4"),
        (dict(train_on="all"), "train_on assistant -> all"),
        (dict(packing=False), "packing true -> false"),
    ],
)
def test_another_config_is_refused_knob_by_knob(
    model: Path, done: Run, knobs: dict[str, Any], named: str
) -> None:
    with pytest.raises(UserError, match=f"checkpoint-12 is of another run: .*{named}") as refusal:
        run(done.folder.parents[2], model, resume_from_checkpoint=str(done.folder), **knobs)
    assert all(name in str(refusal.value) for name in knobs)


def test_other_rows_and_another_base_are_refused_under_the_same_name(tmp_path: Path) -> None:
    model = tmp_path / "toy"
    tiny.make_toy(model, template="chatml")
    done, _ = run(tmp_path, model)
    source = tmp_path / "rows.jsonl"
    kept = source.read_text()
    source.write_text(kept.replace("say 3", "say 5"))
    with pytest.raises(UserError, match="the rows are not the same under the same name"):
        run(tmp_path, model, resume_from_checkpoint=str(done.folder))
    moved = tmp_path / "moved.jsonl"
    moved.write_text(kept)
    run(tmp_path, model, resume_from_checkpoint=str(done.folder), dataset=str(moved))
    source.write_text(kept)
    tiny.make_toy(model, template="chatml", seed=1)
    with pytest.raises(UserError, match="the model's weights are not the same under the same name"):
        run(tmp_path, model, resume_from_checkpoint=str(done.folder))


def test_what_may_differ_does(model: Path, tmp_path: Path) -> None:
    done, _ = run(tmp_path, model)
    cut_back(done.folder, 5)
    again, _ = run(
        tmp_path, model, resume_from_checkpoint=str(done.folder), logging_steps=3, save_steps=4,
        per_device_train_batch_size=1, save_total_limit=1, hang_timeout=5.0, on_bad_loss="skip",
    )  # fmt: skip
    assert saved(again.folder) == [5, 12], "the one resumed from is never removed"
    assert again.args["config"]["save_steps"] == 4


def test_every_free_knob_is_a_knob() -> None:
    known = set(SftConfig.model_fields)
    assert known >= resume.FREE | resume.OF_DATA | resume.OF_MODEL
    assert not resume.FREE & (resume.OF_DATA | resume.OF_MODEL)
    for name in ("learning_rate", "seed", "lora_rank", "max_steps", "num_train_epochs", "base_precision"):
        assert name not in resume.FREE


def test_an_older_checkpoint_is_refused_while_later_ones_stand(model: Path, done: Run) -> None:
    rule = r"has later checkpoints than checkpoint-5 \(checkpoint-10, checkpoint-12\)"
    with pytest.raises(UserError, match=rule):
        run(done.folder.parents[2], model, resume_from_checkpoint=str(done.folder / "checkpoint-5"))


# ---- case 18: half-written checkpoints -------------------------------------------------------------------

KNOWN_18 = toy.expected("18-half-checkpoint")
OURS = {"adapter_model.safetensors": WEIGHTS, "optimizer.bin": STATE, "state.json": FACTS}


@pytest.fixture
def half_written(model: Path, tmp_path: Path) -> Path:
    """A run with the case's folders: a whole checkpoint, and ones that lack or cut what the case's do."""
    done, _ = run(tmp_path, model, max_steps=60, save_steps=10, global_batch_size=1)
    cut_back(done.folder, 10)
    layout = json.loads(Path(toy.case("18-half-checkpoint.layout.json")).read_text())["files"]
    whole = {name: base64.b64decode(layout[f"checkpoint-10/{name}"]) for name in OURS}
    for place in sorted({path.split("/")[0] for path in layout} - {"checkpoint-10"}):
        theirs = {p.split("/")[1]: base64.b64decode(c) for p, c in layout.items() if p.split("/")[0] == place}
        shutil.copytree(done.folder / "checkpoint-10", done.folder / place)
        for name, own in OURS.items():
            file = done.folder / place / own
            if name not in theirs:
                file.unlink()
            elif len(theirs[name]) < len(whole[name]):
                file.write_bytes(file.read_bytes()[: len(theirs[name])])
    (done.folder / ".checkpoint-60.partial").mkdir()
    return done.folder


def test_case_18_auto_takes_the_newest_whole_checkpoint(
    half_written: Path, model: Path, tmp_path: Path
) -> None:
    knobs: dict[str, Any] = dict(max_steps=60, save_steps=50, global_batch_size=1)
    done, said = run(tmp_path, model, resume_from_checkpoint="auto", **knobs)
    assert done.folder == half_written
    assert "from step 10" in said and KNOWN_18["resume_auto_picks"] == "checkpoint-10"
    for name in KNOWN_18["must_name_in_warning"]:
        assert f"warning   {name} is passed over: " in said
        assert (half_written / name).is_dir(), "nothing is deleted unasked"
    assert [damage(half_written / f"checkpoint-{n}") is None for n in (10, 20, 30, 40, 50, 60)] == [
        True, False, False, False, True, True,
    ]  # fmt: skip
    assert (half_written / "checkpoint-50.tmp").is_dir()
    assert not (half_written / ".checkpoint-60.partial").exists()


def test_case_18_an_explicit_broken_checkpoint_is_an_error_that_names_the_file(
    half_written: Path, model: Path, tmp_path: Path
) -> None:
    for number, file in ((30, WEIGHTS), (20, FACTS), (40, FACTS)):
        with pytest.raises(UserError, match=rf"checkpoint-{number}/{file} is "):
            run(
                tmp_path, model, resume_from_checkpoint=str(half_written / f"checkpoint-{number}"),
                max_steps=60, save_steps=10, global_batch_size=1,
            )  # fmt: skip


@pytest.mark.parametrize("path", ["nowhere", ".", "checkpoint-7"])
def test_a_path_without_a_checkpoint(model: Path, tmp_path: Path, path: str) -> None:
    with pytest.raises(UserError, match="is no checkpoint, and no run folder with a sound one"):
        run(tmp_path, model, resume_from_checkpoint=str(tmp_path / path))
    assert not list((tmp_path / "output").rglob("v*"))


# ---- case 20: settings that contradict each other --------------------------------------------------------


def test_case_20_contradictory_generation_settings_lose_no_weights(tmp_path: Path) -> None:
    from transformers import GenerationConfig

    known = toy.expected("20-generation-config")
    model = tmp_path / "toy"
    tiny.make_toy(model, template="alternate-nosystem")
    shutil.copy(toy.case("20-generation-config.json"), model / "generation_config.json")
    done, said = run(tmp_path, model, max_steps=1)
    (line,) = [
        line for line in said.splitlines() if line.startswith("warning   the base's generation_config")
    ]
    assert all(name in line for name in known["warns_once_about"])
    assert said.index(line) < said.index("step 1/1"), "at the start, not after the last step"
    settings = GenerationConfig.from_pretrained(done.adapter_dir)
    settings.validate(strict=True)
    assert settings.eos_token_id == known["eos_token_id_kept"]
    assert (done.adapter_dir / WEIGHTS).is_file()
