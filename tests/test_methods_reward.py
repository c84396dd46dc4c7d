"""Reward models: TRL as the oracle, what is saved loads elsewhere, accuracy and calibration."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn

import swiftkit
from swiftkit.engine import Engine, LoraSpec
from swiftkit.engine.build import build_model
from swiftkit.errors import UserError
from swiftkit.methods.reward import RewardLoss, binned
from swiftkit.methods.scoring import scores_of
from tests import tiny
from tests.adapters import make_base
from tests.test_methods_dpo import CASE, CPU, assert_close, batch_of, rows, sums_and_gradients, trl_batch

PAIRS = [
    {
        "messages": [
            {"role": "user", "content": f"{a}+1?"},
            {"role": "assistant", "content": f"it is {a + 1}"},
        ],
        "rejected_response": "no idea",
    }
    for a in range(8)
]


def train(folder: Path, model: Path, **knobs: Any) -> tuple[Any, str]:
    file, out = folder / "pairs.jsonl", io.StringIO()
    file.write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS))
    given = dict(dataset=file, max_steps=6, learning_rate=1e-2, report_to="none", output_dir=folder / "out")
    run = swiftkit.reward(model=model, console=Console(file=out, width=300), **{**given, **knobs})
    return run, out.getvalue()


def oracle_of(model: Path, adapter: Path) -> Any:
    """What transformers and PEFT make of a checkpoint."""
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    base = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1)
    return PeftModel.from_pretrained(base.float(), adapter).eval()


@pytest.mark.compat
def test_a_reward_model_loads_in_transformers_and_here(tmp_path: Path) -> None:
    model = tmp_path / "toy"
    tiny.make_toy(model, template="chatml", seed=4)
    run, said = train(tmp_path, model, val_dataset=CASE, eval_steps=3, max_length=200)
    assert "a head that scores" in said and "right way round" in said and "talk " not in said
    checkpoint = Path(run.adapter_dir)
    config = json.loads((checkpoint / "adapter_config.json").read_text())
    assert config["task_type"] == "SEQ_CLS" and config["modules_to_save"] == ["score"]
    scorer = swiftkit.reward_model(checkpoint)
    chats = [[*pair["messages"][:1], {"role": "assistant", "content": words}]
             for pair in PAIRS[:3] for words in (pair["messages"][1]["content"], "no idea")]  # fmt: skip
    scores = scorer.score(chats)
    theirs = oracle_of(model, checkpoint)
    for document, score in zip(scorer.documents(chats), scores, strict=True):
        ids = torch.from_numpy(document.ids.astype(np.int64))[None]
        with torch.no_grad():
            assert float(theirs(input_ids=ids, attention_mask=torch.ones_like(ids)).logits) == pytest.approx(
                score, abs=1e-4
            )
    assert all(good > bad for good, bad in zip(scores[::2], scores[1::2], strict=True))
    assert scorer.score([("2+2? ", "4")]) == pytest.approx(scorer.score([("2+2? ", "4"), ("a", "b")])[:1])
    found = json.loads((Path(run.folder) / "calibration.json").read_text())
    logged = (Path(run.folder) / "logging.jsonl").read_text().splitlines()
    evaluated = [line for line in map(json.loads, logged) if "eval_loss" in line]
    assert found["pairs"] == 3 and found["accuracy"] == pytest.approx(evaluated[-1]["eval_accuracy"])
    again, _ = train(tmp_path, model, init_adapter=checkpoint, max_steps=1, learning_rate=1e-6)
    first = json.loads((Path(again.folder) / "logging.jsonl").read_text().splitlines()[0])
    assert first["loss"] < 0.3  # its head came with it


def test_a_reward_model_does_not_write_and_an_adapter_does_not_score(tmp_path: Path) -> None:
    model = tmp_path / "toy"
    tiny.make_toy(model, template="chatml", seed=4)
    run, _ = train(tmp_path, model, max_steps=1)
    with pytest.raises(UserError, match="writes no answers"):
        run.chat()
    with pytest.raises(UserError, match="reward model"):
        swiftkit.merge(run.adapter_dir, tmp_path / "merged")
    with pytest.raises(UserError, match="reward model"):
        swiftkit.sft(model=model, dataset="swiftkit::persona", init_adapter=run.adapter_dir)
    with pytest.raises(UserError, match="no reward model"):
        swiftkit.reward_model(model)


@pytest.mark.slow
@pytest.mark.parametrize("centering", [0.0, 0.1])
def test_the_reward_loss_equals_trl(centering: float, tmp_path: Path, seed: int) -> None:
    from datasets import Dataset
    from peft import LoraConfig, TaskType, get_peft_model
    from transformers import AutoModelForSequenceClassification
    from trl import RewardConfig as TrlConfig
    from trl import RewardTrainer

    from tests.cases import toy

    tiny.make_toy(tmp_path / "toy", seed=seed % 1000)
    spec = LoraSpec(rank=4, alpha=8, scores=True)
    engine = Engine(build_model(tmp_path / "toy", dtype=torch.float32, device=CPU, lora=spec))
    tiny.randomise_adapter(engine.parameters)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "toy", num_labels=1).float()
    targets = sorted({name.rpartition(".")[2] for name in engine.linear_names} - {"lm_head"})
    model = get_peft_model(model, LoraConfig(TaskType.SEQ_CLS, r=4, lora_alpha=8, target_modules=targets))
    ours_of: dict[str, str] = {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                own = name.removeprefix("base_model.model.").replace(".default", "")
                own = own.replace(".modules_to_save", "")
                own = own.removesuffix(".weight") if "lora_" in own else own
                parameter.copy_(engine.parameters[own])
                ours_of[own] = name
    assert ours_of.keys() == engine.parameters.keys()
    config = TrlConfig(
        output_dir=str(tmp_path), report_to=[], use_cpu=True, bf16=False,
        center_rewards_coefficient=centering or None,
    )  # fmt: skip
    data = Dataset.from_list([{"chosen": "b", "rejected": "c"}])
    trainer = RewardTrainer(model=model, args=config, train_dataset=data, processing_class=toy.tokenizer())
    from dataclasses import replace

    found = [replace(row, margin=0.3 * n) for n, row in enumerate(rows(3, seed=seed % 1000))]
    whole = trl_batch(found)
    inputs = {name: whole[name] for name in ("input_ids", "attention_mask")}
    inputs["margin"] = torch.tensor([row.margin for row in found])
    theirs = trainer.compute_loss(trainer.model, inputs)
    theirs.backward()
    loss = RewardLoss(engine.model.score, centering)
    sums, gradients = sums_and_gradients(engine, [batch_of(found)], loss)
    assert sums["loss"] / 3 == pytest.approx(theirs.item(), rel=1e-5)
    named = dict(model.named_parameters())
    assert_close(gradients, {own: named[name].grad * 3 for own, name in ours_of.items()}, 1e-4)


def test_scores_are_those_of_the_last_tokens(seed: int) -> None:
    batch = batch_of(rows(2, seed=seed % 1000), pad_to=128)
    head = nn.Linear(8, 1, bias=False)
    hidden = torch.randn(128, 8)
    assert batch.answers is not None
    torch.testing.assert_close(scores_of(head, hidden, batch), (hidden[batch.answers.ends] @ head.weight[0]))


def test_a_calibrated_model_has_no_error() -> None:
    calibrated = binned([0.75] * 75 + [0.25] * 25)
    assert calibrated["error"] == pytest.approx(0.0, abs=1e-12)
    assert binned([0.999] * 50 + [0.001] * 50)["error"] == pytest.approx(0.499)


def test_a_resumed_run_equals_an_unbroken_one(tmp_path: Path) -> None:
    model = tmp_path / "toy"
    tiny.make_toy(model, template="chatml", seed=5)
    knobs: dict[str, Any] = dict(
        val_dataset=CASE, eval_steps=2, save_steps=2, max_steps=4, lora_dropout=0.2, max_length=200,
        global_batch_size=3, logging_steps=1,
    )  # fmt: skip
    whole, _ = train(tmp_path, model, **knobs)
    broken, _ = train(tmp_path, model, **knobs)
    shutil.rmtree(Path(broken.folder) / "checkpoint-4")
    again, said = train(tmp_path, model, **knobs, resume_from_checkpoint=Path(broken.folder))
    assert "from step 2" in said and again.folder == broken.folder
    pick = ("step", "loss", "margin", "eval_loss", "eval_accuracy", "grad_norm")
    facts = []
    for run in (whole, again):
        lines = (Path(run.folder) / "logging.jsonl").read_text().splitlines()
        facts.append([{k: line[k] for k in pick if k in line} for line in map(json.loads, lines)])
    assert facts[0] == facts[1] and len(facts[0]) == 7
    for name in ("checkpoint-4/adapter_model.safetensors", "calibration.json"):
        assert Path(whole.folder, name).read_bytes() == Path(again.folder, name).read_bytes(), name


@pytest.mark.parametrize("tied", [False, True])
def test_a_whole_reward_model_loads_in_transformers_and_here(tied: bool, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    model = tmp_path / "toy"
    make_base(model, template="chatml", tie_word_embeddings=tied)
    knobs = dict(tuner_type="full", learning_rate=1e-3)
    run, said = train(tmp_path, model, **knobs)
    assert "all weights" in said and "a head that scores" in said
    checkpoint = Path(run.folder) / "checkpoint-6"
    theirs, loading = AutoModelForSequenceClassification.from_pretrained(checkpoint, output_loading_info=True)
    assert not any(loading[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    scorer = swiftkit.reward_model(run.folder)
    chats = [[*pair["messages"][:1], {"role": "assistant", "content": words}]
             for pair in PAIRS[:2] for words in (pair["messages"][1]["content"], "no idea")]  # fmt: skip
    scores = scorer.score(chats)
    for document, score in zip(scorer.documents(chats), scores, strict=True):
        ids = torch.from_numpy(document.ids.astype(np.int64))[None]
        with torch.no_grad():
            assert float(theirs.eval()(input_ids=ids).logits) == pytest.approx(score, abs=1e-4)
    assert all(good > bad for good, bad in zip(scores[::2], scores[1::2], strict=True))
    again, _ = train(tmp_path, checkpoint, **knobs)
    first, last = (
        json.loads((Path(found.folder) / "logging.jsonl").read_text().splitlines()[at])["loss"]
        for found, at in ((again, 0), (run, -1))
    )
    assert first < 0.6 and first == pytest.approx(last, abs=0.3)  # its head came with it
    with pytest.raises(UserError, match="writes no answers"):
        run.chat()
    for verb in (swiftkit.sft, swiftkit.reward):
        with pytest.raises(UserError, match="writes no answers"):
            verb(model=checkpoint, dataset="swiftkit::persona")


def test_a_whole_reward_model_resumes(tmp_path: Path) -> None:
    model = tmp_path / "toy"
    make_base(model, template="chatml", tie_word_embeddings=False)
    knobs: dict[str, Any] = dict(tuner_type="full", learning_rate=1e-3, save_steps=2, max_steps=4)
    whole, _ = train(tmp_path, model, **knobs)
    broken, _ = train(tmp_path, model, **knobs)
    shutil.rmtree(Path(broken.folder) / "checkpoint-4")
    again, said = train(tmp_path, model, **knobs, resume_from_checkpoint=Path(broken.folder))
    assert "from step 2" in said
    name = "checkpoint-4/model.safetensors"
    assert Path(whole.folder, name).read_bytes() == Path(again.folder, name).read_bytes()
