"""Direct preference optimization and its kin: chosen answers become likelier than a reference has them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from rich.console import Console

from swiftkit.config import DpoConfig, PreferenceConfig
from swiftkit.data import Pairs, prepare_pairs
from swiftkit.data.cache import data_folder
from swiftkit.engine.placement import find_device
from swiftkit.methods.opening import Opening, check_vocabulary, open_base
from swiftkit.methods.preference import loss_of
from swiftkit.methods.reference import Reference, open_reference
from swiftkit.parallel.world import World, joined
from swiftkit.train.judge import check_evaluated
from swiftkit.train.loop import fit
from swiftkit.train.run import Run
from swiftkit.train.steps import StepPlan

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from swiftkit.data.encode_preferences import Rows


def run(config: DpoConfig, console: Console) -> Run:
    """From a checked config to a finished run.

    Raises:
        UserError: for what is wrong with config, model or data, before weights are loaded.
    """
    with joined(find_device(config.device)) as world:  # what cannot be had is said before anything is fetched
        return _run(config, console if world.first else Console(quiet=True), world)


def _run(config: DpoConfig, console: Console, world: World) -> Run:
    base = open_base(config, console, world=world)
    tuning, placement, world = base.tuning, base.placement, base.world
    config = tuning.config.with_changes(
        beta=tuning.config.reward_scale, rpo_alpha=tuning.config.chosen_weight
    )
    kind: Rows = "labelled" if config.loss_type == "kto" else "pairs"
    data, evaluation = prepare_rows(config, base, kind=kind)
    check_rows(config, data, evaluation, vocabulary=tuning.vocabulary)
    plan = plan_rows(base, data)
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    reference = world.once_a_node(partial(open_reference, config, base.tokenizer, data, say))
    job = base.job("dpo", data, evaluation, plan, config=config, notes=_about(config))
    with job.announce():
        parts = {"training": data} | ({} if evaluation is None else {"evaluation": evaluation})
        kept = Reference(job.folder, plan, pad_id=job.pad_id, world=world)
        known = kept.known(parts) if config.needs_reference else parts
        if known is None and reference is not None:  # before the policy is loaded: there may be room for one
            known = kept.computed(reference.load(), parts)
        engine = tuning.load(placement, tokens=plan.tokens, world=world)
        if known is None:
            known = kept.computed(engine, parts)
        with job.begin(engine) as log:
            fit(
                engine,
                known["training"],
                loss_of(config),
                knobs=config,
                plan=plan,
                log=log,
                pad_id=job.pad_id,
                evaluation=known.get("evaluation"),
                keeper=job.keeper(engine),
                world=world,
            )
        return job.end(engine)


def prepare_rows(
    config: PreferenceConfig, base: Opening[Any], *, kind: Rows = "pairs"
) -> tuple[Pairs, Pairs | None]:
    """Rows to train on, and those to evaluate on, the same on every rank.

    Args:
        config: where the rows are, and what is done with them.
        base: the model that reads them.
        kind: pairs, or single answers with a label.

    Raises:
        UserError: a source or a row is wrong, or ranks have other ones.
    """
    world = base.world
    data, evaluation = world.once_a_node(partial(_rows, config, base.tokenizer, base.longest, kind=kind))
    world.check_same(f"{base.model.fingerprint} {data.fingerprint}", "model files or rows")
    return data, evaluation


def _rows(
    config: PreferenceConfig,
    tokenizer: PreTrainedTokenizerFast,
    longest: int | None,
    *,
    kind: Rows,
) -> tuple[Pairs, Pairs | None]:
    """Their own files, or a share of the rows."""
    rows = partial(
        prepare_pairs,
        tokenizer=tokenizer,
        kind=kind,
        truncation_strategy=config.truncation_strategy,
        share_prompt=config.share_prompt,
        system=config.system,
        columns=config.columns,
        thinking_history=config.thinking_history,
        skip_bad_rows=config.skip_bad_rows,
        max_dropped=config.max_dropped,
        streaming=config.streaming,
        seed=config.seed,
        num_proc=config.dataset_num_proc,
        cache=data_folder() if config.load_from_cache_file else None,
    )
    ratio = 0.0 if config.val_dataset else config.split_dataset_ratio
    data = rows(config.dataset, max_length=config.max_length, split_ratio=ratio)
    if longest is not None and data.max_length > longest:
        data = rows(config.dataset, max_length=longest, split_ratio=ratio)
    if config.val_dataset:
        return data, rows(config.val_dataset, max_length=data.max_length)
    return data, data.evaluation


def check_rows(config: PreferenceConfig, data: Pairs, evaluation: Pairs | None, *, vocabulary: int) -> None:
    """Refuse rows that do not fit the model, and knobs that need rows which are not there.

    Raises:
        UserError: naming the row or the knob.
    """
    for part in (data, evaluation):
        if part is not None:
            check_vocabulary(part, vocabulary)
    check_evaluated(config, evaluation)


def plan_rows(base: Opening[Any], data: Pairs) -> StepPlan:
    """Steps and batch sizes; a window is a row."""
    return base.plan(data, max_length=int(data.window_lengths.max()))


def _about(config: DpoConfig) -> list[str]:
    """What the header says of loss and reference."""
    lines = [f"loss      {config.loss_type}, beta {config.reward_scale:g}"]
    if config.needs_reference:
        what = config.ref_model or config.init_adapter
        what = what if what else f"{config.model} as it is before training"
        lines.append(f"reference {what}; its log-probabilities are computed once")
    return lines
