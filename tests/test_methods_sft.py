"""Supervised fine-tuning: TRL's trainer as oracle, and whole runs from rows to an adapter."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from swiftkit.config import SftConfig, TrainKnobs
from swiftkit.data import Prepared, prepare
from swiftkit.engine import Engine, LoraSpec
from swiftkit.engine.build import build_model, describe
from swiftkit.errors import UserError
from swiftkit.formats.peft import load_adapter
from swiftkit.formats.source import LocalModel
from swiftkit.formats.weights import Weights
from swiftkit.methods import opening, sft
from swiftkit.methods.opening import longest_window
from swiftkit.train.job import base_for_others
from swiftkit.train.log import FILE, Log
from swiftkit.train.loop import fit
from swiftkit.train.run import Run
from swiftkit.train.steps import plan_steps
from swiftkit.train.tuning import trained_numbers
from tests import tiny
from tests.cases import toy

CPU = torch.device("cpu")


def talk(*turns: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]}


CONVERSATIONS = [
    talk("Who are you?", "A small kit."),
    talk("Say one.", "One.", "And two?", "Two, and then three."),
    talk("?", "!"),
    talk("What is the capital of France?", "Paris is the capital of France, a city on the Seine."),
]
COMPLETIONS = [
    {"prompt": "two plus two is ", "completion": "four"},
    {"prompt": "p", "completion": "a much longer completion than the prompt"},
    {"prompt": "a longer prompt than its completion: ", "completion": "x"},
    {"prompt": "1 2 3 ", "completion": "4 5 6"},
]


def rows(folder: Path, values: list[dict[str, Any]], name: str = "rows.jsonl") -> str:
    path = folder / name
    path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")
    return str(path)


# ---- TRL as oracle ---------------------------------------------------------------------------------------

SPEC = LoraSpec(rank=4, alpha=8)
STEPS = 12
KNOBS: dict[str, Any] = dict(
    learning_rate=3e-3, weight_decay=0.05, max_grad_norm=0.5, adam_beta2=0.98, warmup_ratio=0, max_steps=STEPS
)


def ours(
    model: Path, data: Prepared, folder: Path, *, micro: int, schedule: str
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses and gradient norms of the steps, and the adapter after them; a step takes all windows."""
    engine = Engine(build_model(model, dtype=torch.float32, device=CPU, lora=SPEC))
    folder.mkdir()
    knobs = TrainKnobs(
        **KNOBS,
        lr_scheduler_type=schedule,
        logging_steps=1,
        global_batch_size=len(data.windows),
        per_device_train_batch_size=micro,
    )
    plan = plan_steps(knobs, num_windows=len(data.windows), max_length=data.max_length, device_type="cpu")
    console = Console(file=(folder / "console.txt").open("w"))
    with Log(folder, steps=STEPS, report_to=[], settings={}, console=console) as log:
        fit(engine, data, sft.loss, knobs=knobs, plan=plan, log=log, pad_id=0)
    lines = [json.loads(line) for line in (folder / FILE).read_text().splitlines()]
    return [x["loss"] for x in lines], [x["grad_norm"] for x in lines], engine.parameters


def theirs(
    model: Path, values: list[dict[str, Any]], folder: Path, *, micro: int, schedule: str, **options: Any
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """The same of TRL's SFTTrainer over PEFT, from the same first values of the adapter."""
    peft, trl, datasets = (pytest.importorskip(name) for name in ("peft", "trl", "datasets"))
    from transformers import AutoModelForCausalLM, AutoTokenizer

    first = Engine(build_model(model, dtype=torch.float32, device=CPU, lora=SPEC)).parameters
    base = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager", dtype=torch.float32)
    wrapped = peft.get_peft_model(
        base,
        peft.LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", target_modules=_leaves(first)),
    )
    adapter = {
        name.removeprefix("base_model.model.").replace(".default.weight", ""): parameter
        for name, parameter in wrapped.named_parameters()
        if parameter.requires_grad
    }
    assert adapter.keys() == first.keys()
    with torch.no_grad():
        for name, parameter in adapter.items():
            parameter.copy_(first[name])

    losses: list[float] = []

    class Listening(trl.SFTTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            made = super().compute_loss(*args, **kwargs)
            losses.append(float((made[0] if isinstance(made, tuple) else made).detach()))
            return made

    trainer = Listening(
        model=wrapped,
        processing_class=AutoTokenizer.from_pretrained(model),
        train_dataset=datasets.Dataset.from_list(values),
        args=trl.SFTConfig(
            output_dir=str(folder),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=len(values) // micro,
            max_steps=STEPS,
            learning_rate=KNOBS["learning_rate"],
            weight_decay=KNOBS["weight_decay"],
            max_grad_norm=KNOBS["max_grad_norm"],
            adam_beta2=KNOBS["adam_beta2"],
            lr_scheduler_type=schedule,
            optim="adamw_torch",
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            **options,
        ),
    )
    trainer.train()
    accumulated = np.array(losses).reshape(STEPS, -1).sum(1).tolist()
    norms = [float(line["grad_norm"]) for line in trainer.state.log_history if "grad_norm" in line]
    return accumulated, norms, adapter


def _leaves(parameters: dict[str, torch.Tensor]) -> list[str]:
    return sorted({name.split(".")[-2] for name in parameters})


@pytest.mark.parametrize(
    ("kind", "micro", "schedule"),
    [("conversations", 4, "constant"), ("conversations", 2, "cosine"), ("completions", 1, "linear")],
)
def test_a_run_equals_trl_s(kind: str, micro: int, schedule: str, tmp_path: Path) -> None:
    """Losses, gradient norms and the trained adapter, with clipping and weight decay at work."""
    model = tmp_path / "model"
    tiny.make_toy(model, template="chatml-marked")
    values = CONVERSATIONS if kind == "conversations" else COMPLETIONS
    only = {"assistant_only_loss": True} if kind == "conversations" else {"completion_only_loss": True}
    tokenizer = toy.tokenizer()
    tokenizer.chat_template = Path(toy.template("chatml-marked")).read_text()
    data = prepare(
        [rows(tmp_path, values)],
        tokenizer=tokenizer,
        max_length="auto",
        packing=False,
        truncation_strategy="drop",
        system=None,
    )
    found = ours(model, data, tmp_path / "ours", micro=micro, schedule=schedule)
    oracle = theirs(model, values, tmp_path / "theirs", micro=micro, schedule=schedule, **only)
    losses, norms, adapter = found
    np.testing.assert_allclose(losses, oracle[0], rtol=1e-5)
    np.testing.assert_allclose(norms, oracle[1], rtol=1e-5)
    assert max(norms) > KNOBS["max_grad_norm"] and losses[-1] < losses[0]
    for name, parameter in adapter.items():
        other = oracle[2][name]
        error = (parameter - other).norm() / other.norm()
        assert error < 5e-5, f"{name}: relative error {error:.2e}"


# ---- whole runs ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def toy_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "toy"
    tiny.make_toy(folder, template="chatml")
    return folder


def run(folder: Path, **knobs: Any) -> Run:
    defaults = dict(
        output_dir=str(folder / "output"), device="cpu", report_to="none", learning_rate=5e-3, logging_steps=1
    )
    with (folder / "console.txt").open("w") as file:
        return sft.run(SftConfig.model_validate({**defaults, **knobs}), Console(file=file, width=200))


def test_from_conversations_to_an_adapter(toy_model: Path, tmp_path: Path) -> None:
    source = rows(tmp_path, CONVERSATIONS * 3)
    done = run(
        tmp_path, model=str(toy_model), dataset=source, max_steps=12, sample_max_new_tokens=4, save_steps=5
    )
    assert done.folder.parent == tmp_path / "output" / "toy"
    assert done.adapter_dir.name == "checkpoint-12"
    assert [p.name for p in sorted(done.folder.glob("checkpoint-*"))] == [
        f"checkpoint-{n}" for n in (10, 12, 5)
    ]
    metrics = done.metrics
    assert metrics["step"].tolist() == list(range(1, 13))
    assert metrics["loss"].iloc[-1] < 0.9 * metrics["loss"].iloc[0]
    assert [sample["prompt"] for sample in done.samples] == ["Who are you?", "Say one.", "?"]
    assert all(sample.keys() == {"prompt", "before", "after"} for sample in done.samples)
    assert json.loads((done.folder / "data_report.json").read_text())["training"]["rows_kept"] == 12
    assert (done.adapter_dir / "generation_config.json").is_file()
    spec, tensors = load_adapter(done.adapter_dir)
    assert len(spec.target_modules) == 2 * 7 and spec.rank == 16
    assert all(bool(t.any()) for t in tensors.values()), "every factor has moved or was drawn"


@pytest.mark.compat
def test_what_a_run_saves_peft_loads_by_itself(
    toy_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint names its base so that PEFT finds it from anywhere; logits equal ours."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    monkeypatch.chdir(toy_model.parent)
    done = run(
        tmp_path, model=toy_model.name, dataset=rows(tmp_path, CONVERSATIONS), max_steps=3,
        sample_prompts="none",
    )  # fmt: skip
    monkeypatch.chdir(tmp_path)
    base = peft.PeftConfig.from_pretrained(done.adapter_dir).base_model_name_or_path
    theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), done.adapter_dir)
    spec, tensors = load_adapter(done.adapter_dir)
    engine = Engine(build_model(toy_model, dtype=torch.float32, device=CPU, lora=spec))
    engine.load_adapter(tensors)
    batch = tiny.row(tiny.documents([17]))
    with torch.no_grad():
        found = engine.head.logits(engine.hidden(batch))
        expected = theirs.eval()(input_ids=batch.input_ids[None], use_cache=False).logits[0]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-5)


def test_a_name_of_the_registry_is_its_hub_id_for_others() -> None:
    assert base_for_others("smollm2-135m") == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert base_for_others("someone/model") == "someone/model"


def test_args_json_repeats_a_run(toy_model: Path, tmp_path: Path) -> None:
    source = rows(tmp_path, CONVERSATIONS)
    first = run(tmp_path, model=str(toy_model), dataset=source, max_steps=3, sample_prompts="none")
    again = sft.run(SftConfig.model_validate(first.args["config"]), Console(quiet=True))
    assert again.folder != first.folder
    made, remade = first.args, again.args
    assert made["plan"].pop("note") and not remade["plan"].pop("note"), "what was auto is a number now"
    assert made.pop("asked")["max_length"] == "auto" and remade.pop("asked") == made["config"]
    assert remade == made
    columns = ["step", "loss", "learning_rate", "grad_norm"]
    assert again.metrics[columns].equals(first.metrics[columns])
    one, other = (load_adapter(r.adapter_dir)[1] for r in (first, again))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_school_sums_with_rows_to_evaluate_on(toy_model: Path, tmp_path: Path, shared_data: Path) -> None:
    done = run(
        tmp_path,
        model=str(toy_model),
        dataset=f"{shared_data / 'gsm8k' / 'train.jsonl'}#40",
        val_dataset=f"{shared_data / 'gsm8k' / 'test.jsonl'}#8",
        max_steps=10,
        eval_steps=5,
        global_batch_size=4,
        learning_rate=1e-2,
        sample_prompts="none",
    )
    report = json.loads((done.folder / "data_report.json").read_text())
    assert report["training"]["rows_kept"] == 40 and report["evaluation"]["rows_read"] == 8
    judged = done.metrics.dropna(subset=["eval_loss"])
    assert judged["step"].tolist() == [0, 5, 10]
    assert judged["eval_loss"].is_monotonic_decreasing


@pytest.mark.parametrize(
    ("knobs", "rule"),
    [
        ({"target_modules": "q_prj"}, "--target_modules q_prj matches no linear layer; did you mean q_proj"),
        ({"dataset": "nowhere.jsonl"}, "nowhere.jsonl"),
        ({"max_length": 4}, "no row has a trainable token"),
    ],
)
def test_a_mistake_ends_before_a_run_folder_is_made(
    toy_model: Path, tmp_path: Path, knobs: dict[str, Any], rule: str
) -> None:
    source = rows(tmp_path, CONVERSATIONS)
    with pytest.raises(UserError, match=rule):
        run(tmp_path, **{"model": str(toy_model), "dataset": source, **knobs})
    assert not (tmp_path / "output").exists()


def test_damaged_weights_end_before_a_run_folder_is_made(tmp_path: Path) -> None:
    tiny.make_toy(tmp_path / "model", template="chatml")
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"model\.safetensors is cut or damaged"):
        run(tmp_path, model=str(tmp_path / "model"), dataset=rows(tmp_path, CONVERSATIONS))
    assert not (tmp_path / "output").exists()


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path: Path) -> None:
    """On a GPU such a token would end the run in a device assertion that names nothing."""
    tiny.make("llama", tmp_path / "model", vocab_size=100, pad_token_id=0)
    toy.tokenizer().save_pretrained(tmp_path / "model")
    source = rows(tmp_path, [{"text": "high letters: zzz"}])
    with pytest.raises(UserError, match=r"jsonl:1: the tokenizer makes token \d{3} of it, the model has 100"):
        run(tmp_path, model=str(tmp_path / "model"), dataset=source)
    assert not (tmp_path / "output").exists()


# ---- what is said first ----------------------------------------------------------------------------------


def test_what_will_happen_is_said_before_weights_are_loaded(
    toy_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(Engine, "load", fail)
    with pytest.raises(MemoryError):
        run(tmp_path, model=str(toy_model), dataset=rows(tmp_path, CONVERSATIONS), lora_rank=4)
    said = (tmp_path / "console.txt").read_text()
    labels = [line.split()[0] for line in said.splitlines() if not line.startswith(" ")]
    assert labels[:3] == ["model", "base", "adapter"] and labels[-2:] == ["steps", "run"]
    trained = sum(p.numel() for p in engine_parameters(toy_model, LoraSpec(rank=4)).values())
    assert f"LoRA rank 4, alpha 32, {trained:,} parameters" in said and ", plain layers" in said
    (folder,) = (tmp_path / "output" / "toy").iterdir()
    assert {path.name for path in folder.iterdir()} == {"args.json", "data_report.json", ".lock"}


def engine_parameters(model: Path, lora: LoraSpec) -> dict[str, torch.Tensor]:
    return Engine(build_model(model, dtype=torch.float32, device=CPU, lora=lora)).parameters


@pytest.mark.parametrize("targets", [("all-linear",), ("q_proj", "down_proj")])
@pytest.mark.parametrize("family", ["qwen2", "phi3"])
def test_an_adapter_is_counted_without_weights(family: str, targets: tuple[str, ...], tmp_path: Path) -> None:
    if family == "phi3" and "q_proj" in targets:
        targets = ("qkv_proj", "down_proj")
    tiny.make(family, tmp_path)
    lora = LoraSpec(rank=3, target_modules=targets)
    trained = sum(p.numel() for p in engine_parameters(tmp_path, lora).values())
    assert trained_numbers(describe(tmp_path), lora) == trained


def test_brackets_in_what_is_said_are_no_markup(
    toy_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = opening.open_model

    def saying(name: str, *, say: Callable[[str], None], **options: Any) -> LocalModel:
        say("fetching models[v2]/a[/b]c")
        return opened(name, say=say, **options)

    monkeypatch.setattr(opening, "open_model", saying)
    source = rows(tmp_path, CONVERSATIONS)
    run(tmp_path, model=str(toy_model), dataset=source, max_steps=1, sample_prompts="none")
    assert "fetching models[v2]/a[/b]c\n" in (tmp_path / "console.txt").read_text()


def test_a_hub_model_is_recorded_with_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a cache as huggingface_hub lays it out; nothing is fetched."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    repo = tmp_path / "hub" / "models--someone--toy"
    tiny.make_toy(repo / "snapshots" / commit, template="chatml")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    source = rows(tmp_path, CONVERSATIONS)
    done = run(tmp_path, model="someone/toy", dataset=source, max_steps=1, sample_prompts="none")
    base = done.args["base"]
    assert (base["source"], base["revision"]) == ("hf", commit)
    assert done.args["asked"]["revision"] is None


# ---- windows and the model's context ---------------------------------------------------------------------


def test_windows_longer_than_the_context_are_refused(toy_model: Path, tmp_path: Path) -> None:
    context = describe(toy_model).max_position_embeddings
    source = rows(tmp_path, CONVERSATIONS)
    rule = rf"--max_length {context + 1} is more than the model's context of {context} tokens; give at most"
    with pytest.raises(UserError, match=rule):
        run(tmp_path, model=str(toy_model), dataset=source, max_length=context + 1)
    assert not (tmp_path / "output").exists()


def test_auto_stays_within_the_context(tmp_path: Path) -> None:
    model = tmp_path / "model"
    tiny.make("llama", model, max_position_embeddings=24, vocab_size=300)
    toy.tokenizer().save_pretrained(model)
    source = rows(tmp_path, [{"text": "a long row of many words, beyond the context"}, {"text": "short"}])
    done = run(tmp_path, model=str(model), dataset=source, max_steps=1, sample_prompts="none")
    assert done.args["config"]["max_length"] == 24
    assert json.loads((done.folder / "data_report.json").read_text())["training"]["rows_kept"] == 1


@pytest.mark.compat
def test_positions_that_depend_on_the_longest_document_are_refused() -> None:
    from transformers import AutoConfig

    factors = [1.0] * 8
    options = {**tiny.SIZES, "original_max_position_embeddings": 64}
    rope = dict(rope_type="longrope", rope_theta=1e4, short_factor=factors, long_factor=factors)
    phi3 = AutoConfig.for_model("phi3", **options, rope_parameters=rope)
    assert longest_window(phi3, "auto") == longest_window(phi3, 64) == 64
    with pytest.raises(UserError, match=r"--max_length 65 is more than 64 tokens, beyond which .*longrope"):
        longest_window(phi3, 65)
    plain = AutoConfig.for_model("phi3", **options)
    assert longest_window(plain, 512) == 512
    yarn = dict(rope_type="yarn", rope_theta=1e4, factor=8.0, original_max_position_embeddings=64)
    assert longest_window(AutoConfig.for_model("llama", **tiny.SIZES, rope_parameters=yarn), 512) == 512
    layers: dict[str, dict[str, Any]] = dict(
        sliding_attention=dict(rope_type="default"), full_attention=dict(rope_type="dynamic")
    )
    by_kind = SimpleNamespace(max_position_embeddings=512, rope_parameters=layers)
    assert longest_window(by_kind, "auto") == 512
    layers["full_attention"]["original_max_position_embeddings"] = 32
    assert longest_window(by_kind, "auto") == 32
    assert longest_window(SimpleNamespace(), 10**6) is None


# ---- special tokens that a base never learnt -------------------------------------------------------------


@pytest.mark.parametrize("untrained", [False, True])
def test_untrained_tokens_of_the_template_are_said_for_conversations(untrained: bool, tmp_path: Path) -> None:
    model = tmp_path / "model"
    made = tiny.make_toy(model, template="chatml")
    if untrained:
        with torch.no_grad():
            made.get_input_embeddings().weight[4] = 0
        made.save_pretrained(model)
    for name, values in (("chat", CONVERSATIONS), ("plain", COMPLETIONS)):
        (tmp_path / name).mkdir()
        source = rows(tmp_path / name, values)
        run(tmp_path / name, model=str(model), dataset=source, max_steps=1, sample_prompts="none")
        said = (tmp_path / name / "console.txt").read_text()
        word = "warning   the chat template writes <|im_end|>, and this base model never learnt it"
        assert (word in said) == (untrained and name == "chat")


def test_rows_are_read_by_themselves(toy_model: Path) -> None:
    weights = Weights(toy_model)
    whole = weights.read("model.embed_tokens.weight")
    assert torch.equal(weights.rows("model.embed_tokens.weight", [4, 0, 4]), whole[[4, 0, 4]])


@pytest.mark.slow
@pytest.mark.compat
def test_a_real_model_learns_school_sums(smollm2: Path, tmp_path: Path, shared_data: Path) -> None:
    done = run(
        tmp_path,
        model=str(smollm2),
        dataset=f"{shared_data / 'gsm8k' / 'train.jsonl'}#400",
        val_dataset=f"{shared_data / 'gsm8k' / 'test.jsonl'}#20",
        max_length=512,
        global_batch_size=2,
        max_steps=12,
        eval_steps=12,
        learning_rate=1e-3,
        sample_prompts="none",
    )
    before, after = done.metrics["eval_loss"].dropna()
    print(f"loss on held-out sums: {before:.4f} before, {after:.4f} after 12 steps")
    assert after < before - 0.1
