"""The schema: which values it takes, what it says to others, and which layer wins."""

from __future__ import annotations

from typing import Any

import pytest

from swiftkit.config import ChatConfig, Config, DownloadConfig, SftConfig, build
from swiftkit.errors import UserError

NEEDED = {"model": "m", "dataset": "d.jsonl"}


def sft(**knobs: Any) -> SftConfig:
    return build(SftConfig, knobs, NEEDED)


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"learning_rate": "fast"}, "--learning_rate takes a number or auto, not fast"),
        ({"learning_rate": -1}, "--learning_rate: more than 0, or auto, not -1"),
        ({"learning_rate": "nan"}, "--learning_rate takes a finite number or auto, not nan"),
        ({"learning_rate": float("inf")}, "--learning_rate takes a finite number or auto, not inf"),
        ({"num_train_epochs": None}, "--num_train_epochs takes a number, not nothing"),
        ({"lora_rank": 0}, "--lora_rank takes at least 1, not 0"),
        ({"lora_rank": 1.5}, "--lora_rank takes a whole number, not 1.5"),
        ({"warmup_ratio": 2}, "--warmup_ratio takes at most 1, not 2"),
        ({"split_dataset_ratio": 1}, "--split_dataset_ratio takes less than 1, not 1"),
        ({"max_length": "long"}, "--max_length takes a whole number or auto, not long"),
        ({"max_length": 1}, "--max_length: a window holds at least 2 tokens, not 1"),
        ({"max_length": "uato"}, "--max_length takes a whole number or auto, not uato; did you mean auto?"),
        ({"max_steps": 0}, "--max_steps: at least 1, or -1 to go by epochs, not 0"),
        ({"global_batch_size": 0}, "--global_batch_size: at least 1, or auto, not 0"),
        ({"packing": "may be"}, "--packing takes true or false, not 'may be'"),
        ({"packing": [1]}, "--packing takes true or false, not [1]"),
        ({"system": 5}, "--system takes text, not 5"),
        ({"dataset": []}, "--dataset takes at least one value, not []"),
        ({"dataset": [5]}, "--dataset takes text, not 5"),
        ({"sample_prompts": 5}, "--sample_prompts takes a list or auto, not 5"),
        (
            {"report_to": ["tensorboard", "wandp"]},
            "--report_to takes tensorboard, wandb or none, not wandp; did you mean wandb?",
        ),
        (
            {"global_batch_size": 7, "per_device_train_batch_size": 2},
            "--global_batch_size 7 is no multiple of --per_device_train_batch_size 2",
        ),
        (
            dict(global_batch_size=9, per_device_train_batch_size=2, gradient_accumulation_steps=2),
            "--global_batch_size 9 is not --per_device_train_batch_size 2 x --gradient_accumulation_steps 2; "
            "leave one of the three on auto",
        ),
        ({"learing_rate": 1}, "unknown name --learing_rate; did you mean --learning_rate?"),
        ({"zzz": 1}, "unknown name --zzz"),
    ],
)
def test_a_bad_value_is_one_sentence(knobs: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        sft(**knobs)
    assert str(caught.value) == words


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(UserError) as caught:
        build(SftConfig, {"lora_rank": 0, "sede": 1, "dataset": "d"}, places={"sede": "my.yaml:7"})
    assert str(caught.value).split("; ") == [
        "--model is missing: a name from `swiftkit ls`, a hub id, or a folder",
        "--lora_rank takes at least 1, not 0",
        "my.yaml:7: unknown name --sede",
        "did you mean --seed?",
    ]


def test_what_is_missing_comes_with_an_example() -> None:
    with pytest.raises(UserError) as caught:
        build(SftConfig)
    assert str(caught.value) == (
        "--model and --dataset are missing; for example --model smollm2-135m --dataset swiftkit::persona"
    )
    build(SftConfig, {"model": "smollm2-135m", "dataset": "swiftkit::persona"})  # the example is right
    with pytest.raises(UserError, match="give --adapters CHECKPOINT or --model NAME"):
        build(ChatConfig)


def test_the_first_layer_wins() -> None:
    config = build(
        SftConfig, {"seed": 1}, {"seed": 2, "lora-rank": 4}, {"lora_rank": 8, "max_steps": 3}, NEEDED
    )
    assert (config.seed, config.lora_rank, config.max_steps, config.lora_alpha) == (1, 4, 3, 32)


def test_words_of_a_shell_become_values() -> None:
    config = sft(
        learning_rate="1e-3", packing="false", max_length="64", report_to="none", sample_prompts=["none"]
    )
    assert (config.learning_rate, config.packing, config.max_length) == (1e-3, False, 64)
    assert (config.report_to, config.sample_prompts, config.dataset) == (["none"], [], ["d.jsonl"])
    assert sft(sample_prompts=["auto"]).sample_prompts == "auto"
    assert sft(sample_prompts="What is this?").sample_prompts == ["What is this?"]


def test_a_config_does_not_change_and_copies_are_checked() -> None:
    config = sft()
    with pytest.raises(ValueError, match="frozen"):
        config.seed = 3  # type: ignore[misc]
    assert config.with_changes(seed=3).seed == 3
    with pytest.raises(ValueError, match="greater than or equal to 0"):
        config.with_changes(seed=-3)
    assert SftConfig.model_validate(config.model_dump()) == config


@pytest.mark.parametrize("schema", [SftConfig, ChatConfig, DownloadConfig])
def test_every_knob_has_help_group_and_unit(schema: type[Config]) -> None:
    for name, field in schema.model_fields.items():
        extra = field.json_schema_extra
        assert isinstance(extra, dict) and extra.keys() == {"group", "unit"}, name
        assert field.description and not field.description.endswith("."), name
        assert extra["group"], name
