"""Whole runs of every kind of tuning: TRL as oracle, and what is saved is loaded by others and by us."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from swiftkit.api import configure_sft
from swiftkit.config import ChatConfig, SftConfig
from swiftkit.data.tokenizer import load_tokenizer
from swiftkit.engine import Engine
from swiftkit.engine.placement import Placement
from swiftkit.errors import UserError
from swiftkit.formats.peft import load_adapter
from swiftkit.formats.source import LocalModel
from swiftkit.generate.session import Session
from swiftkit.methods import sft
from swiftkit.train.artifact import read_model
from swiftkit.train.run import Run
from swiftkit.train.tuning import plan_tuning
from tests import tiny
from tests.cases import toy

CPU = torch.device("cpu")
ROWS = [
    {"prompt": "two plus two is ", "completion": "four"},
    {"prompt": "p", "completion": "a much longer completion than the prompt"},
    {"prompt": "a longer prompt than its completion: ", "completion": "x"},
    {"prompt": "1 2 3 ", "completion": "4 5 6"},
]
STEPS = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "toy"
    tiny.make_toy(folder, template="chatml")
    return folder


def dataset(folder: Path) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    return str(path)


def run(folder: Path, model: Path, **knobs: Any) -> Run:
    defaults = dict(
        model=str(model), dataset=[dataset(folder)], output_dir=str(folder / "output"), device="cpu",
        report_to="none", sample_prompts="none", logging_steps=1, max_steps=4, global_batch_size=4,
        packing=False, lora_rank=4,
    )  # fmt: skip
    with (folder / "console.txt").open("a") as file:
        knobs = {k: v for k, v in {**defaults, **knobs}.items() if v is not None}
        return sft.run(SftConfig.model_validate(knobs), Console(file=file, width=200))


def said(folder: Path) -> str:
    return (folder / "console.txt").read_text()


def batch() -> Any:
    return tiny.row(tiny.documents([17]))


def our_logits(engine: Engine) -> torch.Tensor:
    engine.model.eval()
    with torch.no_grad():
        return engine.head.logits(engine.hidden(batch()))


def their_logits(theirs: Any) -> torch.Tensor:
    with torch.no_grad():
        return theirs.eval()(input_ids=batch().input_ids[None], use_cache=False).logits[0]


# ---- the whole model -------------------------------------------------------------------------------------


def trained_by_trl(model: Path, folder: Path, **options: Any) -> tuple[list[float], Any]:
    """Losses of the steps, and the model after them."""
    trl, datasets = (pytest.importorskip(name) for name in ("trl", "datasets"))
    from transformers import AutoModelForCausalLM, AutoTokenizer

    losses: list[float] = []

    class Listening(trl.SFTTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            made = super().compute_loss(*args, **kwargs)
            losses.append(float((made[0] if isinstance(made, tuple) else made).detach()))
            return made

    trainer = Listening(
        model=AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager", dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(model),
        train_dataset=datasets.Dataset.from_list(ROWS),
        args=trl.SFTConfig(
            output_dir=str(folder),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=len(ROWS),
            max_steps=STEPS,
            completion_only_loss=True,
            lr_scheduler_type="linear",
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            **options,
        ),
    )
    trainer.train()
    return losses, trainer.model


@pytest.mark.parametrize("optim", ["adamw_torch", pytest.param("adamw_8bit", marks=pytest.mark.slow)])
def test_a_full_run_equals_trl_s(optim: str, model: Path, tmp_path: Path) -> None:
    """Losses, every weight, and the checkpoint as transformers loads it."""
    from transformers import AutoModelForCausalLM

    if optim == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    knobs: dict[str, Any] = dict(learning_rate=2e-3, weight_decay=0.05, max_grad_norm=0.5, optim=optim)
    done = run(
        tmp_path, model, tuner_type="full", max_steps=STEPS, lr_scheduler_type="linear", warmup_ratio=0,
        lora_rank=None, **knobs,
    )  # fmt: skip
    losses, theirs = trained_by_trl(model, tmp_path / "trl", **knobs)
    np.testing.assert_allclose(done.metrics["loss"], losses, rtol=1e-5)
    assert losses[-1] < losses[0]
    saved = AutoModelForCausalLM.from_pretrained(done.adapter_dir, attn_implementation="eager")
    oracle = dict(theirs.named_parameters())
    assert dict(saved.named_parameters()).keys() == oracle.keys()
    for name, parameter in saved.named_parameters():
        error = (parameter - oracle[name]).norm() / oracle[name].norm()
        assert error < 5e-5, f"{name}: relative error {error:.1e}"
    total = sum(p.numel() for p in saved.parameters())
    assert f"trained   all weights, {total:,} parameters" in said(tmp_path)


def test_a_full_checkpoint_is_a_model_for_chat(model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    done = run(tmp_path, model, tuner_type="full", lora_rank=None, learning_rate=1e-2, save_steps=2)
    checkpoint = done.adapter_dir
    assert f"talk      swiftkit chat --model {checkpoint}" in said(tmp_path)
    sessions = [
        Session.open(ChatConfig(device="cpu", max_new_tokens=3, **{knob: str(place)}), say=lambda _: None)
        for knob, place in (("model", checkpoint), ("adapters", checkpoint), ("adapters", done.folder))
    ]
    expected = their_logits(AutoModelForCausalLM.from_pretrained(checkpoint))
    for session in sessions:
        torch.testing.assert_close(our_logits(session.engine), expected, rtol=1e-5, atol=2e-5)
    assert (
        len(
            {
                session.ask("Who are you?")
                for session in [*sessions, done.chat(device="cpu", max_new_tokens=3)]
            }
        )
        == 1
    )
    again = run(tmp_path, checkpoint, max_steps=1)  # and a base to go on from
    assert (again.adapter_dir / "adapter_config.json").is_file()


def test_the_rate_is_lower_for_a_whole_model(model: Path, tmp_path: Path) -> None:
    run(tmp_path, model, max_steps=1)
    run(tmp_path, model, tuner_type="full", lora_rank=None, max_steps=1)
    rates = [line for line in said(tmp_path).splitlines() if "learning rate" in line]
    assert "learning rate 0.0001," in rates[0] and "learning rate 1e-05," in rates[1]
    recipe = {"model": "smollm2-135m", "dataset": "swiftkit::persona"}
    assert configure_sft(recipe).learning_rate == 1e-3  # the recipe's, for an adapter
    assert configure_sft({**recipe, "tuner_type": "full"}).learning_rate == "auto"


@pytest.mark.parametrize(
    "knobs",
    [
        dict(tuner_type="full", lora_rank=None, base_precision="bf16"),
        dict(init_lora_weights="pissa_niter_4"),
        *(
            pytest.param(knobs, marks=pytest.mark.slow)
            for knobs in (
                dict(tuner_type="full", lora_rank=None),
                dict(init_lora_weights="pissa"),
                dict(tuner_type="full", lora_rank=None, base_precision="bf16", optim="adamw_8bit"),
                dict(use_dora=True, use_rslora=True, loraplus_lr_ratio=4),
                dict(modules_to_save=["embed_tokens", "lm_head"], base_precision="bf16"),
                dict(new_tokens=["<tool>", "two plus"]),
            )
        ),
    ],
    ids=lambda knobs: " ".join(f"{key}={value}" for key, value in knobs.items() if value is not None),
)
def test_a_resumed_run_is_the_unbroken_one(knobs: dict[str, Any], model: Path, tmp_path: Path) -> None:
    """Bit for bit, whatever is trained."""
    if knobs.get("optim") == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    folders = [tmp_path / name for name in ("whole", "broken")]
    for folder in folders:
        folder.mkdir()
    knobs = dict(knobs, dataset=[dataset(tmp_path)], learning_rate=1e-3, save_steps=2)
    whole = run(folders[0], model, **knobs)
    broken = run(folders[1], model, **knobs)
    for path in (broken.folder / "checkpoint-4").iterdir():
        path.unlink()
    (broken.folder / "checkpoint-4").rmdir()
    resumed = run(folders[1], model, resume_from_checkpoint=str(broken.folder), **knobs)
    assert resumed.folder == broken.folder
    one, other = (read_model(r.adapter_dir) for r in (whole, resumed))
    assert one.keys() == other.keys()
    first = read_model(whole.folder / "checkpoint-2")
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name
    assert any(not torch.equal(one[name], first[name]) for name in one)


def test_a_model_that_a_gpu_cannot_hold_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it is loaded; 8-bit moments are the mend where they suffice."""
    config = SftConfig(model=str(model), dataset=["d"], tuner_type="full")
    base = LocalModel("toy", model, "folder", "", "0", "")
    gpu = Placement(torch.device("cuda"), "bf16", "plain")
    weights = 32_928
    for room, eight, mend in (
        (12 * weights, False, "take --optim adamw_8bit, or train an adapter"),
        (9 * weights, False, "; train an adapter"),
        (9 * weights, True, "; train an adapter"),
        (16 * weights, False, None),
        (10 * weights, True, None),
    ):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, room=room: (room, room))
        knobs = config.with_changes(optim="adamw_8bit" if eight else "adamw_torch")
        tuning = plan_tuning(knobs, base, load_tokenizer(model))
        if mend is None:
            tuning.check_room(gpu)
            continue
        with pytest.raises(UserError, match=rf"--tuner_type full: 32,928 weights .*{mend}"):
            tuning.check_room(gpu)


# ---- adapters --------------------------------------------------------------------------------------------


@pytest.mark.compat
@pytest.mark.parametrize(
    ("knobs", "header"),
    [
        (dict(use_dora=True), "DoRA rank 4"),
        (dict(use_rslora=True), "alpha 32 over sqrt(rank)"),
        (dict(init_lora_weights="pissa"), "starts as the principal part"),
        (dict(loraplus_lr_ratio=8), "B learns at 8 times the rate (LoRA+)"),
        (dict(modules_to_save=["embed_tokens"]), "trained whole: embed_tokens"),
    ],
)
def test_what_is_trained_is_said_and_peft_loads_it(
    knobs: dict[str, Any], header: str, model: Path, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    done = run(tmp_path, model, learning_rate=5e-3, **knobs)
    assert header in said(tmp_path)
    theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), done.adapter_dir)
    session = Session.open(ChatConfig(adapters=str(done.adapter_dir), device="cpu"), say=lambda _: None)
    expected = their_logits(theirs)
    torch.testing.assert_close(our_logits(session.engine), expected, rtol=1e-5, atol=5e-5)
    assert (expected - their_logits(AutoModelForCausalLM.from_pretrained(model))).abs().max() > 1e-3


# ---- going on from an adapter ----------------------------------------------------------------------------


def test_a_run_goes_on_from_an_adapter(model: Path, tmp_path: Path) -> None:
    first = run(tmp_path, model, target_modules=["q_proj", "v_proj"], use_rslora=True, learning_rate=5e-3)
    then = run(tmp_path, model, lora_rank=None, init_adapter=str(first.adapter_dir), max_steps=1)
    assert f"goes on from {first.adapter_dir}" in said(tmp_path)
    assert then.metrics["loss"].iloc[0] < first.metrics["loss"].iloc[-1]
    config = then.args["config"]
    assert (config["lora_rank"], config["target_modules"], config["use_rslora"]) == (
        4,
        ["q_proj", "v_proj"],
        True,
    )
    again = sft.run(SftConfig.model_validate(config), Console(quiet=True))
    one, other = (load_adapter(r.adapter_dir)[1] for r in (then, again))
    assert all(torch.equal(one[name], other[name]) for name in one)
    with pytest.raises(
        UserError, match=r"--lora_rank 8: --init_adapter .* has 4, which stays; leave --lora_rank"
    ):
        run(tmp_path, model, lora_rank=8, init_adapter=str(first.adapter_dir))
    with pytest.raises(UserError, match=r"--target_modules all-linear: --init_adapter .* has q_proj v_proj"):
        run(tmp_path, model, target_modules=["all-linear"], init_adapter=str(first.adapter_dir))


def test_a_run_goes_on_from_peft_s_own(model: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model)
    config = peft.LoraConfig(
        r=3, lora_alpha=5, target_modules=["o_proj"], use_dora=True, modules_to_save=["lm_head"]
    )
    theirs = peft.get_peft_model(base, config)
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.01)
    theirs.save_pretrained(tmp_path / "peft")
    done = run(
        tmp_path, model, lora_rank=None, init_adapter=str(tmp_path / "peft"), max_steps=1, learning_rate=1e-9
    )
    assert "DoRA rank 3, alpha 5" in said(tmp_path)
    found = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), done.adapter_dir)
    torch.testing.assert_close(their_logits(found), their_logits(theirs), rtol=1e-4, atol=1e-4)


def test_an_adapter_of_another_base_is_refused(model: Path, tmp_path: Path) -> None:
    first = run(tmp_path, model, max_steps=1)
    other = tmp_path / "other"
    tiny.make_toy(other, template="chatml", seed=7)
    with pytest.raises(
        UserError, match=r"--init_adapter .* was trained on a base with fingerprint \w{12}, --model"
    ):
        run(tmp_path, other, lora_rank=None, init_adapter=str(first.adapter_dir))


# ---- new tokens ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tuner_type", ["lora", "full"])
def test_new_tokens_are_learnt_and_travel(tuner_type: str, model: Path, tmp_path: Path) -> None:
    """From a file; the checkpoint brings tokenizer and rows, for chat, transformers and PEFT."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    (tmp_path / "tokens.txt").write_text("two plus\n\n<tool>\n", encoding="utf-8")
    knobs = dict(new_tokens=[str(tmp_path / "tokens.txt")], tuner_type=tuner_type, learning_rate=5e-3)
    done = run(tmp_path, model, lora_rank=4 if tuner_type == "lora" else None, **knobs)
    assert "2 new tokens" in said(tmp_path)
    before, after = load_tokenizer(model), load_tokenizer(done.adapter_dir)
    assert len(after) == len(before) + 2
    pieces = before("two plus", add_special_tokens=False)["input_ids"]
    (token,) = after("two plus", add_special_tokens=False)["input_ids"]
    assert len(pieces) > 1
    size = max(len(after), AutoModelForCausalLM.from_pretrained(model).config.vocab_size)
    if tuner_type == "lora":
        theirs = AutoModelForCausalLM.from_pretrained(model)
        theirs.resize_token_embeddings(size)
        theirs = peft.PeftModel.from_pretrained(theirs, done.adapter_dir)
    else:
        theirs = AutoModelForCausalLM.from_pretrained(done.adapter_dir)
    knob = "adapters" if tuner_type == "lora" else "model"
    session = Session.open(ChatConfig(device="cpu", **{knob: str(done.adapter_dir)}), say=lambda _: None)
    assert session.engine.head.weight.shape[0] == size
    torch.testing.assert_close(our_logits(session.engine), their_logits(theirs), rtol=1e-5, atol=5e-5)
    rows = session.engine.model.get_input_embeddings().weight
    base = AutoModelForCausalLM.from_pretrained(model).get_input_embeddings().weight
    start = base[pieces].mean(0)
    way = (rows[token] - start).norm() / start.norm()
    assert 0 < way < 0.5, "it began as the mean of its pieces, and moved"
    if tuner_type == "full":
        with pytest.raises(UserError, match="is a whole model: give it as --model"):
            run(tmp_path, model, lora_rank=None, init_adapter=str(done.folder))
        return
    start_again = dict(init_adapter=str(done.folder), lora_rank=None, max_steps=1, learning_rate=1e-9)
    again = run(tmp_path, model, **start_again)
    assert len(load_tokenizer(again.adapter_dir)) == len(after)
    one, other = (load_adapter(r.adapter_dir)[1] for r in (done, again))
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("knobs", "rule"),
    [
        (dict(new_tokens=["<x>", "<x>"]), "--new_tokens <x>: that is a token already, or stands twice"),
        (dict(new_tokens=["nowhere.txt"]), "--new_tokens nowhere.txt cannot be read"),
        (
            dict(use_dora=True, base_precision="nf4"),
            "--use_dora and --base_precision nf4: .*; take --base_pr",
        ),
        (
            dict(tuner_type="full", base_precision="fp8", lora_rank=None),
            "--tuner_type full and --base_precision fp8",
        ),
        (
            dict(tuner_type="full", use_rslora=True, lora_rank=None),
            "--use_rslora and --tuner_type full: it belongs to an ad",
        ),
        (dict(tuner_type="full"), "--lora_rank, --lora_alpha, --target_modules and --tuner_type full"),
        (dict(modules_to_save=["embed_token"]), "--modules_to_save embed_token matches no module"),
        (dict(init_adapter="nowhere"), "nowhere: no adapter and no checkpoint there"),
    ],
)
def test_a_mistake_ends_before_a_run_folder_is_made(
    knobs: dict[str, Any], rule: str, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=rule):
        run(tmp_path, model, **knobs)
    assert not (tmp_path / "output").exists()


def test_a_word_that_is_a_token_already_is_refused(model: Path, tmp_path: Path) -> None:
    word = next(iter(toy.tokenizer().get_added_vocab()))
    with pytest.raises(UserError, match="that is a token already"):
        run(tmp_path, model, new_tokens=[word])


@pytest.mark.parametrize(
    ("knobs", "warned"),
    [
        ({}, True),
        (dict(modules_to_save=["lm_head"]), True),
        (dict(modules_to_save=["embed_tokens", "lm_head"]), False),
        (dict(tuner_type="full", lora_rank=None), False),
    ],
)
def test_tokens_that_the_base_never_learnt_are_a_warning_unless_they_are_trained(
    knobs: dict[str, Any], warned: bool, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    made = tiny.make_toy(folder, template="chatml")
    with torch.no_grad():
        made.get_input_embeddings().weight[4] = 0
    made.save_pretrained(folder)
    talk = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "A kit."}]
    rows = tmp_path / "talk.jsonl"
    rows.write_text(json.dumps({"messages": talk}) + "\n")
    run(tmp_path, folder, dataset=[str(rows)], max_steps=1, global_batch_size=1, **knobs)
    assert ("this base model never learnt" in said(tmp_path)) == warned


@pytest.mark.slow
def test_a_real_model_is_tuned_whole(smollm2: Path, tmp_path: Path, shared_data: Path) -> None:
    """The held-out loss falls, and transformers reads the checkpoint with our logits."""
    from transformers import AutoModelForCausalLM

    done = run(
        tmp_path,
        smollm2,
        dataset=[f"{shared_data / 'gsm8k' / 'train.jsonl'}#12"],
        val_dataset=[f"{shared_data / 'gsm8k' / 'test.jsonl'}#4"],
        tuner_type="full",
        lora_rank=None,
        packing=True,
        max_length=256,
        global_batch_size=1,
        max_steps=4,
        eval_steps=4,
        learning_rate=1e-4,
    )
    before, after = done.metrics["eval_loss"].dropna()
    print(f"loss on held-out sums: {before:.4f} before, {after:.4f} after 4 steps of every weight")
    assert after < before - 0.05
    theirs = AutoModelForCausalLM.from_pretrained(done.adapter_dir, attn_implementation="eager")
    engine = Engine.load(done.adapter_dir, dtype=torch.float32, device=CPU)
    torch.testing.assert_close(our_logits(engine), their_logits(theirs), rtol=1e-4, atol=1e-3)
