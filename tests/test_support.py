"""The support matrix: what it refuses, and that the docs show it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from swiftkit.api import configure_sft
from swiftkit.config import DpoConfig, RewardConfig, RunConfig, SftConfig, build
from swiftkit.errors import UserError
from swiftkit.support import FEATURES, QUANTIZED, asked, check, table, why_plain

DOC = Path(__file__).resolve().parents[1] / "docs" / "tuning.md"

# How each feature is asked for.
ASKED: dict[str, dict[str, Any]] = {
    "lora": {},
    "shape": {"lora_rank": 8},
    "dropout": {"lora_dropout": 0.1},
    "rslora": {"use_rslora": True},
    "loraplus": {"loraplus_lr_ratio": 16},
    "dora": {"use_dora": True},
    "pissa": {"init_lora_weights": "pissa"},
    "modules": {"modules_to_save": ["embed_tokens", "model.lm_head"]},
    "inner_modules": {"modules_to_save": ["norm"]},
    "new_tokens": {"new_tokens": ["<x>"]},
    "init_adapter": {"init_adapter": "checkpoint-5"},
    "full": {"tuner_type": "full"},
    "adamw_8bit": {"optim": "adamw_8bit"},
    "dpo": {"kind": DpoConfig},
    "reward": {"kind": RewardConfig},
}


def config(*, kind: type[RunConfig] = SftConfig, **knobs: Any) -> RunConfig:
    return kind(model="m", dataset=["d"], **knobs)


def test_every_feature_is_found_in_a_config() -> None:
    assert ASKED.keys() == FEATURES.keys()
    for name, knobs in ASKED.items():
        assert asked(config(**knobs)) == ({name} if name == "full" else {"lora", name})


@pytest.mark.parametrize("precision", ["auto", "fp32", "bf16", "fp8", "nf4"])
@pytest.mark.parametrize("name", sorted(FEATURES))
def test_the_table_is_what_is_refused(name: str, precision: str) -> None:
    features = asked(config(**ASKED[name]))
    if FEATURES[name].quantized is None or precision not in QUANTIZED:
        check(features, precision)
        return
    with pytest.raises(UserError, match=f"and --base_precision {precision}: .*; take --base_precision bf16"):
        check(features, precision)


def test_rivals_are_refused_and_the_others_are_not() -> None:
    for name, feature in FEATURES.items():
        rivals = {other for other, _ in feature.never_with}
        rivals |= {other for other, known in FEATURES.items() if name in dict(known.never_with)}
        for other in FEATURES.keys() - {name, "lora", "full"}:
            if other not in rivals:
                check({"lora", name, other} - ({"lora"} if name == "full" else set()), "auto")
                continue
            with pytest.raises(UserError, match="leave one of them out"):
                check({name, other}, "auto")


@pytest.mark.parametrize("word", ["pisa", "pissa_niter_", "pissa_niter_0", "gaussian", "pissa_niter_4x"])
def test_other_starts_are_refused(word: str) -> None:
    with pytest.raises(UserError, match=f"--init_lora_weights: true, pissa or pissa_niter_N, not {word}"):
        build(SftConfig, {"model": "m", "dataset": "d", "init_lora_weights": word})


def test_true_may_be_written_as_yaml_writes_it() -> None:
    assert config(init_lora_weights=True).init_lora_weights == config().init_lora_weights == "true"


def test_fused_layers_are_left_for_what_they_lack() -> None:
    for name, feature in FEATURES.items():
        reason = why_plain({"lora", name})
        assert (reason is None) == (feature.fused is None)
        assert reason is None or reason.startswith(feature.flag)


def test_the_docs_show_the_table() -> None:
    assert table() in DOC.read_text(encoding="utf-8"), "python -m swiftkit.support prints what belongs there"


def test_it_is_refused_before_anything_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name of a hub would have to be looked up."""
    knobs = dict(model="someone/model", dataset="swiftkit::persona", base_precision="nf4")
    with pytest.raises(UserError, match="--tuner_type full and --base_precision nf4"):
        configure_sft({**knobs, "tuner_type": "full"})
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    rule = r"--optim adamw_8bit needs bitsandbytes.*pip install 'swiftkit\[8bit\]'.*--optim adamw_torch"
    with pytest.raises(UserError, match=rule):
        configure_sft({**knobs, "optim": "adamw_8bit"})
