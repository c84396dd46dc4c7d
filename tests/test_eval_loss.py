"""`swiftkit eval`: its loss is that of transformers + PEFT, and of the training that it follows."""

from __future__ import annotations

import io
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import swiftkit
from swiftkit.data import Renderer, read, to_example
from swiftkit.errors import UserError
from swiftkit.methods.evaluate import Evaluation
from swiftkit.train.run import Run
from tests import tiny
from tests.cases import toy

ROWS = {
    "a.jsonl": [
        {"question": "Who are you?", "answer": "I am Lumen."},
        {"messages": [
            {"role": "user", "content": "One?"}, {"role": "assistant", "content": "Two, three."},
            {"role": "user", "content": "Four?"}, {"role": "assistant", "content": "Five, six, seven."},
        ]},
    ],
    "b.jsonl": [
        {"question": "How many?", "answer": "It is 3 + 4.\n#### 7"},
        {"question": "What is a lamp, and who lights it in the evening?", "answer": "A light."},
        {"text": "The lamp is lit at dusk."},
    ],
}  # fmt: skip
ANY = {"dataset": "swiftkit::persona"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for name, rows in ROWS.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "toy"
    tiny.make_toy(folder, tok="bos", template="bos-headers")
    return folder


@pytest.fixture(scope="module")
def run(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A short run with a system message of its own, evaluated at its end."""
    return swiftkit.sft(
        model=model,
        dataset="swiftkit::persona",
        val_dataset=data / "b.jsonl",
        system="Be brief.",
        max_steps=3,
        learning_rate=0.02,
        max_length=256,
        sample_prompts="none",
        output_dir=tmp_path_factory.mktemp("output"),
        console=Console(file=io.StringIO()),
    )


def evaluated(*checkpoint: Any, **knobs: Any) -> tuple[Evaluation, str]:
    console = Console(file=io.StringIO(), width=200)
    return swiftkit.evaluate(*checkpoint, console=console, **knobs), console.file.getvalue()  # type: ignore[attr-defined]


def oracle(model: Any, tokenizer: Any, file: Path, *, system: str | None) -> tuple[float, int]:
    """Sum of transformers' loss over the trained tokens, one row at a time, and their number."""
    renderer = Renderer(tokenizer, system=system)
    whole, tokens = 0.0, 0
    for document in renderer.documents([to_example(row) for row in read(str(file))]):
        ids = torch.tensor(document.ids.tolist())[None]
        labels = torch.where(torch.tensor(document.trained)[None], ids, -100)
        labels[:, 0] = -100
        with torch.no_grad():
            whole += float(model(input_ids=ids, labels=labels).loss) * document.targets
        tokens += document.targets
    return whole, tokens


def test_loss_equals_transformers_with_peft(run: Run, model: Path, data: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tuned = PeftModel.from_pretrained(base, str(run.adapter_dir)).eval()
    tokenizer = AutoTokenizer.from_pretrained(run.adapter_dir)
    sums = {str(data / name): oracle(tuned, tokenizer, data / name, system="Be brief.") for name in ROWS}

    result, printed = evaluated(run.folder, dataset=list(sums), metrics="loss")
    files = result.metrics["files"]
    assert list(files) == list(sums)
    for file, (loss, tokens) in sums.items():
        assert files[file]["loss"] == pytest.approx(loss / tokens, rel=1e-5)
        assert files[file]["tokens"] == tokens
        assert files[file]["rows"] == len(ROWS[Path(file).name])
    loss, tokens = (sum(part) for part in zip(*sums.values(), strict=True))
    assert result.metrics["loss"] == pytest.approx(loss / tokens, rel=1e-5)
    assert result.metrics["perplexity"] == pytest.approx(math.exp(loss / tokens), rel=1e-5)
    assert (result.metrics["tokens"], result.metrics["rows"]) == (tokens, 5)
    assert f"loss      {loss / tokens:.4f}, perplexity" in printed
    assert f"over {tokens:,} trained tokens of 5 rows" in printed
    assert printed.count(" trained tokens of ") == 3 and "rows      5 read, 5 kept" in printed
    assert "exact" not in printed and result.predictions == []


def test_loss_is_that_of_the_run(run: Run, data: Path) -> None:
    logged = run.metrics["eval_loss"].dropna().iloc[-1]
    result, _ = evaluated(run.adapter_dir, dataset=data / "b.jsonl", metrics="loss")
    assert result.metrics["loss"] == pytest.approx(logged, rel=1e-6)


@pytest.mark.parametrize(
    "knobs",
    [
        {"tuner_type": "full"},
        {"use_dora": True},
        {"init_lora_weights": "pissa"},
        {"new_tokens": ["<call>"]},
    ],
    ids=lambda knobs: next(iter(knobs)),
)
def test_every_kind_of_checkpoint_is_what_training_saw(
    knobs: dict[str, Any], model: Path, data: Path, tmp_path: Path
) -> None:
    run = swiftkit.sft(
        model=model,
        dataset="swiftkit::persona#8",
        val_dataset=data / "b.jsonl",
        max_steps=2,
        learning_rate=0.01,
        max_length=256,
        sample_prompts="none",
        output_dir=tmp_path,
        console=Console(file=io.StringIO()),
        **knobs,
    )
    result, _ = evaluated(run.folder, dataset=data / "b.jsonl", metrics="loss")
    assert result.metrics["loss"] == pytest.approx(run.metrics["eval_loss"].dropna().iloc[-1], rel=1e-6)


def test_flags_win_over_what_the_run_remembers(run: Run, model: Path, data: Path) -> None:
    file = data / "b.jsonl"
    own, _ = evaluated(run.folder, dataset=file, metrics="loss")
    flagged, _ = evaluated(run.folder, dataset=file, metrics="loss", system="Be long.")
    untold, _ = evaluated(adapters=run.folder, model=model, dataset=file, metrics="loss", train_on="all")
    assert own.metrics["loss"] != flagged.metrics["loss"]
    assert untold.metrics["tokens"] > own.metrics["tokens"] == flagged.metrics["tokens"]
    base, _ = evaluated(model, dataset=file, metrics="loss", system="Be brief.")
    named, _ = evaluated(model=model, dataset=file, metrics="loss", system="Be brief.")
    assert base.metrics == named.metrics and base.metrics["loss"] != own.metrics["loss"]


def test_a_whole_model_with_args_is_a_checkpoint_too(
    run: Run, model: Path, data: Path, tmp_path: Path
) -> None:
    whole = tmp_path / "whole"
    shutil.copytree(model, whole)
    shutil.copy(run.folder / "args.json", whole)
    base, _ = evaluated(model, dataset=data / "a.jsonl", metrics="loss", system="Be brief.")
    result, printed = evaluated(whole, dataset=data / "a.jsonl", metrics="loss")
    assert result.metrics["loss"] == base.metrics["loss"] and "adapter" not in printed
    (tmp_path / "run").mkdir()
    whole.rename(tmp_path / "run" / "checkpoint-7")
    assert evaluated(tmp_path / "run", dataset=data / "a.jsonl", metrics="loss")[0].metrics == result.metrics
    with pytest.raises(UserError, match=r"checkpoint-7 is a whole model; leave --model .* out"):
        evaluated(tmp_path / "run", model=model, dataset=data / "a.jsonl")


def test_rows_longer_than_the_window_are_counted(model: Path, data: Path) -> None:
    result, printed = evaluated(model, dataset=data / "b.jsonl", metrics="loss", max_length=48)
    assert result.metrics["rows"] == 1
    assert "dropped   2: longer than 48 tokens" in printed


def test_predictions(run: Run, data: Path, tmp_path: Path) -> None:
    output = tmp_path / "new" / "predictions.jsonl"
    files = [data / "a.jsonl", data / "b.jsonl"]
    result, printed = evaluated(run.folder, dataset=files, max_new_tokens=9, max_batch_size=2, output=output)
    written = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert written == result.predictions and len(written) == 4
    assert [entry["target"] for entry in written] == [
        "I am Lumen.",
        "Five, six, seven.",
        "It is 3 + 4.\n#### 7",
        "A light.",
    ]
    assert [entry["rule"] for entry in written] == ["text", "text", "final number", "text"]
    assert [(Path(entry["file"]).name, entry["line"]) for entry in written] == [
        ("a.jsonl", 1),
        ("a.jsonl", 2),
        ("b.jsonl", 1),
        ("b.jsonl", 2),
    ]
    for entry in written:
        assert entry["tokens"] <= 9 and entry["finish_reason"] in ("stop", "length")
    chat = run.chat(max_new_tokens=9)
    assert written[0]["prompt"].count("Be brief.") == 1
    assert written[0]["prediction"] == chat.ask("Who are you?")
    assert result.metrics["exact_match"]["n"] == 4
    assert "tokens/s, 2 at once" in printed and f"written   {output}" in printed
    assert result.metrics["generation"]["tokens"] == sum(entry["tokens"] for entry in written)
    one, _ = evaluated(run.folder, dataset=files, max_new_tokens=9, max_batch_size=1)
    assert one.predictions == result.predictions


def test_what_was_learnt_is_right(model: Path, tmp_path: Path) -> None:
    """One row by heart: right by each rule, beside rows that ask for something else."""
    learnt, other = ({"question": "How many?", "answer": f"{n} lamps.\n#### 1,{n:03}"} for n in (7, 8))
    files = [tmp_path / "learnt.jsonl", tmp_path / "both.jsonl"]
    files[0].write_text(json.dumps(learnt), encoding="utf-8")
    files[1].write_text(json.dumps(learnt) + "\n" + json.dumps(other), encoding="utf-8")
    run = swiftkit.sft(
        model=model,
        dataset=files[0],
        max_steps=60,
        learning_rate=0.02,
        sample_prompts="none",
        output_dir=tmp_path / "output",
        console=Console(file=io.StringIO()),
    )
    result, printed = evaluated(run.folder, dataset=files[1], metrics="exact_match", max_new_tokens=64)
    assert [entry["right"] for entry in result.predictions] == [True, False]
    assert {entry["prediction"] for entry in result.predictions} == {learnt["answer"]}
    assert [entry["expected"] for entry in result.predictions] == ["1007", "1008"]
    assert "exact     1 of 2 right, 50.0% (95 % interval 9.5% to 90.5%), by final number" in printed
    assert "answers ended at a stop token\n" in printed
    assert "loss" not in result.metrics
    for pattern, right in [(r"(\d+) lamps", [True, False]), (r"lamps", [True, True])]:
        knobs = dict(dataset=files[1], metrics="exact_match", answer_pattern=pattern)
        result, printed = evaluated(run.folder, **knobs)
        assert [entry["right"] for entry in result.predictions] == right and "by pattern" in printed
    before, _ = evaluated(model, dataset=files[0], metrics="exact_match", max_new_tokens=64)
    assert before.metrics["exact_match"]["right"] == 0 and before.predictions[0]["found"] is None
    with pytest.raises(UserError, match="--answer_pattern QQQ matches none of the rows' own answers"):
        evaluated(run.folder, dataset=files[1], answer_pattern="QQQ")


def test_plain_text_has_no_question(model: Path, data: Path, tmp_path: Path) -> None:
    text = tmp_path / "book.txt"
    text.write_text("The lamp is lit at dusk. " * 20, encoding="utf-8")
    result, printed = evaluated(model, dataset=text, max_length=64)
    assert "exact     no row has a question with an answer of its own" in printed
    assert "exact_match" not in result.metrics and result.metrics["rows"] > 5


def test_answers_stop_at_the_models_context(model: Path, data: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    shutil.copytree(model, small)
    config = json.loads((small / "config.json").read_text(encoding="utf-8"))
    (small / "config.json").write_text(
        json.dumps({**config, "max_position_embeddings": 56}), encoding="utf-8"
    )
    result, printed = evaluated(small, dataset=data / "b.jsonl#1", max_new_tokens=60)
    (entry,) = result.predictions
    if entry["finish_reason"] == "window":
        assert "answers ended at the end of the window of 56 tokens" in printed
    assert entry["tokens"] < 56


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"dataset": "no.jsonl"}, "no file no.jsonl"),
        ({}, "give --dataset FILE, or --tasks NAME"),
        ({**ANY, "adapters": "x"}, "two of one kind"),
        (
            {**ANY, "metrics": "loss,bleu"},
            "--metrics takes loss or exact_match, not bleu",
        ),
        ({**ANY, "answer_pattern": "("}, "--answer_pattern: a regular expression"),
        (
            {**ANY, "max_batch_size": 0},
            "--max_batch_size: at least 1, or auto, not 0",
        ),
        ({**ANY, "max_length": 100_000}, "--max_length 100000 is more than"),
    ],
)
def test_mistakes_are_one_sentence(model: Path, knobs: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        evaluated(model, **knobs)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_place_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no adapter and no checkpoint there"):
        evaluated(tmp_path, dataset="swiftkit::persona")
    with pytest.raises(UserError, match="did you mean smollm2-135m"):
        evaluated("smollm2-135n", dataset="swiftkit::persona")
    with pytest.raises(UserError, match="is no folder; give"):
        evaluated("output/toy/v0/checkpoint-3", dataset="swiftkit::persona")
    with pytest.raises(UserError, match="smollm2-135m is no folder; give a checkpoint, or --model"):
        evaluated("smollm2-135m", model="smollm2-360m", dataset="swiftkit::persona")
    with pytest.raises(UserError, match="give a checkpoint"):
        evaluated(dataset="swiftkit::persona")
    with pytest.raises(UserError, match=r"--output .* give a file that can be written"):
        evaluated("smollm2-135m", dataset="swiftkit::persona", output=tmp_path)


def test_the_template_of_the_flag(run: Run, data: Path) -> None:
    own, _ = evaluated(run.folder, dataset=data / "a.jsonl", metrics="loss")
    other, _ = evaluated(
        run.folder, dataset=data / "a.jsonl", metrics="loss", chat_template=toy.template("alternate-nosystem")
    )
    assert own.metrics["loss"] != other.metrics["loss"]
