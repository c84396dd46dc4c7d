"""Words of the command line become knobs, and the help shows every one of them."""

from __future__ import annotations

import re
from typing import Any

import pytest

from swiftkit.config import ChatConfig, Config, DownloadConfig, SftConfig
from swiftkit.errors import UserError
from swiftkit.flags import describe, knob_of, parse


def knobs(*words: str, schema: type[Config] = SftConfig) -> dict[str, Any]:
    return parse(schema, words)[1]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", {}),
        ("--seed 3", {"seed": "3"}),
        ("--lora-rank=8 --lora_alpha 4", {"lora_rank": "8", "lora_alpha": "4"}),
        ("--learning_rate -1 --max_steps=-1", {"learning_rate": "-1", "max_steps": "-1"}),
        ("--packing", {"packing": True}),
        ("--packing false --seed 1", {"packing": "false", "seed": "1"}),
        ("--packing=false", {"packing": "false"}),
        ("--dataset a.jsonl b.jsonl#5 --seed 1", {"dataset": ["a.jsonl", "b.jsonl#5"], "seed": "1"}),
        ("--system docker-compose.yaml --seed 1", {"system": "docker-compose.yaml", "seed": "1"}),
        ("--system=docker-compose.yaml", {"system": "docker-compose.yaml"}),
        ("--dataset=a=b.jsonl", {"dataset": ["a=b.jsonl"]}),
        ("--system=--help", {"system": "--help"}),
        ("--system=", {"system": ""}),
        ("--train_type lora --model_id_or_path m", {"tuner_type": "lora", "model": "m"}),
        ("--torch_dtype bfloat16", {"base_precision": "bf16"}),
    ],
)
def test_flags(words: str, expected: dict[str, Any]) -> None:
    assert knobs(*words.split()) == expected


def test_a_config_file_comes_first() -> None:
    assert parse(SftConfig, ["my.yaml", "--seed", "1"]) == ("my.yaml", {"seed": "1"})
    assert parse(SftConfig, ["args.json"]) == ("args.json", {})
    assert parse(SftConfig, ["--seed", "1"])[0] is None


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--learing_rate 3", "unknown name --learing_rate; did you mean --learning_rate?"),
        ("--zzz", "unknown name --zzz"),
        ("--seed", "--seed needs a value"),
        ("--seed 1 2", "--seed takes one value, not 2: 1 2"),
        ("--seed 1 --seed 2", "--seed is given twice"),
        ("--lora-rank 1 --lora_rank 2", "--lora_rank is given twice"),
        ("--model m --model_id_or_path m", "--model is given twice"),
        ("--dataset", "--dataset needs a value"),
        ("--dataset a.jsonl my.yaml", "my.yaml is a config file: it comes first, before the flags"),
        ("--seed 1 my.yaml", "my.yaml is a config file: it comes first, before the flags"),
        ("--packing my.yaml", "my.yaml is a config file: it comes first, before the flags"),
        ("run.txt --seed 1", "'run.txt' is neither a flag nor a config file (.yaml, or a run's args.json)"),
        (
            "my.yaml other --seed 1",
            "'other' stands alone; values follow their --flag, and a config file comes first",
        ),
        ("-seed 1", "'-seed' is neither a flag nor a config file (.yaml, or a run's args.json)"),
    ],
)
def test_mistakes(words: str, sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        knobs(*words.split())
    assert str(caught.value) == sentence


def test_a_prompt_may_speak_of_a_file() -> None:
    words = "explain docker-compose.yaml"
    assert knobs("--prompt", words, schema=ChatConfig) == {"prompt": words}
    assert knobs("--sample_prompts", "Hello", words) == {"sample_prompts": ["Hello", words]}


def test_a_word_of_ms_swift_that_has_no_knob_here_says_so() -> None:
    with pytest.raises(UserError, match=r"^ms-swift's --stream does not exist here: answers are always"):
        knob_of(ChatConfig, "stream")
    assert knob_of(SftConfig, "nobody-knows") == ("nobody_knows", {})


@pytest.mark.parametrize(
    ("schema", "verb"), [(SftConfig, "sft"), (ChatConfig, "chat"), (DownloadConfig, "download")]
)
def test_help_has_every_flag_with_default_and_unit(
    schema: type[Config], verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    text = describe(schema, verb)
    assert max(map(len, text.splitlines())) <= 100
    sections = re.split(r"^(\w+):$", text, flags=re.MULTILINE)[1:]
    shown = dict(zip(sections[::2], sections[1::2], strict=True))
    entries = {
        match[1]: (group, " ".join(match[0].split()))
        for group, body in shown.items()
        for match in re.finditer(r"^  --(\w+) .*(?:\n {40}.*)*", body, flags=re.MULTILINE)
    }
    assert entries.keys() == schema.model_fields.keys()
    for name, field in schema.model_fields.items():
        group, entry = entries[name]
        extra = field.json_schema_extra
        assert isinstance(extra, dict)
        assert group == extra["group"]
        assert " ".join(str(field.description).split()) in entry
        assert entry.endswith("[required]" if field.is_required() else "]")
        if not field.is_required():
            assert "[default " in entry
            if isinstance(field.default, int | float) and not isinstance(field.default, bool):
                shown_default = re.search(r"\[default (\S+)", entry)
                assert shown_default and float(shown_default[1].rstrip("]")) == field.default
        if extra["unit"]:
            assert extra["unit"] in entry.lower(), entry


def test_help_fits_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert max(map(len, describe(SftConfig, "sft").splitlines())) <= 64
