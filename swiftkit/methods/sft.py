"""Supervised fine-tuning: cross-entropy on the trained tokens of packed windows."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from torch import Tensor

from swiftkit.config import SftConfig
from swiftkit.data import ChatTemplate, Prepared, prepare
from swiftkit.data.cache import data_folder
from swiftkit.data.template_tokens import never_trained, template_tokens, warning
from swiftkit.engine import Batch, Head, Sums
from swiftkit.engine.placement import find_device
from swiftkit.formats.weights import Weights
from swiftkit.methods.opening import check_vocabulary, open_base
from swiftkit.parallel.world import World, joined
from swiftkit.train.judge import check_evaluated
from swiftkit.train.loop import fit
from swiftkit.train.run import Run

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
    base = open_base(config, console, world=world)
    config, tuning, world = base.tuning.config, base.tuning, base.world
    prepared = partial(prepare_data, config, base.tokenizer, base.longest)
    data, evaluation = world.once_a_node(prepared)
    world.check_same(f"{base.model.fingerprint} {data.fingerprint}", "model files or rows")
    check_data(config, data, evaluation, vocabulary=tuning.vocabulary)
    plan = base.plan(data, max_length=data.max_length)
    untrained = [] if tuning.trains_embedding else untrained_tokens(data, base.tokenizer, base.model.path)
    job = base.job("sft", data, evaluation, plan, warnings=untrained)
    with job.announce():
        engine = tuning.load(base.placement, tokens=plan.tokens, world=world)
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
