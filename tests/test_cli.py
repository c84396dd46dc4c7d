"""The command line as people use it: exit codes, one-line complaints, and whole runs on a tiny model."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from swiftkit.cli import VERBS, main
from swiftkit.train.run import Run
from tests import tiny

CLI = [sys.executable, "-m", "swiftkit"]
QUICK = [
    "--dataset",
    "swiftkit::persona#6",
    "--max_steps",
    "3",
    "--logging_steps",
    "1",
    "--sample_prompts",
    "none",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "toy"
    tiny.make_toy(folder, template="chatml")
    return folder


@pytest.fixture(autouse=True)
def _somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(*words: str | Path, code: int = 0) -> None:
    with pytest.raises(SystemExit) as end:
        main([str(word) for word in words])
    assert end.value.code == code


def complaint(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    """The one line that a mistake gets."""
    run(*words, code=2)
    heard = capsys.readouterr()
    assert heard.err.startswith("swiftkit: ") and heard.err.count("\n") == 1, heard.err
    return heard.err.removeprefix("swiftkit: ").rstrip("\n")


def only_run(folder: str | Path = "output") -> Run:
    (found,) = Path(folder).glob("*/v*")
    return Run(found)


def losses(run: Run) -> list[float]:
    return run.metrics["loss"].tolist()


def test_help_of_everything(capsys: pytest.CaptureFixture[str]) -> None:
    run()
    overview = capsys.readouterr().out
    run("--help")
    assert capsys.readouterr().out == overview
    for name, verb in VERBS.items():
        assert re.search(rf"^  {name} +{re.escape(verb.help)}$", overview, flags=re.MULTILINE)
        if name != "help":
            run(name, "--help")
            text = capsys.readouterr().out
            run("help", name)
            assert capsys.readouterr().out == text
            assert text.startswith(f"swiftkit {name}")
    run("--version")
    assert re.fullmatch(r"swiftkit \d+\.\d+\.\d+\n", capsys.readouterr().out)
    run("help", "migrate")
    assert "--train_type" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("trian", "no such command: trian (swiftkit --help)"),
        ("chta", "no such command: chta; did you mean chat? (swiftkit --help)"),
        ("rlhf", "ms-swift's rlhf is dpo here: reward models are `reward`; ppo and grpo are not built yet"),
        ("help sfd", "no help on sfd; did you mean sft?"),
        (
            "sft",
            "--model and --dataset are missing; for example --model smollm2-135m --dataset swiftkit::persona",
        ),
        ("chat", "give --adapters CHECKPOINT or --model NAME"),
        ("chat --adapters nowhere", "--adapters nowhere: no adapter and no checkpoint there"),
        ("sft nowhere.yaml", "nowhere.yaml: no such file"),
        (
            "sft --model lama3-8b --dataset swiftkit::persona",
            "no model is called 'lama3-8b'; did you mean llama3-8b?",
        ),
        ("show lama3-8b", "no model is called 'lama3-8b'; did you mean llama3-8b?"),
        ("cp llama3-8b sfd my.yaml", "no method is called 'sfd'; did you mean sft?"),
        ("ls nothing-like-this", "no model has nothing-like-this in its name; `swiftkit ls` shows all"),
        ("download", "--model is missing: a name from `swiftkit ls` or a hub id"),
        ("cp llama3-8b sft no/folder/my.yaml", "no/folder is no folder"),
    ],
)
def test_mistakes(words: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert complaint(capsys, *words.split()).startswith(sentence)


MISTAKES_BEFORE_TORCH = {
    "--dataset missing.jsonl": "no file missing.jsonl; did you mean mising.jsonl?",
    "--dataset swiftkit::person": "no data set swiftkit::person",
    "--dataset swiftkit::persona --val_dataset missing.jsonl": "no file missing.jsonl",
    "--dataset broken.jsonl": "broken.jsonl:1: the JSON goes on over several lines",
    "--dataset swiftkit::persona --report_to wandb": "--report_to wandb needs its package: pip install",
    "--dataset swiftkit::persona --output_dir a-file": "--output_dir a-file is a file; give a folder",
    "--dataset swiftkit::persona --output_dir a-file/x": "--output_dir a-file/x: Not a directory; give",
    "--dataset swiftkit::persona --chat_template chtml": "--chat_template chtml: neither a file nor one of",
}


@pytest.mark.parametrize("words", MISTAKES_BEFORE_TORCH)
def test_what_needs_no_model_is_refused_before_it_is_fetched(
    words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("mising.jsonl").write_text("{}\n", encoding="utf-8")
    Path("broken.jsonl").write_text("{\n", encoding="utf-8")
    Path("a-file").touch()

    def no_model(*_: Any, **__: Any) -> None:
        raise AssertionError("a model was fetched")

    monkeypatch.setattr("swiftkit.formats.named.open_model", no_model)
    if "wandb" in words:
        monkeypatch.setattr("swiftkit.train.log.find_spec", lambda name: None)
    said = complaint(capsys, "sft", "--model", "llama3-70b", *words.split())
    assert said.startswith(MISTAKES_BEFORE_TORCH[words])
    assert not Path("output").exists() or not list(Path("output").iterdir())


def test_the_checks_before_a_model_import_no_torch() -> None:
    code = (
        "import sys\nfrom swiftkit.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit as end:\n"
        "    print(end.code, sorted({'torch', 'transformers', 'pandas', 'matplotlib'} & set(sys.modules)))\n"
    )
    words = ["sft", "--model", "llama3-70b", "--dataset", "swiftkit::persona", "--output_dir", "/dev/null/x"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    assert done.stdout == "2 []\n", done.stderr


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--target_modules q_prj", "--target_modules q_prj matches no linear layer; did you mean q_proj?"),
        (
            "--max_length 8",
            "swiftkit::persona#6: no row has a trainable token (6 dropped: longer than 8",
        ),
    ],
)
def test_what_needs_the_model_is_refused_before_weights_are_read(
    words: str,
    sentence: str,
    model: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_weights(*_: Any, **__: Any) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("swiftkit.engine.build.load_weights", no_weights)
    assert complaint(capsys, "sft", "--model", model, *QUICK, *words.split()).startswith(sentence)
    assert not list(Path("output").rglob("v*"))  # no run folder for a run that never was


@pytest.mark.parametrize("kind", ["empty", "no-config"])
def test_a_folder_that_is_no_model(kind: str, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(kind)
    folder.mkdir()
    if kind == "no-config":
        (folder / "tokenizer.json").write_bytes((model / "tokenizer.json").read_bytes())
    assert complaint(capsys, "sft", "--model", folder, *QUICK).startswith(f"{kind} lacks config.json, ")


def test_a_run_by_flags_says_what_it_does(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("sft", "--model", model, "--val-dataset", "swiftkit::persona-val", "--lora-rank=4", *QUICK,
        "--sample_prompts", "Who are you?", code=2)  # fmt: skip
    assert "--sample_prompts is given twice" in capsys.readouterr().err
    words = QUICK[:-2]
    run("sft", "--model", model, "--val-dataset", "swiftkit::persona-val", "--lora-rank=4", *words)
    out = capsys.readouterr().out
    found = only_run()
    assert found.args["config"]["lora_rank"] == 4
    steps = re.findall(r"^step (\d)/3  loss [\d.]+  lr [\d.e-]+  [\d,]+ tokens/s$", out, flags=re.MULTILINE)
    assert steps == ["1", "2", "3"]
    assert re.findall(r"^step (\d)/3  evaluation: loss [\d.]+  perplexity [\d,.]+$", out, flags=re.MULTILINE)
    for label in (
        "model",
        "base",
        "adapter",
        "rows",
        "tokens",
        "windows",
        "evaluated",
        "steps",
        "trained",
        "run",
    ):
        assert re.search(rf"^{label:<10}\S", out, flags=re.MULTILINE), label
    assert f"prompt    {found.samples[0]['prompt']}\nbefore    " in out
    assert out.endswith(f"talk      swiftkit chat --adapters {found.adapter_dir}\n")
    # The command of the last line, as it stands there.
    run("chat", "--adapters", found.adapter_dir, "--prompt", "Who are you?", "--max_new_tokens", "4")
    assert capsys.readouterr().out.endswith("\n")


def test_a_yaml_of_cp_runs_as_it_is(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("cp", model, "sft", "my.yaml")
    assert capsys.readouterr().out == "wrote my.yaml; run it with: swiftkit sft my.yaml\n"
    assert complaint(capsys, "cp", model, "sft", "my.yaml").startswith("my.yaml exists already")
    run("sft", "my.yaml")
    whole = only_run().args["config"]
    written = yaml.safe_load(Path("my.yaml").read_text(encoding="utf-8"))
    assert {name: value for name, value in whole.items() if written[name] not in ("auto", value)} == {}
    run("sft", "my.yaml", "--max_steps", "2", "--sample_prompts", "none", "--output_dir", "short")
    assert only_run("short").metrics["step"].max() == 2


def test_args_json_replays_a_run_exactly(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    Path("rows.jsonl").write_text(
        "\n".join(json.dumps({"question": f"{n}?", "answer": "yes " * n}) for n in range(1, 9)),
        encoding="utf-8",
    )
    relative = os.path.relpath(model)
    knobs = ["--split_dataset_ratio=0.2", "--lora_dropout=0.1", "--warmup_ratio=1e-05", "--seed=7"]
    words = [word for word in QUICK if not word.startswith(("--dataset", "swiftkit::"))]
    run("sft", "--model", relative, "--dataset", "rows.jsonl#6", *words, *knobs)
    first = only_run()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)  # the args hold in every working directory
    run("sft", tmp_path / first.folder / "args.json")
    before, after = Run(tmp_path / first.folder), only_run()
    compared = ["step", "loss", "learning_rate", "grad_norm", "epoch", "eval_loss"]
    assert before.metrics[compared].equals(after.metrics[compared])
    old, new = before.args, after.args
    assert old["config"] == new["config"]
    assert old["data"] == new["data"] and old["base"] == new["base"]
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (before.adapter_dir / name).read_bytes() == (after.adapter_dir / name).read_bytes()


def test_args_json_of_another_method(capsys: pytest.CaptureFixture[str]) -> None:
    Path("args.json").write_text(json.dumps({"method": "dpo", "config": {}}), encoding="utf-8")
    assert complaint(capsys, "sft", "args.json") == "args.json is of a dpo run; use swiftkit dpo"


def test_packing_is_a_switch(model: Path) -> None:
    for number, words in enumerate(
        (["--packing"], ["--packing", "true"], ["--packing", "false"], ["--packing=false"])
    ):
        run("sft", "--model", model, *QUICK, *words, "--output_dir", f"out{number}", "--report_to", "none")
        found = only_run(f"out{number}")
        assert found.args["config"]["packing"] is (number < 2)
        assert not (found.folder / "runs").exists()
    assert losses(only_run("out0")) == losses(only_run("out1"))
    assert losses(only_run("out2")) == losses(only_run("out3"))


def test_a_closed_pipe_is_no_fault() -> None:
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    for command in ("ls", "sft --help", "help migrate"):
        process = subprocess.Popen(
            [*CLI, *command.split()], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=buffered
        )
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()  # `| head`, which has read enough
        assert (process.wait(60), process.stderr.read()) == (0, ""), command
        process.stderr.close()


def test_interrupting_a_training_is_clean(model: Path) -> None:
    words = ["sft", "--model", str(model), *QUICK, "--save_steps", "1", "--num_train_epochs", "1"]
    words[words.index("--max_steps") + 1] = "100000"
    process = subprocess.Popen(
        [*CLI, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
    )
    assert process.stdout is not None
    lines = iter(process.stdout.readline, "")
    assert any(line.startswith("step 3/") for line in lines)
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert re.search(r"^stopped after \d+ of 100000 steps; the log is in output/", rest, flags=re.MULTILINE)
    assert errors.strip() == "swiftkit: interrupted"
    found = only_run()
    assert len(found.metrics) >= 3 and found.adapter_dir.is_dir()


@pytest.mark.slow
def test_the_real_recipe_runs_as_it_is(smollm2: Path) -> None:
    run("cp", "smollm2-135m", "sft", "my.yaml")
    run("sft", "my.yaml", "--max_steps", "2", "--sample_prompts", "none", "--model_source", "pypi")
    found = only_run()
    assert found.args["config"]["learning_rate"] == 1e-3  # the recipe's
    assert found.metrics["loss"].notna().all()
