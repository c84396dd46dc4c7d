"""Knobs from rows to packed windows."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import (
    BeforeValidator,
    Field,
    field_validator,
    model_validator,
)

from swiftkit.config.schema import (
    Auto,
    Config,
    Many,
    json_object,
    knob,
)

TruncationStrategy = Literal["drop", "left", "right"]


class SourceKnobs(Config):
    """Which rows, and what a model sees of them."""

    dataset: Many = knob(
        ...,
        "files (.jsonl, .json, .csv, .tsv, .parquet, .txt), folders, hf::ID, ms::ID or swiftkit::NAME; `#N` "
        "behind one takes the first N rows (of a .txt: windows)",
        group="data",
        min_length=1,
    )
    columns: Annotated[dict[str, str], BeforeValidator(json_object)] = knob(
        {}, """names of the rows' own columns, as '{"question": "MINE", "answer": "THEIRS"}'""", group="data"
    )
    streaming: bool = knob(
        False, "rows of hf:: and ms:: are fetched as they are read, not downloaded first", group="data"
    )
    system: str | None = knob(None, "system message for rows that have none", group="data")
    thinking_history: Literal["template", "keep"] = knob(
        "template", "thoughts of older answers: as the chat template has them, or kept", group="data"
    )
    max_length: int | Auto = knob(
        "auto", "window length; auto is the longest row, at most 4,096", group="data", unit="tokens"
    )

    @field_validator("max_length")
    @classmethod
    def _room_for_a_target(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 2:
            raise ValueError("a window holds at least 2 tokens")
        return value


class RowKnobs(SourceKnobs):
    """The same, and what is trained of each row."""

    train_on: Literal["assistant", "last", "all"] = knob(
        "assistant",
        "the assistant's words; or those behind the last question only; or every token",
        group="data",
    )


class WindowKnobs(RowKnobs):
    """How rows become windows."""

    truncation_strategy: TruncationStrategy = knob(
        "drop", "what happens to a row longer than a window: dropped and counted, or cut", group="data"
    )
    packing: bool = knob(True, "several rows share a window; they never see each other", group="data")


class RowLossKnobs(Config):
    """What may be lost of the rows."""

    skip_bad_rows: bool = knob(
        False, "rows that cannot be used are counted and passed over; else the first one stops", group="data"
    )
    max_dropped: float = knob(
        1.0, "a larger share of dropped or skipped rows stops the run before it starts", group="data",
        ge=0, le=1,
    )  # fmt: skip


class PreparationKnobs(Config):
    """How rows become tokens, which changes nothing about them."""

    load_from_cache_file: bool = knob(
        True, "tokenised and packed data are kept, and found again when nothing has changed", group="data"
    )
    dataset_num_proc: Annotated[int, Field(ge=1)] | Auto = knob(
        "auto", "tokenise rows; auto is one for little data, else one a core", group="data", unit="processes"
    )


class DataKnobs(PreparationKnobs, RowLossKnobs, WindowKnobs):
    """From files to packed windows."""

    val_dataset: Many = knob([], "rows to evaluate on, written like --dataset", group="data")
    split_dataset_ratio: float = knob(
        0.0, "share of the rows kept for evaluation when there is no --val_dataset", group="data", ge=0, lt=1
    )
    interleave_prob: list[Annotated[float, Field(gt=0)]] = knob(
        [], "share of each --dataset in a mix of them; without it every row is taken once", group="data"
    )
    stopping_strategy: Literal["first_exhausted", "all_exhausted"] = knob(
        "first_exhausted",
        "a mix takes whole the data set that is scarcest for its share, and no row twice; or the most "
        "plentiful, and the others repeat",
        group="data",
    )

    @model_validator(mode="after")
    def _a_share_for_each(self) -> DataKnobs:
        if self.interleave_prob and len(self.interleave_prob) != len(self.dataset):
            raise ValueError(
                f"--interleave_prob has {len(self.interleave_prob)} shares for {len(self.dataset)} "
                "data sets; give each --dataset one"
            )
        return self
