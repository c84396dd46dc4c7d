"""The Python door: the same words, the same precedence, and a run that can be looked at."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import swiftkit
from swiftkit import registry
from swiftkit.api import configure_sft, read_config
from swiftkit.cli import main
from swiftkit.errors import UserError
from swiftkit.train.run import Run, create_folder
from tests import tiny

PERSONA = "swiftkit::persona"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "toy"
    tiny.make_toy(folder, template="chatml")
    return folder


@pytest.fixture(autouse=True)
def _somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def train(model: Path, *file: str | Path, **knobs: Any) -> Run:
    quick = dict(model=model, dataset=f"{PERSONA}#6", max_steps=3, logging_steps=1, sample_max_new_tokens=4)
    return swiftkit.sft(*file, console=Console(file=io.StringIO()), **{**quick, **knobs})


def yaml(**knobs: Any) -> str:
    text = "".join(f"{name}: {value}\n" for name, value in knobs.items())
    Path("my.yaml").write_text(text, encoding="utf-8")
    return "my.yaml"


def test_flags_win_over_the_file_over_the_recipe_over_the_schema() -> None:
    recipe = configure_sft({"model": "smollm2-135m", "dataset": PERSONA})
    assert recipe.learning_rate == 1e-3  # the recipe's; the schema says 1e-4
    assert recipe.lora_rank == 16  # the schema's
    file = yaml(model="smollm2-135m", dataset=PERSONA, learning_rate="5e-4", lora_rank=8, seed=3)
    filed = configure_sft({}, file=file)
    assert (filed.learning_rate, filed.lora_rank, filed.seed) == (5e-4, 8, 3)
    flagged = configure_sft({"learning-rate": "2e-4", "seed": 4}, file=file)
    assert (flagged.learning_rate, flagged.lora_rank, flagged.seed) == (2e-4, 8, 4)
    # A flag that names another model takes that model's recipe along.
    file = yaml(model="smollm2-135m", dataset=PERSONA)
    other = registry.defaults(registry.resolve("llama3-8b"), "sft")
    assert configure_sft({"model": "llama3-8b"}, file=file).learning_rate == other["learning_rate"] != 1e-3


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("learing_rate", 1, "unknown name --learing_rate; did you mean --learning_rate?"),
        ("learing-rate", 1, "unknown name --learing_rate; did you mean --learning_rate?"),
        ("zzz", 1, "unknown name --zzz"),
        ("lora_rank", "many", "--lora_rank takes a whole number, not many"),
        (
            "report_to",
            "tensorbord",
            "--report_to takes tensorboard, wandb or none, not tensorbord; did you mean tensorboard?",
        ),
        ("stream", "true", "ms-swift's --stream does not exist here: answers are always streamed"),
    ],
)
def test_three_doors_refuse_in_the_same_words(
    name: str, value: Any, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError) as by_python:
        swiftkit.sft(model="smollm2-135m", dataset=PERSONA, **{name: value})
    with pytest.raises(UserError) as by_file:
        swiftkit.sft(yaml(model="smollm2-135m", dataset=PERSONA, **{name: value}))
    with pytest.raises(SystemExit):
        main(["sft", "--model", "smollm2-135m", "--dataset", PERSONA, f"--{name}", str(value)])
    by_flag = capsys.readouterr().err
    assert str(by_python.value) == words
    assert str(by_file.value) == f"my.yaml:3: {words}"
    assert by_flag == f"swiftkit: {words}\n"


def test_three_doors_translate_the_same_words() -> None:
    for config in (
        configure_sft({"model_id_or_path": "smollm2-135m", "dataset": PERSONA, "torch_dtype": "bfloat16"}),
        configure_sft(
            {}, file=yaml(model_id_or_path="smollm2-135m", dataset=PERSONA, torch_dtype="bfloat16")
        ),
    ):
        assert (config.model, config.base_precision) == ("smollm2-135m", "bf16")


def test_values_of_ms_swift_that_are_no_text() -> None:
    for config in (
        configure_sft({"model": "smollm2-135m", "dataset": PERSONA, "quant_bits": 4, "use_hf": True}),
        configure_sft({}, file=yaml(model="smollm2-135m", dataset=PERSONA, quant_bits=4, use_hf="true")),
    ):
        assert (config.base_precision, config.model_source) == ("nf4", "hf")


def test_a_run_s_folder_does_not_take_its_model_s_name() -> None:
    for _ in range(2):
        config = configure_sft({"model": "smollm2-135m", "dataset": PERSONA, "output_dir": "."})
        assert config.learning_rate == 1e-3  # the recipe's
        create_folder(config.output_dir, config.model)
    with pytest.raises(UserError, match=r"^\./nofolder/x is no folder; give a model folder, "):
        configure_sft({"model": "./nofolder/x", "dataset": PERSONA})


def test_a_bad_first_row_stops_only_a_run_that_does_not_skip_it() -> None:
    good = '{"question": "One?", "answer": "Two."}\n'
    Path("rows.jsonl").write_text("{broken\n" + good, encoding="utf-8")
    knobs = {"model": "smollm2-135m", "dataset": "rows.jsonl"}
    with pytest.raises(UserError, match=r"^rows\.jsonl:1: "):
        configure_sft(knobs)
    assert configure_sft({**knobs, "skip_bad_rows": True}).dataset == ["rows.jsonl"]


def test_a_hub_s_rows_are_streamed_from_the_first_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, bool]] = []

    def read(source: str, *, on_bad: object, streaming: bool) -> Iterator[None]:
        asked.append((source, streaming))
        return iter(())

    monkeypatch.setattr("swiftkit.data.read", read)
    for streaming in (False, True):
        configure_sft({"model": "smollm2-135m", "dataset": "hf::owner/rows", "streaming": streaming})
    assert asked == [("hf::owner/rows", False), ("hf::owner/rows", True)]


EMPTY = "my.yaml is empty; `swiftkit cp MODEL sft FILE` writes a complete config"
NO_MAPPING = "my.yaml: a config is a mapping of names to values, as `swiftkit cp MODEL sft FILE` writes"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", EMPTY),
        (" \n\n", EMPTY),
        ("# nothing\n", NO_MAPPING),
        ("- model\n", NO_MAPPING),
        (
            "seed: 1\n\tmodel: x\n",
            "my.yaml:2: not valid YAML: found character '\\t' that cannot start any token; "
            "use spaces, not tabs",
        ),
        ("model: [x\nseed: 1\n", "my.yaml:2: not valid YAML: expected ',' or ']', but got ':'"),
        ("seed: 1\nmodel: x\nseed: 2\n", "my.yaml:3: seed stands twice, first at my.yaml:1"),
        ("lora-rank: 1\nlora_rank: 2\n", "my.yaml:2: --lora_rank is given twice"),
        ("model: x\ndataset: y\n1: 2\n", "my.yaml:3: unknown name --1"),
    ],
)
def test_a_file_that_is_no_config(text: str, words: str) -> None:
    Path("my.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as caught:
        configure_sft({}, file="my.yaml")
    assert str(caught.value) == words


def test_files_that_cannot_be_read() -> None:
    Path("bytes.yaml").write_bytes(b"model: \xff\n")
    with pytest.raises(UserError, match=r"^bytes.yaml cannot be read as UTF-8 text: "):
        read_config(Path("bytes.yaml"), verb="sft")
    Path("half.json").write_text('{\n"a": ', encoding="utf-8")
    with pytest.raises(UserError, match=r"^half.json:2: not valid JSON: "):
        read_config(Path("half.json"), verb="sft")
    with pytest.raises(UserError, match=r"^\. cannot be read"):
        read_config(Path("."), verb="sft")


def test_a_file_with_a_byte_order_mark_and_anchors_is_read() -> None:
    text = "\ufeffmodel: &m smollm2-135m\ndataset: [swiftkit::persona]\nrevision: *m\n"
    Path("my.yaml").write_text(text, encoding="utf-8")
    assert {name: value for name, (value, _) in read_config(Path("my.yaml"), verb="sft").items()} == {
        "model": "smollm2-135m", "dataset": ["swiftkit::persona"], "revision": "smollm2-135m",
    }  # fmt: skip


def test_a_run_can_be_looked_at(model: Path) -> None:
    run = train(model, val_dataset="swiftkit::persona-val", eval_steps=1, seed=5)
    metrics = run.metrics
    assert metrics["step"].tolist() == [0, 1, 1, 2, 2, 3, 3]
    assert metrics["loss"].notna().sum() == 3 and metrics["eval_loss"].notna().sum() == 4
    for curve in ("loss", "learning_rate", "tokens_per_second"):
        picture = run.plot(curve)._repr_png_()  # type: ignore[attr-defined]
        assert picture.startswith(b"\x89PNG\r\n") and len(picture) > 5_000
    with pytest.raises(UserError, match="no curve 'los'; there are loss, learning_rate, tokens_per_second"):
        run.plot("los")
    assert [sample.keys() for sample in run.samples] == [{"prompt", "before", "after"}] * 3
    assert run.samples[0]["prompt"] == "Who are you?"
    assert run.adapter_dir == run.folder / "checkpoint-3"
    session = run.chat(max_new_tokens=4)
    # What the end of the run showed is what its checkpoint says.
    assert session.ask("Who are you?") == run.samples[0]["after"]
    assert repr(run) == f"Run({str(run.folder)!r})"
    assert Run(run.folder).args["config"]["seed"] == 5


def test_paths_and_plain_values_are_taken(model: Path) -> None:
    Path("rows.jsonl").write_text('{"question": "One?", "answer": "Two."}\n', encoding="utf-8")
    run = train(model, dataset=[Path("rows.jsonl")], output_dir=Path("there"), sample_prompts="Hello?")
    assert run.folder.parts[:2] == ("there", "toy")
    assert run.args["config"]["dataset"] == [str(Path("rows.jsonl").resolve())]
    assert run.args["config"]["model"] == str(model)
    assert [sample["prompt"] for sample in run.samples] == ["Hello?"]


def test_python_yaml_and_args_json_give_one_run(model: Path) -> None:
    knobs = dict(max_steps=4, learning_rate=1e-2, lora_rank=4, packing=False)
    by_python = train(model, **knobs, sample_prompts="none")
    file = yaml(model=model, dataset=f"{PERSONA}#6", logging_steps=1, sample_prompts="none",
                sample_max_new_tokens=4, **{**knobs, "packing": "no", "learning_rate": "1e-2"})  # fmt: skip
    quiet = Console(file=io.StringIO())
    by_file = swiftkit.sft(file, console=quiet)
    replay = swiftkit.sft(by_python.folder / "args.json", console=quiet)
    changed = swiftkit.sft(by_python.folder / "args.json", console=quiet, seed=1)
    losses = [run.metrics["loss"].tolist() for run in (by_python, by_file, replay, changed)]
    assert losses[0] == losses[1] == losses[2] != losses[3]
    assert by_python.args["config"] == by_file.args["config"] == replay.args["config"]


def test_the_package_is_light_and_has_its_doors() -> None:
    code = "import sys, swiftkit; print(sorted({'torch', 'rich', 'yaml', 'pydantic'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    assert swiftkit.Run is Run and {"sft", "Run"} <= set(swiftkit.__all__)
    with pytest.raises(AttributeError, match="no attribute 'stf'"):
        swiftkit.stf  # noqa: B018
