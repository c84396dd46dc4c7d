"""lm-evaluation-harness over our engine: the same numbers as over its own transformers model."""

from __future__ import annotations

import importlib.util
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import swiftkit
from swiftkit.data.tokenizer import load_tokenizer, stop_ids
from swiftkit.engine import Engine
from swiftkit.errors import UserError
from tests import tiny

INSTALLED = importlib.util.find_spec("lm_eval") is not None
needs_harness = pytest.mark.skipif(not INSTALLED, reason="lm-evaluation-harness (lm_eval) is not installed")

CHOICE = """
task: lamp_choice
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_choice: "{{choices}}"
doc_to_target: label
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
"""
ANSWER = """
task: lamp_answer
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["e", "\\n\\n"], max_gen_toks: 12, do_sample: false}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
"""
TEXT = """
task: lamp_text
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}} {{choices[0]}} {{choices[1]}}"
metric_list:
  - {metric: word_perplexity}
  - {metric: bits_per_byte}
"""
ROWS = [
    {"question": "Who lights the lamp?", "choices": ["The keeper", "A gull", "Nobody at all"], "label": 0},
    {"question": "How many steps has the tower, from door to lamp?", "choices": ["99", "12"], "label": 1},
    {"question": "When?", "choices": ["At dusk", "At dawn", "At noon, every day"], "label": 0},
    {"question": "Where does the light stand, and what is its name?", "choices": ["At Gull Rock", "x"],
     "label": 0},
    {"question": "What colour is it?", "choices": ["red", "white", "green", "blue"], "label": 1},
]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "toy"
    tiny.make_toy(folder, tok="bos", template="bos-headers")
    return folder


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    file = folder / "lamp.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    for name, text in (("choice", CHOICE), ("answer", ANSWER), ("text", TEXT)):
        (folder / f"{name}.yaml").write_text(text.replace("FILE", str(file)), encoding="utf-8")
    return folder


def models(folder: Path, *, window: int | None) -> tuple[Any, Any]:
    """The same checkpoint in our engine and in the harness's own model."""
    from lm_eval.models.huggingface import HFLM

    from swiftkit.methods.harness import HarnessModel

    engine = Engine.load(folder, dtype=torch.float32, device=torch.device("cpu"))
    tokenizer = load_tokenizer(folder)
    ours = HarnessModel(engine, tokenizer, stops=stop_ids(tokenizer, folder), window=window, slots=2)
    theirs = HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=1, max_length=window)
    return ours, theirs


def requests(kind: str, *arguments: tuple[Any, ...]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, args, index) for index, args in enumerate(arguments)]  # type: ignore[arg-type]


@needs_harness
@pytest.mark.parametrize("window", [None, 24])
def test_likelihoods_equal_those_of_transformers(model: Path, window: int | None) -> None:
    ours, theirs = models(model, window=window or 256)
    pairs = [(row["question"], f" {choice}") for row in ROWS for choice in row["choices"]]
    pairs += [("", "The keeper"), ("Who lights it? ", "The keeper"), ("<s>Who", " lights it")]
    for one, other in zip(
        ours.loglikelihood(requests("loglikelihood", *pairs)),
        theirs.loglikelihood(requests("loglikelihood", *pairs), disable_tqdm=True),
        strict=True,
    ):
        assert one[0] == pytest.approx(other[0], abs=1e-4) and one[1] == other[1]
    texts = [("short",), ("A text of many words, longer than some windows are. " * 4,)]
    assert ours.loglikelihood_rolling(requests("loglikelihood_rolling", *texts)) == pytest.approx(
        theirs.loglikelihood_rolling(requests("loglikelihood_rolling", *texts), disable_tqdm=True), abs=1e-3
    )


@needs_harness
def test_answers_equal_those_of_transformers(model: Path) -> None:
    ours, theirs = models(model, window=80)
    settings: list[dict[str, Any]] = [
        {"until": ["e", "\n\n"], "max_gen_toks": 20, "do_sample": False},
        {"until": "the", "max_gen_toks": 9, "temperature": 0.0},
        {"until": [], "max_new_tokens": 16},
        {"max_gen_toks": 70},  # leaves the context ten tokens
    ]
    asked = [(row["question"], setting) for row in ROWS for setting in settings]
    found = ours.generate_until(requests("generate_until", *asked))
    assert found == theirs.generate_until(requests("generate_until", *asked), disable_tqdm=True)
    assert len(set(found)) > len(ROWS)
    with pytest.raises(UserError, match="asks for answers of 80 tokens, and the model's window has 80"):
        ours.generate_until(requests("generate_until", ("Who?", {"max_gen_toks": 80})))
    turns = [{"role": "user", "content": "Who?"}]
    assert ours.apply_chat_template(turns) == theirs.apply_chat_template(turns)
    assert ours.chat_template(True) == theirs.chat_template(True)


@needs_harness
def test_tasks_from_local_files(model: Path, tasks: Path) -> None:
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    names = ["lamp_choice", "lamp_answer", "lamp_text"]
    console = Console(file=io.StringIO(), width=200)
    result = swiftkit.evaluate(
        model, tasks=",".join(names), include_path=tasks, num_fewshot=0, console=console
    )
    _, theirs = models(model, window=None)
    reference = simple_evaluate(
        model=theirs, tasks=list(names), task_manager=TaskManager(include_path=str(tasks)), num_fewshot=0,
        log_samples=False,
    )  # fmt: skip
    assert reference is not None
    for name in names:
        for metric, value in reference["results"][name].items():
            ours = result.metrics["tasks"][name][metric]
            assert ours == (pytest.approx(value, rel=1e-4) if isinstance(value, float) else value)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(name in printed for name in names) and "word_perplexity" in printed
    assert "loss" not in result.metrics
    knobs = dict(include_path=tasks, limit=2, system="Be brief.", apply_chat_template=True)
    few = swiftkit.evaluate(model, tasks=["lamp_choice"], console=console, **knobs)
    assert few.metrics["tasks"]["lamp_choice"]["acc,none"] in (0.0, 0.5, 1.0)


@needs_harness
def test_a_task_that_is_not_there(model: Path, tasks: Path) -> None:
    with pytest.raises(UserError, match="no such task; did you mean lamp_choice"):
        swiftkit.evaluate(model, tasks="lamp_choise", include_path=tasks)
    (tasks / "lost.yaml").write_text(
        CHOICE.replace("lamp_choice", "lamp_lost").replace("FILE", str(tasks / "lost.jsonl")),
        encoding="utf-8",
    )
    with pytest.raises(UserError, match=r"--tasks lamp_lost: the data cannot be read: .*lost\.jsonl"):
        swiftkit.evaluate(model, tasks="lamp_lost", include_path=tasks, console=Console(file=io.StringIO()))


@pytest.mark.skipif(INSTALLED, reason="lm-evaluation-harness is installed")
def test_without_the_harness_one_line_says_how_to_get_it(model: Path) -> None:
    with pytest.raises(UserError) as caught:
        swiftkit.evaluate(model, tasks="gsm8k")
    assert str(caught.value) == ("--tasks needs lm-evaluation-harness: pip install 'swiftkit[eval-harness]'")
