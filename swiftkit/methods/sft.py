"""Supervised fine-tuning: cross-entropy on the trained tokens of packed windows."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from torch import Tensor

from swiftkit.config import RunConfigT, SftConfig
from swiftkit.data import ChatTemplate, Prepared, Trainable, prepare
from swiftkit.data.cache import data_folder
from swiftkit.data.template_tokens import never_trained, template_tokens, warning
from swiftkit.data.tokenizer import load_tokenizer
from swiftkit.engine import Batch, Head, Sums
from swiftkit.engine.build import check_model
from swiftkit.engine.placement import Placement, find_device, place
from swiftkit.errors import UserError
from swiftkit.formats.named import open_model
from swiftkit.formats.weights import Weights
from swiftkit.parallel.world import World, joined
from swiftkit.train.job import Job
from swiftkit.train.judge import check_evaluated
from swiftkit.train.loop import fit
from swiftkit.train.run import Run
from swiftkit.train.steps import StepPlan, check_batch_sizes, plan_steps
from swiftkit.train.tuning import plan_tuning

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CONVERSATIONS = "conversations by the chat template"  # as the data report calls them
ORDINARY_ROWS, ORDINARY = 64, 256  # rows of data and tokens of them that stand for what a base has learnt


def loss(head: Head, hidden: Tensor, batch: Batch) -> Sums:
    """Sum of -log p over the trained tokens. `hidden` is [tokens, hidden]."""
    return {"loss": head.cross_entropy(hidden[batch.positions], batch.targets)}


def run(config: SftConfig, console: Console) -> Run:
    """From a checked config to a finished run.

    Raises:
        UserError: for what is wrong with config, model or data, before weights are loaded.
    """
    with joined(find_device(config.device)) as world:  # what cannot be had is said before anything is fetched
        return _run(config, console if world.first else Console(quiet=True), world)


def _run(config: SftConfig, console: Console, world: World) -> Run:
    check_batch_sizes(config, world.size)
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    opened = partial(open_model, config.model, source=config.model_source, revision=config.revision, say=say)
    model = world.once_a_node(opened)
    tokenizer = load_tokenizer(model.path, config.chat_template)
    asked, tuning = config, plan_tuning(config, model, tokenizer)
    config = tuning.config
    description = check_model(model.path, tuning.spec)
    placement = place(config.device, config.base_precision, config.nf4_compute, fuses=tuning.fuses)
    placement = placement if world.device is None else replace(placement, device=world.device)
    tuning.check_room(placement)
    longest = longest_window(description, config.max_length)
    data, evaluation = world.once_a_node(partial(prepare_data, config, tokenizer, longest))
    world.check_same(f"{model.fingerprint} {data.fingerprint}", "model files or rows")
    check_data(config, data, evaluation, vocabulary=tuning.vocabulary)
    plan = plan_steps(
        config,
        num_windows=data.num_windows,
        max_length=data.max_length,
        device_type=placement.device.type,
        fixed_length=placement.device.type == "cuda" and not placement.fused and placement.base == "plain",
        lengths=data.window_lengths.tolist(),
        ranks=world.size,
    )
    untrained = [] if tuning.trains_embedding else untrained_tokens(data, tokenizer, model.path)
    job = Job(
        method="sft",
        asked=asked,
        config=resolved(config, placement, plan, data.max_length),
        model=model,
        tokenizer=tokenizer,
        data=data,
        evaluation=evaluation,
        plan=plan,
        placement=placement,
        tuning=tuning,
        layers="fused" if placement.fused else "plain",
        console=console,
        warnings=[*tuning.warnings(), *untrained],
        world=world,
    )
    with job.announce():
        engine = tuning.load(placement, tokens=plan.tokens)
        with job.begin(engine) as log:
            fit(
                engine,
                data,
                loss,
                knobs=config,
                plan=plan,
                log=log,
                pad_id=job.pad_id,
                evaluation=evaluation,
                keeper=job.keeper(engine),
                world=world,
            )
        return job.end(engine)


def resolved(config: RunConfigT, placement: Placement, plan: StepPlan, max_length: int) -> RunConfigT:
    """The config with what `auto` has become on this machine."""
    return config.with_changes(
        base_precision=placement.base_precision,
        max_length=max_length,
        global_batch_size=plan.global_batch_size,
        per_device_train_batch_size=plan.micro_batch_size,
        gradient_accumulation_steps=plan.gradient_accumulation_steps,
    )


def prepare_data(
    config: SftConfig, tokenizer: PreTrainedTokenizerFast, longest: int | None = None
) -> tuple[Prepared, Prepared | None]:
    """Training windows, and those to evaluate on: their own files, or a share of the rows.

    Args:
        config: where the rows are, and what is done with them.
        tokenizer: with the run's template.
        longest: tokens of a window that the model can read; what `auto` finds is cut down to it.
    """
    packed = partial(
        prepare,
        tokenizer=tokenizer,
        packing=config.packing,
        truncation_strategy=config.truncation_strategy,
        system=config.system,
        columns=config.columns,
        train_on=config.train_on,
        thinking_history=config.thinking_history,
        skip_bad_rows=config.skip_bad_rows,
        max_dropped=config.max_dropped,
        streaming=config.streaming,
        seed=config.seed,
        num_proc=config.dataset_num_proc,
        cache=data_folder() if config.load_from_cache_file else None,
    )
    training = partial(
        packed,
        config.dataset,
        split_ratio=0.0 if config.val_dataset else config.split_dataset_ratio,
        interleave_prob=config.interleave_prob,
        stopping_strategy=config.stopping_strategy,
    )
    data = training(max_length=config.max_length)
    if longest is not None and data.max_length > longest:
        data = training(max_length=longest)
    if config.val_dataset:
        return data, packed(config.val_dataset, max_length=data.max_length)
    return data, data.evaluation


def check_data(config: SftConfig, data: Prepared, evaluation: Prepared | None, *, vocabulary: int) -> None:
    """Refuse rows that do not fit the model, and knobs that need rows which are not there.

    Raises:
        UserError: naming the row or the knob.
    """
    check_vocabulary(data, vocabulary)
    if evaluation is not None:
        check_vocabulary(evaluation, vocabulary)
    check_evaluated(config, evaluation)


def longest_window(description: Any, max_length: int | Literal["auto"]) -> int | None:
    """Tokens of the longest window that a model can be trained on; None where its config sets no limit.

    Args:
        description: the model's transformers config.
        max_length: as asked for.

    Raises:
        UserError: when `max_length` is more.
    """
    limit: int | None = getattr(description, "max_position_embeddings", None)
    reason = f"more than the model's context of {limit} tokens"
    original = _switching_length(description)
    if original is not None and (limit is None or original < limit):
        # transformers takes one set of frequencies for a whole row, by its longest document.
        limit = original
        reason = (
            f"more than {limit} tokens, beyond which this model (rope_type longrope or dynamic) turns "
            "positions otherwise: one long document would change the short ones of its row"
        )
    if limit is not None and max_length != "auto" and max_length > limit:
        raise UserError(f"--max_length {max_length} is {reason}; give at most {limit}, or leave it on auto")
    return limit


def _switching_length(description: Any) -> int | None:
    """Tokens from which rotary frequencies depend on the length of the row; None where they never do."""
    found = getattr(description, "rope_parameters", None) or {}
    kinds = [found] if "rope_type" in found else [kind for kind in found.values() if isinstance(kind, dict)]
    lengths = [
        kind.get("original_max_position_embeddings") or description.max_position_embeddings
        for kind in kinds
        if kind.get("rope_type") in ("longrope", "dynamic")
    ]
    return min(lengths, default=None)


def untrained_tokens(data: Prepared, tokenizer: PreTrainedTokenizerFast, folder: Path) -> list[str]:
    """A warning where the template of conversations writes special tokens that the base never learnt."""
    weights = Weights(folder)
    name = next((name for name in sorted(weights.names()) if name.endswith("embed_tokens.weight")), None)
    if CONVERSATIONS not in data.report.shapes or name is None:
        return []
    size = weights.shape(name)[0]
    tokens = template_tokens(tokenizer, ChatTemplate(tokenizer))
    tokens = {token: word for token, word in tokens.items() if token < size}
    added = tokenizer.added_tokens_decoder
    ids = {int(token) for document in data.documents[:ORDINARY_ROWS] for token in document.ids}
    ordinary = sorted(token for token in ids if token not in added)[:ORDINARY]
    if not tokens or not ordinary:
        return []
    rows, others = (weights.rows(name, chosen).float().numpy() for chosen in (list(tokens), ordinary))
    words = never_trained(tokens, rows, others)
    return [warning(words)] if words else []


def check_vocabulary(data: Trainable, size: int) -> None:
    """Refuse tokens that the model has no embedding for.

    Raises:
        UserError: naming the first row with one.
    """
    if data.largest_id < size:  # known without reading a window
        return
    for document in data.documents:
        largest = int(document.ids.max())
        if largest >= size:
            raise document.origin.error(
                f"the tokenizer makes token {largest} of it, the model has {size} (from 0); "
                "take the tokenizer that belongs to the model"
            )
