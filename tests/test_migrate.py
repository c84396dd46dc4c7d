"""The table of ms-swift's words: it promises nothing that is not there."""

from __future__ import annotations

from collections import Counter

import pytest

from swiftkit import migrate
from swiftkit.config import ChatConfig, DpoConfig, EvalConfig, MergeConfig, RewardConfig, SftConfig
from swiftkit.errors import UserError
from swiftkit.flags import parse
from swiftkit.migrate import Entry, lookup
from swiftkit.recipe_file import choices

CONFIGS = (ChatConfig, DpoConfig, EvalConfig, MergeConfig, RewardConfig, SftConfig)
FIELDS = {name: field for config in CONFIGS for name, field in config.model_fields.items()}
VERBS = {"sft", "dpo", "reward", "chat", "eval", "merge"}
ENTRIES = [entry for entries in migrate.TABLE.values() for entry in entries]
FLAGS = [entry for entry in ENTRIES if entry.kind == "flag"]


@pytest.mark.parametrize("entry", FLAGS, ids=lambda entry: entry.word)
def test_every_promise_is_kept(entry: Entry) -> None:
    if entry.status == "accepted":
        assert entry.ours == entry.word and entry.word in FIELDS
    elif entry.status == "translated":
        assert entry.ours in FIELDS and entry.word not in FIELDS
    else:
        assert entry.ours is None and entry.word not in FIELDS, "a knob that exists is not refused"
    for value in entry.values.values():
        assert entry.ours is not None
        words = choices(FIELDS[entry.ours].annotation)
        assert not words or value in words


def test_every_flag_that_a_note_names_exists() -> None:
    for entry in ENTRIES:
        for word in (
            entry.note.replace("`", " ").replace(";", " ").replace(",", " ").replace(":", " ").split()
        ):
            if word.startswith("--"):
                name = word.removeprefix("--")
                planned = entry.status == "not yet" and "will be" in entry.note
                theirs = "in ms-swift" in entry.note
                assert name in FIELDS or planned or theirs, f"{entry.word}: {entry.note}"


def test_verbs_and_environment() -> None:
    for entry in ENTRIES:
        if entry.kind == "verb":
            assert (entry.ours in VERBS) == (entry.status in ("accepted", "translated"))
    assert lookup("rlhf", "verb") is not None and lookup("rlhf") is None
    assert lookup("CUDA_VISIBLE_DEVICES", "environment") is not None


def test_no_word_stands_twice() -> None:
    counted = Counter((entry.kind, entry.word) for entry in ENTRIES)
    assert [word for word, times in counted.items() if times > 1] == []
    assert len(FLAGS) >= 200
    for entry in FLAGS:
        found = lookup(entry.word.replace("*", "x"))
        assert found is not None and found.note == entry.note, "a pattern before it hides this word"


@pytest.mark.parametrize("written", ["--train_type", "--train-type", "train_type", "--train-type=lora"])
def test_however_it_is_written(written: str) -> None:
    entry = lookup(written)
    assert entry is not None and (entry.status, entry.ours) == ("translated", "tuner_type")


def test_sentences() -> None:
    def said(word: str) -> str:
        entry = lookup(word)
        assert entry is not None
        return entry.sentence()

    assert said("--deepspeed") == "ms-swift's --deepspeed is --layout here: DeepSpeed is not used"
    assert said("--torch_dtype").startswith("ms-swift's --torch_dtype is --base_precision here: ")
    assert said("--vllm_tensor_parallel_size").startswith(
        "ms-swift's --vllm_tensor_parallel_size does not exist here: "
    )
    assert said("--model_revision") == "ms-swift's --model_revision is --revision here"
    assert lookup("--no_such_thing") is None


@pytest.mark.parametrize(("bits", "precision"), [("4", "nf4"), ("8", "fp8")])
def test_a_quantized_base(bits: str, precision: str) -> None:
    assert parse(SftConfig, ["--quant_bits", bits]) == (None, {"base_precision": precision})
    refusal = r"^ms-swift's --quant_method does not exist here: leave it out; 4 bits are --base_precision"
    with pytest.raises(UserError, match=refusal):
        parse(SftConfig, ["--quant_method", "bnb", "--quant_bits", bits])


def test_printed_table_has_every_word() -> None:
    text = migrate.table(width=90)
    assert max(map(len, text.splitlines())) <= 90
    for entry in ENTRIES:
        assert f" {'--' if entry.kind == 'flag' else ''}{entry.word} " in text
