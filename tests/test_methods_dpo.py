"""DPO and its kin: identities, TRL as the oracle, shared prompts, the whole command."""

from __future__ import annotations

import io
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

import swiftkit
from swiftkit.config import DpoConfig
from swiftkit.data import AnswerRow, Document, collate_answers, prepare_pairs
from swiftkit.data.answers import shared_prefix
from swiftkit.engine import Batch, Engine, LoraSpec
from swiftkit.engine.build import build_model
from swiftkit.errors import UserError
from swiftkit.methods.preference import LabelledLoss, PairLoss, answer_logprobs
from tests import tiny
from tests.cases import toy

CPU = torch.device("cpu")
CASE = toy.case("23-dpo-ref-adapter.jsonl")
QUIET = dict(report_to="none", sample_prompts="none", logging_steps=1)


def documents(lengths: list[int], prompt: int, *, seed: int) -> list[Document]:
    """Random answers to one random prompt."""
    asked = tiny.documents([prompt], seed=seed)[0]
    made = []
    for number, length in enumerate(lengths):
        own = tiny.documents([length], seed=seed + 1 + number)[0]
        ids = np.concatenate([asked.ids, own.ids])
        made.append(Document(ids, np.arange(len(ids)) >= prompt, own.origin))
    return made


def rows(count: int, *, seed: int, share: bool = True) -> list[AnswerRow]:
    found = []
    for number in range(count):
        pair = tuple(documents([7 + number, 12 - number], 9 + 2 * number, seed=seed + 10 * number))
        shared = shared_prefix(*pair) if share else 0
        found.append(AnswerRow(pair, np.array([-20.0 - number, -31.0]), shared=shared))
    return found


def batch_of(found: list[AnswerRow], *, pad_to: int | None = None) -> Batch:
    return Batch.of(collate_answers(found, pad_id=0, pad_to=pad_to), device=CPU)


def engine_of(folder: Path, **lora: Any) -> Engine:
    spec = LoraSpec(rank=4, alpha=8, **lora)
    engine = Engine(build_model(folder, dtype=torch.float32, device=CPU, lora=spec))
    tiny.randomise_adapter(engine.parameters)
    return engine


def sums_and_gradients(
    engine: Engine, batches: list[Batch], loss: Any
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    for parameter in engine.parameters.values():
        parameter.grad = None
    sums = engine.forward_backward(batches, loss, denominator=1)
    gradients = {name: p.grad.clone() for name, p in engine.parameters.items() if p.grad is not None}
    return {name: float(value) for name, value in sums.items()}, gradients


def assert_close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], tolerance: float) -> None:
    assert one.keys() == other.keys()
    largest = max(float(t.abs().max()) for t in other.values())
    for name, gradient in one.items():
        assert float((gradient - other[name]).abs().max()) <= tolerance * largest, name


# ---- a prompt that two answers share ------------------------------------------------------------------


@pytest.mark.compat
@pytest.mark.parametrize("family", [*tiny.FAMILIES])
def test_a_shared_prompt_equals_two_rows(family: str, tmp_path: Path, seed: int) -> None:
    tiny.make(family, tmp_path, seed=seed % 1000)
    engine = engine_of(tmp_path)
    together, apart = rows(2, seed=seed % 1000), rows(2, seed=seed % 1000, share=False)
    assert [row.shared for row in together] == [9, 11]
    assert sum(row.tokens for row in together) == sum(row.tokens for row in apart) - 20
    loss = PairLoss("sigmoid", 0.1)
    sums, gradients = sums_and_gradients(engine, [batch_of(together)], loss)
    expected, theirs = sums_and_gradients(engine, [batch_of(apart)], loss)
    assert sums == pytest.approx(expected, rel=1e-4, abs=1e-4)
    assert_close(gradients, theirs, 1e-4)


def test_a_shared_prompt_equals_two_rows_with_sinks(seed: int) -> None:
    from swiftkit.engine.attention import AttentionPlan, Rules, by_segment

    q, k, v = (torch.randn(4, 21, 8) for _ in range(3))
    rules = Rules(0.3, window=6, softcap=2.0, sinks=torch.randn(4))
    found = by_segment(q, k, v, AttentionPlan.of([8, 6, 7], device=CPU, prefixes=(-1, 0, 0)), rules, 0)
    for start, stop in ((8, 14), (14, 21)):
        pick = torch.cat([torch.arange(8), torch.arange(start, stop)])
        plan = AttentionPlan.of([len(pick)], device=CPU)
        alone = by_segment(q[:, pick], k[:, pick], v[:, pick], plan, rules, 0)
        torch.testing.assert_close(found[:, start:stop], alone[:, 8:])


def test_the_shared_part_ends_before_the_first_trained_token() -> None:
    chosen, rejected = documents([3, 5], 4, seed=1)
    same = np.concatenate([chosen.ids[:6], rejected.ids[6:]])
    assert shared_prefix(chosen, Document(same, rejected.trained, chosen.origin)) == 4
    assert shared_prefix(chosen, chosen) == 4


# ---- identities ---------------------------------------------------------------------------------------


def test_padding_order_and_batches_change_nothing(tmp_path: Path, seed: int) -> None:
    tiny.make_toy(tmp_path, seed=seed % 1000)
    engine = engine_of(tmp_path)
    found, loss = rows(3, seed=seed % 1000), PairLoss("sigmoid", 0.1, chosen_weight=0.5)
    sums, gradients = sums_and_gradients(engine, [batch_of(found)], loss)
    for batches in (
        [batch_of(found, pad_to=256)],
        [batch_of(found[::-1])],
        [batch_of([row]) for row in found],
    ):
        other, theirs = sums_and_gradients(engine, batches, loss)
        assert other == pytest.approx(sums, rel=1e-5, abs=1e-5)
        assert_close(theirs, gradients, 1e-5)


def trained_adapter(folder: Path, model: Path) -> Path:
    """An adapter after 20 steps of SFT."""
    data = folder / "sft.jsonl"
    lines = ['{"prompt": "1+1? ", "completion": "2"}\n', '{"prompt": "hi ", "completion": "hello"}\n']
    data.write_text("".join(lines))
    run = swiftkit.sft(
        model=model, dataset=data, max_steps=20, lora_rank=4, learning_rate=1e-2, output_dir=folder / "sft",
        console=Console(file=io.StringIO()), **QUIET,
    )  # fmt: skip
    return Path(run.adapter_dir)


def dpo(folder: Path, **knobs: Any) -> tuple[Any, str]:
    out = io.StringIO()
    given = {"dataset": CASE, "output_dir": folder / "out", "max_steps": 5, "learning_rate": 1e-2, **QUIET}
    run = swiftkit.dpo(console=Console(file=out, width=300), **{**given, **knobs})
    return run, out.getvalue()


def lines_of(run: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(run.folder) / "logging.jsonl").read_text().splitlines()]


@pytest.mark.compat
def test_case_23_the_reference_is_the_adapter_that_training_starts_from(tmp_path: Path) -> None:
    model = tmp_path / "toy"
    tiny.make_toy(model, seed=3)
    adapter = trained_adapter(tmp_path, model)
    expected = json.loads(Path(toy.case("23-dpo-ref-adapter.expect.json")).read_text())
    for beta in expected["beta"]:
        for micro in (1, 3):
            run, said = dpo(
                tmp_path, model=model, init_adapter=adapter, beta=beta, global_batch_size=3,
                per_device_train_batch_size=micro, max_steps=2, lora_dropout=0.0,
            )  # fmt: skip
            first = lines_of(run)[0]
            assert first["loss"] == pytest.approx(expected["step_0"]["loss"], abs=expected["step_0"]["abs"])
            assert first["margin"] == pytest.approx(expected["step_0"]["margin"], abs=1e-5)
            assert said.count("chosen and rejected are the same") == 1 and "note      1:" in said
    # What the reference is not: the base without its adapter.
    off, _ = dpo(tmp_path, model=model, init_adapter=adapter, ref_model=str(model), max_steps=1)
    assert abs(lines_of(off)[0]["loss"] - math.log(2)) > 1e-3
    same, _ = dpo(tmp_path, model=model, init_adapter=adapter, ref_model=str(adapter), max_steps=1)
    assert lines_of(same)[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)


def test_case_23_counts_trained_tokens_and_gives_a_tie_no_gradient(tmp_path: Path) -> None:
    expected = json.loads(Path(toy.case("23-dpo-ref-adapter.expect.json")).read_text())
    data = prepare_pairs([str(CASE)], tokenizer=toy.tokenizer(), max_length="auto")
    counts = [[document.targets for document in row.documents] for row in data.rows]
    assert counts == expected["supervised_tokens_incl_eos"]
    tiny.make_toy(tmp_path)
    engine = engine_of(tmp_path)
    tie = data.collate([2], pad_id=0)
    sums, gradients = sums_and_gradients(engine, [Batch.of(tie, device=CPU)], PairLoss("sigmoid", 1.0))
    assert sums["margin"] == pytest.approx(0.0, abs=1e-5) and sums["accuracy"] == 0.5
    assert max(float(g.abs().max()) for g in gradients.values()) < 1e-4


# ---- TRL ----------------------------------------------------------------------------------------------

SHARED = {
    "sigmoid": (PairLoss("sigmoid", 0.3), {}),
    "sigmoid_norm": (PairLoss("sigmoid_norm", 0.3), {}),
    "ipo": (PairLoss("ipo", 0.3), {}),
    "hinge": (PairLoss("hinge", 0.3), {}),
    "robust": (PairLoss("robust", 0.3, smoothing=0.1), {"label_smoothing": 0.1}),
}


def trl_batch(found: list[AnswerRow]) -> dict[str, torch.Tensor]:
    """Chosen answers, then rejected ones, padded on the right."""
    sides = [row.documents[side] for side in (0, 1) for row in found]
    longest = max(map(len, sides))
    shape = (len(sides), longest)
    ids, mask, trained = (torch.zeros(shape, dtype=torch.long) for _ in range(3))
    for number, document in enumerate(sides):
        ids[number, : len(document)] = torch.from_numpy(document.ids.astype(np.int64))
        mask[number, : len(document)] = 1
        trained[number, : len(document)] = torch.from_numpy(document.trained.astype(np.int64))
    reference = torch.tensor(np.stack([row.reference for row in found]), dtype=torch.float32)
    return {
        "input_ids": ids, "attention_mask": mask, "completion_mask": trained,
        "ref_chosen_logps": reference[:, 0], "ref_rejected_logps": reference[:, 1],
    }  # fmt: skip


def full_engine(folder: Path) -> Engine:
    from swiftkit.formats.full import FullSpec

    return Engine(build_model(folder, dtype=torch.float32, device=CPU, full=FullSpec(None)))


def tuned_by_trl(trainer_kind: Any, config: Any, model: Any, data: Any, **options: Any) -> Any:
    tokenizer = toy.tokenizer()
    model.config._name_or_path = config.output_dir + "/toy"  # which it loads its own reference from
    return trainer_kind(model=model, args=config, train_dataset=data, processing_class=tokenizer, **options)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*SHARED, "rpo"])
def test_pair_losses_equal_trl(kind: str, tmp_path: Path, seed: int) -> None:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    model = tiny.make_toy(tmp_path / "toy", seed=seed % 1000)
    loss, options = SHARED.get(kind, (PairLoss("sigmoid", 0.3, chosen_weight=0.7), {}))
    if kind == "rpo":  # whose cross-entropy is a mean over the batch's tokens there, over a pair's here
        options = {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.7]}
    config = DPOConfig(
        output_dir=str(tmp_path), report_to=[], use_cpu=True, bf16=False, beta=0.3,
        **{"loss_type": [kind], **options},
    )  # fmt: skip
    pair = Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}])
    trainer = tuned_by_trl(DPOTrainer, config, model, pair)
    trainer.precompute_ref_logps = True  # the batch brings its own
    found = rows(1 if kind == "rpo" else 3, seed=seed % 1000)
    model.train()
    theirs = trainer._compute_loss(trainer.model, trl_batch(found), return_outputs=False)
    theirs.backward()
    engine = full_engine(tmp_path / "toy")
    sums, gradients = sums_and_gradients(engine, [batch_of(found)], loss)
    assert sums["loss"] / len(found) == pytest.approx(theirs.item(), rel=1e-5, abs=1e-5)
    oracle = {name: p.grad * len(found) for name, p in model.named_parameters() if p.grad is not None}
    assert_close(gradients, {name: oracle[name] for name in gradients}, 1e-4)


@pytest.mark.parametrize("kind", ["cpo", "simpo", "orpo"])
def test_reference_free_losses_equal_trl(kind: str, seed: int) -> None:
    from types import SimpleNamespace

    from trl.experimental.cpo import CPOTrainer
    from trl.experimental.orpo import ORPOTrainer

    torch.manual_seed(seed)
    chosen, rejected = (-torch.rand(6, dtype=torch.float64) * 3 - 1e-3 for _ in range(2))
    gamma, smoothing = (0.5, 0.1) if kind == "simpo" else (0.0, 0.1 if kind == "cpo" else 0.0)
    ours = PairLoss(kind, 0.4, smoothing=smoothing, gamma=gamma).per_pair(chosen, rejected)
    fake = SimpleNamespace(
        beta=0.4, alpha=0.0, label_smoothing=smoothing, simpo_gamma=gamma,
        accelerator=SimpleNamespace(device="cpu"),
        loss_type="simpo" if kind == "simpo" else "sigmoid",
    )  # fmt: skip
    if kind == "orpo":
        theirs = -ORPOTrainer.odds_ratio_loss(fake, chosen, rejected)[0].double()
    else:
        theirs = CPOTrainer.cpo_loss(fake, chosen, rejected)[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_kto_equals_trl(tmp_path: Path, seed: int) -> None:
    from datasets import Dataset
    from trl import KTOConfig, KTOTrainer

    model = tiny.make_toy(tmp_path / "toy", seed=seed % 1000)
    config = KTOConfig(
        output_dir=str(tmp_path), report_to=[], use_cpu=True, bf16=False, beta=0.05, desirable_weight=1.5,
        per_device_train_batch_size=2,
    )  # fmt: skip
    data = Dataset.from_list(
        [{"prompt": word, "completion": "b", "label": word == "a"} for word in ("a", "c")]
    )
    trainer = tuned_by_trl(KTOTrainer, config, model, data)
    trainer.precompute_ref_logps = True
    found = [
        AnswerRow(row.documents, np.array([-40.0, -80.0 - n]), good=n != 1)
        for n, row in enumerate(rows(3, seed=seed % 1000))
    ]
    whole = trl_batch(found)
    half = len(found)
    inputs = {name: whole[name][:half] for name in ("input_ids", "attention_mask", "completion_mask")}
    inputs |= {f"KL_{name}": whole[name][half:] for name in [*inputs]}
    inputs |= {"ref_logps": whole["ref_chosen_logps"], "ref_KL_logps": whole["ref_rejected_logps"]}
    inputs["label"] = torch.tensor([row.good for row in found])
    model.train()
    theirs = trainer._compute_loss(trainer.model, inputs, return_outputs=False)
    theirs.backward()
    engine = full_engine(tmp_path / "toy")
    sums, gradients = sums_and_gradients(engine, [batch_of(found)], LabelledLoss(0.05, good_weight=1.5))
    assert sums["kl"] > 0
    assert sums["loss"] / half == pytest.approx(theirs.item(), rel=1e-5)
    oracle = {name: p.grad * half for name, p in model.named_parameters() if p.grad is not None}
    assert_close(gradients, {name: oracle[name] for name in gradients}, 1e-4)


# ---- the head -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("trained", [False, True])
def test_logprobs_of_the_chunked_head(trained: bool, seed: int) -> None:
    from swiftkit.engine.families import LogitRule
    from swiftkit.engine.head import Head

    weight = torch.randn(50, 16, requires_grad=trained)
    hidden = torch.randn(11, 16, requires_grad=True)
    targets, counts = torch.randint(50, (11,)), torch.randn(11)
    head = Head(weight, LogitRule(scale=0.5, softcap=3.0), chunk=4)
    found = head.logprobs(hidden, targets)
    whole = head.logits(hidden).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(found, whole)
    asked = [hidden, weight] if trained else [hidden]
    ours, theirs = (torch.autograd.grad((value * counts).sum(), asked) for value in (found, whole))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


# ---- the command --------------------------------------------------------------------------------------


def test_a_resumed_run_equals_an_unbroken_one(tmp_path: Path) -> None:
    model = tmp_path / "toy"
    tiny.make_toy(model, seed=5)
    knobs = dict(model=model, val_dataset=CASE, eval_steps=2, save_steps=2, max_steps=4, lora_dropout=0.2)
    whole, _ = dpo(tmp_path, **knobs)
    broken, _ = dpo(tmp_path / "b", **knobs)
    shutil.rmtree(Path(broken.folder) / "checkpoint-4")
    again, said = dpo(tmp_path / "b", **knobs, resume_from_checkpoint="auto")
    assert "from step 2" in said
    pick = ("step", "loss", "margin", "eval_loss", "eval_accuracy", "grad_norm")
    facts = [[{k: line[k] for k in pick if k in line} for line in lines_of(run)] for run in (whole, again)]
    assert facts[0] == facts[1]
    name = "checkpoint-4/adapter_model.safetensors"
    saved = [Path(run.folder, name).read_bytes() for run in (whole, again)]
    assert saved[0] == saved[1]


def test_knobs_that_belong_to_other_losses_are_refused() -> None:
    base = {"model": "m", "dataset": ["d"]}
    for knobs, words in (
        ({"loss_type": "ipo", "label_smoothing": 0.1}, "--label_smoothing"),
        ({"loss_type": "orpo", "ref_model": "x"}, "needs no reference"),
        ({"loss_type": "kto", "rpo_alpha": 1.0}, "--rpo_alpha"),
        ({"simpo_gamma": 1.0}, "is for --loss_type simpo"),
    ):
        with pytest.raises(ValueError, match=words):
            DpoConfig(**base, **knobs)
    assert DpoConfig(**base, loss_type="simpo").reward_scale == 2.0
    assert DpoConfig(**base, loss_type="orpo").chosen_weight == 1.0


def test_a_reference_of_other_tokens_is_refused(tmp_path: Path) -> None:
    tiny.make_toy(tmp_path / "toy")
    tiny.make_toy(tmp_path / "other", tok="merge")
    with pytest.raises(UserError, match="other tokens"):
        dpo(tmp_path, model=tmp_path / "toy", ref_model=str(tmp_path / "other"))


def test_reference_logprobs_are_kept_and_dropout_is_off(tmp_path: Path) -> None:
    tiny.make_toy(tmp_path / "toy", seed=7)
    run, _ = dpo(tmp_path, model=tmp_path / "toy", lora_dropout=0.5, max_steps=3)
    kept = np.load(Path(run.folder) / "reference.npz")
    engine = Engine(build_model(tmp_path / "toy", dtype=torch.float32, device=CPU))
    data = prepare_pairs([str(CASE)], tokenizer=toy.tokenizer(), max_length="auto")
    batch = Batch.of(data.collate([0, 1, 2], pad_id=0), device=CPU)
    with torch.no_grad():
        base = answer_logprobs(engine.head, engine.hidden(batch), batch)
    np.testing.assert_allclose(kept["training"], base.double().numpy(), atol=1e-4)
