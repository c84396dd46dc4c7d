"""Supervised fine-tuning: cross-entropy on the trained tokens of packed windows."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from rich.console import Console
from torch import Tensor

from swiftkit.config import SftConfig
from swiftkit.data import Prepared, prepare
from swiftkit.data.tokenizer import load_tokenizer
from swiftkit.engine import Batch, Engine, Head, LoraSpec, Sums
from swiftkit.engine.build import check_model
from swiftkit.engine.fused.adopt import why_not
from swiftkit.engine.placement import find_device, place
from swiftkit.formats.named import open_model
from swiftkit.train.job import Job
from swiftkit.train.loop import fit
from swiftkit.train.run import Run
from swiftkit.train.steps import plan_steps

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def loss(head: Head, hidden: Tensor, batch: Batch) -> Sums:
    """Sum of -log p over the trained tokens. `hidden` is [tokens, hidden]."""
    return {"loss": head.cross_entropy(hidden[batch.positions], batch.targets)}


def run(config: SftConfig, console: Console) -> Run:
    """From a checked config to a finished run.

    Raises:
        UserError: for what is wrong with config, model or data, before weights are loaded.
    """
    find_device(config.device)  # what cannot be had is said before anything is fetched
    model = open_model(config.model, source=config.model_source, revision=config.revision, say=console.print)
    lora = LoraSpec(config.lora_rank, config.lora_alpha, config.lora_dropout, tuple(config.target_modules))
    description = check_model(model.path, lora)
    fuses = why_not(description, lora) is None
    placement = place(config.device, config.base_precision, config.nf4_compute, fuses=fuses)
    tokenizer = load_tokenizer(model.path, config.chat_template)
    data, evaluation = prepare_data(config, tokenizer)
    for part in (data, evaluation):
        if part is not None:
            check_vocabulary(part, description.vocab_size)
    plan = plan_steps(
        config, num_windows=len(data.windows), max_length=data.max_length, device_type=placement.device.type
    )
    config = config.with_changes(
        base_precision=placement.base_precision,
        max_length=data.max_length,
        global_batch_size=plan.global_batch_size,
        per_device_train_batch_size=plan.micro_batch_size,
        gradient_accumulation_steps=plan.gradient_accumulation_steps,
    )
    job = Job(
        method="sft",
        config=config,
        model=model,
        tokenizer=tokenizer,
        data=data,
        evaluation=evaluation,
        plan=plan,
        placement=placement,
        lora=lora,
        console=console,
    )
    engine = Engine.load(
        model.path,
        dtype=placement.dtype,
        device=placement.device,
        base=placement.base,
        lora=lora,
        seed=config.seed,
        tokens=plan.pad_to or 0,
    )
    with job.begin(engine) as log:
        fit(
            engine,
            data,
            loss,
            knobs=config,
            plan=plan,
            log=log,
            save=partial(job.save, engine),
            pad_id=job.pad_id,
            evaluation=evaluation,
        )
    return job.end(engine)


def prepare_data(config: SftConfig, tokenizer: PreTrainedTokenizerFast) -> tuple[Prepared, Prepared | None]:
    """Training windows, and those to evaluate on: their own files, or a share of the rows."""
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
    )
    data = packed(
        config.dataset,
        max_length=config.max_length,
        split_ratio=0.0 if config.val_dataset else config.split_dataset_ratio,
        interleave_prob=config.interleave_prob,
        stopping_strategy=config.stopping_strategy,
    )
    if config.val_dataset:
        return data, packed(config.val_dataset, max_length=data.max_length)
    return data, data.evaluation


def check_vocabulary(data: Prepared, size: int) -> None:
    """Refuse tokens that the model has no embedding for.

    Raises:
        UserError: naming the first row with one.
    """
    for document in data.documents:
        largest = int(document.ids.max())
        if largest >= size:
            raise document.origin.error(
                f"the tokenizer makes token {largest} of it, the model has {size} (from 0); "
                "take the tokenizer that belongs to the model"
            )
