"""`swiftkit eval`: what a model has learnt, in numbers that training and other tools know too.

It stands among the methods, as it takes a method's loss and has no loop.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from swiftkit.config import EvalConfig
from swiftkit.data import Document, PackedBatch, Prepared, collate, pack, prepare
from swiftkit.engine import Batch, Engine
from swiftkit.errors import UserError
from swiftkit.generate.batch import Answer, generate, rows_at_once
from swiftkit.generate.find import find
from swiftkit.generate.load import ReadyModel, prepare_model
from swiftkit.methods.exact_match import Question, extract, question_of, rule_of, wilson
from swiftkit.methods.opening import check_vocabulary, longest_window
from swiftkit.methods.sft import loss
from swiftkit.train.steps import ROW_MULTIPLE, TOKENS_AT_ONCE

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

INTERVAL = "95 % interval"


@dataclass(frozen=True)
class Evaluation:
    """The result.

    Attributes:
        metrics: `loss`, `perplexity`, `tokens` and `rows`, `files` with the same of each file;
            `exact_match` with `n`, `right`, `rate` and `interval`; `tasks` by name.
        predictions: of each question, what `--output` holds.
    """

    metrics: dict[str, Any] = field(default_factory=dict)
    predictions: list[dict[str, Any]] = field(default_factory=list)


def run(config: EvalConfig, console: Console) -> Evaluation:
    """From a checked config to numbers.

    Raises:
        UserError: for what is wrong with config, model or data, before weights are loaded.
    """
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    manager = _tasks(config) if config.tasks else None
    check_output(config.output)
    where = find(checkpoint=config.checkpoint, adapters=config.adapters, model=config.model)
    ready = prepare_model(where, config, say=say)
    window = longest_window(ready.description, config.max_length)
    data = prepare_rows(config, ready, window) if config.dataset else None
    questions = [] if data is None else _questions(config, data, ready)
    for line in _header(config, ready, data):
        say(line)
    engine = ready.load()
    result = Evaluation()
    if data is not None and "loss" in config.metrics:
        result.metrics.update(losses(engine, data, pad_id=int(ready.tokenizer.pad_token_id or 0)))
        for line in _about_loss(result.metrics):
            say(line)
    if data is not None and "exact_match" in config.metrics:
        _match(config, engine, ready, questions, window, result, console)
    if manager is not None:
        from swiftkit.methods.harness import evaluate_tasks

        result.metrics["tasks"] = evaluate_tasks(
            config, engine, ready, manager=manager, window=window, say=say
        )
    return result


def prepare_rows(config: EvalConfig, ready: ReadyModel, window: int | None) -> Prepared:
    """The rows as training would see them; those that do not fit a window are dropped and counted."""
    rows = partial(
        prepare,
        config.dataset,
        tokenizer=ready.tokenizer,
        packing=True,
        truncation_strategy="drop",
        system=config.system,
        columns=config.columns,
        train_on=config.train_on,
        thinking_history=config.thinking_history,
        skip_bad_rows=config.skip_bad_rows,
        max_dropped=config.max_dropped,
        streaming=config.streaming,
    )
    data = rows(max_length=config.max_length)
    if window is not None and data.max_length > window:
        data = rows(max_length=window)
    check_vocabulary(data, ready.vocabulary)
    return data


# ---- loss ---------------------------------------------------------------------------------------------


def losses(engine: Engine, data: Prepared, *, pad_id: int) -> dict[str, Any]:
    """Mean loss a trained token and its perplexity, over all rows and over those of each file.

    Args:
        engine: the model.
        data: rows.
        pad_id: the padding token's id.
    """
    by_file: dict[str, list[Document]] = {}
    for document in data.documents:
        by_file.setdefault(document.origin.file, []).append(document)
    files = {file: _sums(engine, documents, pad_id=pad_id) for file, documents in by_file.items()}
    whole = {name: sum(sums[name] for sums in files.values()) for name in ("loss", "tokens", "rows")}
    return {**_means(whole), "files": {file: _means(sums) for file, sums in files.items()}}


def _sums(engine: Engine, documents: Sequence[Document], *, pad_id: int) -> dict[str, float]:
    batches = _batches(documents, on_gpu=engine.device.type == "cuda", pad_id=pad_id)
    sums = engine.evaluate((Batch.of(batch, device=engine.device) for batch in batches), loss)
    tokens = sum(document.targets for document in documents)
    return {"loss": float(sums["loss"]), "tokens": tokens, "rows": len(documents)}


def _means(sums: dict[str, float]) -> dict[str, float]:
    mean = sums["loss"] / sums["tokens"]
    return {**sums, "loss": mean, "perplexity": math.exp(min(mean, 700.0))}


def _batches(documents: Sequence[Document], *, on_gpu: bool, pad_id: int) -> Iterator[PackedBatch]:
    """Each document once; on a GPU all rows have one length, so that compiled layers see one shape."""
    lengths = [len(document) for document in documents]
    rows = pack(lengths, max(TOKENS_AT_ONCE["cuda" if on_gpu else "cpu"], *lengths))
    longest = max(sum(lengths[index] for index in row) for row in rows)
    pad_to = math.ceil(longest / ROW_MULTIPLE) * ROW_MULTIPLE if on_gpu else None
    for row in rows:
        yield collate([[documents[index] for index in row]], pad_id=pad_id, pad_to=pad_to)


# ---- exact match --------------------------------------------------------------------------------------


def _questions(config: EvalConfig, data: Prepared, ready: ReadyModel) -> list[Question]:
    """The rows' last questions whose answers can be compared.

    Raises:
        UserError: the pattern finds nothing in any answer.
    """
    if "exact_match" not in config.metrics:
        return []
    asked = [question_of(document, ready.tokenizer, ready.stops) for document in data.documents]
    pattern = config.answer_pattern
    found = [
        one for one in asked if one and extract(one.target, rule_of(one.target, pattern), pattern) is not None
    ]
    if pattern is not None and not found:
        raise UserError(f"--answer_pattern {pattern} matches none of the rows' own answers")
    return found


def judged(
    question: Question, answer: Answer, tokenizer: Any, *, pattern: str | None = None
) -> dict[str, Any]:
    """A prediction beside its target, and whether it is right."""
    prediction = str(tokenizer.decode(answer.ids, skip_special_tokens=True))
    rule = rule_of(question.target, pattern)
    expected, got = (extract(text, rule, pattern) for text in (question.target, prediction))
    return {
        "file": question.origin.file,
        "line": question.origin.line,
        "prompt": str(tokenizer.decode(question.prompt, skip_special_tokens=False)),
        "target": question.target,
        "prediction": prediction,
        "right": got == expected,
        "rule": rule,
        "expected": expected,
        "found": got,
        "finish_reason": answer.finish_reason,
        "tokens": len(answer.ids),
    }


def _match(
    config: EvalConfig,
    engine: Engine,
    ready: ReadyModel,
    questions: Sequence[Question],
    window: int | None,
    result: Evaluation,
    console: Console,
) -> None:
    """Ask, compare, write and say."""
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    if not questions:
        say("exact     no row has a question with an answer of its own")
        return
    slots = config.max_batch_size
    if slots == "auto":
        longest = max(len(question.prompt) for question in questions) + config.max_new_tokens
        slots = rows_at_once(engine, longest if window is None else min(longest, window))
    start = time.perf_counter()
    with _progress(console, len(questions)) as on_step:
        answers = generate(
            engine,
            [question.prompt for question in questions],
            max_new_tokens=config.max_new_tokens,
            stop_ids=ready.stops,
            window=window,
            slots=slots,
            on_step=on_step,
        )
    seconds = time.perf_counter() - start
    pairs = zip(questions, answers, strict=True)
    result.predictions.extend(judged(q, a, ready.tokenizer, pattern=config.answer_pattern) for q, a in pairs)
    if config.output is not None:
        lines = [json.dumps(entry, ensure_ascii=False) + "\n" for entry in result.predictions]
        Path(config.output).write_text("".join(lines), encoding="utf-8")
    result.metrics["exact_match"] = _rates(result.predictions)
    tokens = sum(len(answer.ids) for answer in answers)
    result.metrics["generation"] = {
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
    }
    for line in _about_match(config, result, slots=min(slots, len(questions)), window=window):
        say(line)


def _rates(predictions: Sequence[dict[str, Any]]) -> dict[str, Any]:
    n, right = len(predictions), sum(entry["right"] for entry in predictions)
    return {"n": n, "right": right, "rate": right / n, "interval": wilson(right, n)}


@contextmanager
def _progress(console: Console, rows: int) -> Iterator[Any]:
    """A bar over the answers, where somebody looks."""
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn("answering"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=rows)
        yield lambda ended, _: bar.advance(task, ended)


# ---- for people ---------------------------------------------------------------------------------------


def _header(config: EvalConfig, ready: ReadyModel, data: Prepared | None) -> list[str]:
    model, spec = ready.model, ready.spec
    layers = "fused" if ready.placement.fused else "plain"
    lines = [f"model     {model.name} from {model.source}, {model.fingerprint[:12]}"]
    if model.note:
        lines.append(f"          {model.note}")
    if spec is not None:
        lines.append(f"adapter   {ready.where.adapter}, LoRA rank {spec.rank}, alpha {spec.alpha:g}")
    lines.append(f"base      {ready.placement.precision} on {ready.placement.device_name}, {layers} layers")
    return lines if data is None else [*lines, *data.report.lines()]


def _about_loss(metrics: dict[str, Any]) -> list[str]:
    files = metrics["files"]
    lines = [f"loss      {_loss_line(metrics)}"]
    if len(files) > 1:
        lines += [f"          {_loss_line(values)}  {file}" for file, values in files.items()]
    return lines


def _loss_line(values: dict[str, Any]) -> str:
    return (
        f"{values['loss']:.4f}, perplexity {values['perplexity']:.2f}, "
        f"over {values['tokens']:,} trained tokens of {values['rows']:,} rows"
    )


def _about_match(config: EvalConfig, result: Evaluation, *, slots: int, window: int | None) -> list[str]:
    predictions, rates = result.predictions, result.metrics["exact_match"]
    low, high = rates["interval"]
    rules = {
        rule: sum(entry["rule"] == rule for entry in predictions)
        for rule in ("final number", "pattern", "text")
    }
    ends = {
        "at a stop token": "stop",
        f"after --max_new_tokens {config.max_new_tokens}": "length",
        f"at the end of the window of {window} tokens": "window",
    }
    counts = {
        words: sum(entry["finish_reason"] == reason for entry in predictions)
        for words, reason in ends.items()
    }
    silent = sum(entry["found"] is None for entry in predictions)
    generation = result.metrics["generation"]
    lines = [
        f"exact     {rates['right']:,} of {rates['n']:,} right, {rates['rate']:.1%} "
        f"({INTERVAL} {low:.1%} to {high:.1%}), by {_counted(rules)}",
        f"          answers ended {_counted(counts)}"
        + (f"; {silent:,} without what is compared" if silent else ""),
        f"generated {generation['tokens']:,} tokens in {generation['seconds']:.1f} s, "
        f"{generation['tokens_per_second']:,.0f} tokens/s, {slots} at once",
    ]
    return [*lines, f"written   {config.output}"] if config.output is not None else lines


def _counted(counts: dict[str, int]) -> str:
    """`18 at a stop token, 2 ...`; a word that stands alone needs no number."""
    found = {words: number for words, number in counts.items() if number}
    if len(found) == 1:
        return next(iter(found))
    return ", ".join(f"{words} {number:,}" for words, number in found.items())


def check_output(output: str | None) -> None:
    """See that predictions can be written before there are any.

    Raises:
        UserError: they cannot.
    """
    if output is None:
        return
    try:
        Path(output).parent.mkdir(parents=True, exist_ok=True)
        Path(output).open("a", encoding="utf-8").close()
    except OSError as failure:
        raise UserError(
            f"--output {output}: {failure.strerror or failure}; give a file that can be written"
        ) from None


def _tasks(config: EvalConfig) -> TaskManager:
    """See that there are such tasks before a model is loaded.

    Raises:
        UserError: lm-evaluation-harness is not installed, or knows no such task.
    """
    if find_spec("lm_eval") is None:
        raise UserError("--tasks needs lm-evaluation-harness: pip install 'swiftkit[eval-harness]'")
    from swiftkit.methods.harness import find_tasks

    return find_tasks(config.tasks, config.include_path)
