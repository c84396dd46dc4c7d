"""Embedding and head, tokenizer, template and stop tokens: what other tools read beside the blocks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from swiftkit.config import MergeConfig, build
from swiftkit.errors import UserError
from swiftkit.export.merge import merge
from swiftkit.formats.generation import mended
from swiftkit.formats.shards import StoredWeights
from tests import tiny
from tests.adapters import ids, logits, make_base, make_checkpoint, reopened, write_args
from tests.cases import toy

peft = pytest.importorskip("peft")
EXACT = dict(rtol=1e-4, atol=1e-4)
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def merged(checkpoint: Path, out: Path, **knobs: Any) -> tuple[Path, list[str]]:
    lines: list[str] = []
    config = build(MergeConfig, {"adapters": str(checkpoint), "output_dir": str(out), **knobs})
    return merge(config, say=lines.append), lines


def read_json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def ends(folder: Path) -> tuple[bool, set[str]]:
    """The tie flag, and which of the two matrices are stored."""
    stored = StoredWeights(folder).tensors
    return read_json(folder / "config.json")["tie_word_embeddings"], {EMBEDDING, HEAD} & stored.keys()


# ---- tied embeddings ---------------------------------------------------------------------------------------


def test_a_tied_head_stays_tied_and_is_stored_once(tmp_path: Path) -> None:
    make_base(tmp_path / "base", "llama-tied-biased")
    make_checkpoint(tmp_path / "checkpoint", tmp_path / "base", args={})
    out, _ = merged(tmp_path / "checkpoint", tmp_path / "out")
    assert ends(out) == (True, {EMBEDDING})


def test_the_flag_is_written_where_the_family_has_another_default(tmp_path: Path) -> None:
    """Gemma ties without saying so in its config.json."""
    make_base(tmp_path / "base", "gemma2", tie_word_embeddings=True)
    config = read_json(tmp_path / "base" / "config.json")
    config.pop("tie_word_embeddings", None)
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    make_checkpoint(tmp_path / "checkpoint", tmp_path / "base", args={})
    out, _ = merged(tmp_path / "checkpoint", tmp_path / "out")
    assert ends(out) == (True, {EMBEDDING})


@pytest.mark.parametrize(
    ("trained", "ties", "expected"),
    [
        (["embed_tokens", "lm_head"], False, (False, {EMBEDDING, HEAD})),
        (["embed_tokens"], True, (True, {EMBEDDING})),
        (["lm_head"], False, (False, {EMBEDDING, HEAD})),
    ],
    ids=["both", "embedding that is the head", "head"],
)
def test_trained_ends_of_a_tied_base(
    trained: list[str], ties: bool, expected: tuple[bool, set[str]], tmp_path: Path, seed: int
) -> None:
    """Any reader gets PEFT's live model: the one that trusts the flag, and the one that trusts the file."""
    make_base(tmp_path / "base", "llama-tied-biased")
    tuned = make_checkpoint(
        tmp_path / "checkpoint", tmp_path / "base", seed=seed, args={}, target_modules=["q_proj", "v_proj"],
        modules_to_save=trained, ensure_weight_tying=ties,
    )  # fmt: skip
    live = logits(tuned, ids(seed))
    out, _ = merged(tmp_path / "checkpoint", tmp_path / "out")
    assert ends(out) == expected
    torch.testing.assert_close(logits(reopened(out), ids(seed)), live, **EXACT)


def test_a_base_that_is_in_two_minds_about_its_head_is_refused(tmp_path: Path) -> None:
    """Tied by its config, with two different matrices in its file: readers differ on what that is."""
    from safetensors.torch import load_file, save_file

    make_base(tmp_path / "base", "llama-tied-biased")
    make_checkpoint(tmp_path / "checkpoint", tmp_path / "base")
    file = tmp_path / "base" / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, HEAD: tensors[EMBEDDING].clone()}, file)
    out, _ = merged(tmp_path / "checkpoint", tmp_path / "out")
    assert ends(out) == (True, {EMBEDDING})
    save_file({**tensors, HEAD: tensors[EMBEDDING] + 1}, file)
    with pytest.raises(UserError, match="ties the output head to the embedding, but"):
        merged(tmp_path / "checkpoint", tmp_path / "again")


def tied_toy(folder: Path, recipe: dict[str, Any]) -> tuple[Any, Any]:
    """Case 19's model with three new tokens and both matrices trained, by PEFT; and its tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(recipe["seed"])
    config = AutoConfig.from_pretrained(toy.case("00-toy/model-dense-tied.json"))
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer = toy.tokenizer("plain")
    tokenizer.save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer.add_tokens(recipe["add_tokens"])
    model.resize_token_embeddings(config.vocab_size + len(recipe["add_tokens"]), mean_resizing=False)
    lora = recipe["lora"]
    tuned: Any = peft.get_peft_model(
        model,
        peft.LoraConfig(
            r=lora["r"], lora_alpha=lora["alpha"], target_modules=lora["target"],
            modules_to_save=lora["also_train"], task_type="CAUSAL_LM",
        ),
    )  # fmt: skip
    return tuned, tokenizer


def test_case_19_new_tokens_on_tied_embeddings(tmp_path: Path) -> None:
    recipe = read_json(Path(toy.case("19-tied-merge.recipe.json")))
    expected = toy.expected("19-tied-merge")
    tuned, tokenizer = tied_toy(tmp_path / "base", recipe)
    optimizer = torch.optim.AdamW((p for p in tuned.parameters() if p.requires_grad), lr=recipe["lr"])
    rows = [tokenizer(row["prompt"] + row["completion"], return_tensors="pt") for row in recipe["train_rows"]]
    for step in range(recipe["steps"]):
        row = rows[step % len(rows)]
        tuned(**row, labels=row["input_ids"]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    tuned.eval().save_pretrained(tmp_path / "checkpoint", save_embedding_layers=False)
    tokenizer.save_pretrained(tmp_path / "checkpoint")
    write_args(tmp_path / "checkpoint", tmp_path / "base", "fp32")
    probe = tokenizer(recipe["probe"], return_tensors="pt")["input_ids"]
    live = logits(tuned, probe)
    out, _ = merged(tmp_path / "checkpoint", tmp_path / "out")
    assert ends(out) == (False, {EMBEDDING, HEAD})
    model = reopened(out)
    assert model.config.vocab_size == expected["vocab_rows_after"] == live.shape[1]
    torch.testing.assert_close(logits(model, probe), live, rtol=0, atol=expected["tolerance"])
    from transformers import AutoTokenizer

    again = AutoTokenizer.from_pretrained(out)
    assert again("say: <aud_2>")["input_ids"] == tokenizer("say: <aud_2>")["input_ids"]
    model.save_pretrained(tmp_path / "saved")  # a second round through transformers
    torch.testing.assert_close(logits(reopened(tmp_path / "saved"), probe), live, **EXACT)


# ---- tokenizer, template, generation settings --------------------------------------------------------------


def test_case_11_and_20_stop_tokens_and_settings_travel(tmp_path: Path) -> None:
    """A template whose turns end in another token, and settings that transformers would refuse to save."""
    from transformers import AutoTokenizer, GenerationConfig

    expected = toy.expected("20-generation-config")
    base = tmp_path / "base"
    make_base(base)
    (base / "generation_config.json").write_text(Path(toy.case("20-generation-config.json")).read_text())
    make_checkpoint(tmp_path / "checkpoint", base, args={})
    tokenizer = toy.tokenizer("plain")
    tokenizer.chat_template = Path(toy.template("alternate-nosystem")).read_text()
    tokenizer.save_pretrained(tmp_path / "checkpoint")
    out, lines = merged(tmp_path / "checkpoint", tmp_path / "out")
    (warning,) = [line for line in lines if "generation_config.json" in line]
    assert all(name in warning for name in expected["warns_once_about"])
    settings = GenerationConfig.from_pretrained(out)
    settings.save_pretrained(tmp_path / "again")
    assert settings.eos_token_id == expected["eos_token_id_kept"] == toy.expected("11-turn-end-not-eos")[
        "saved_stop_ids_include"
    ]  # fmt: skip
    reopened(out).save_pretrained(tmp_path / "whole")
    assert AutoTokenizer.from_pretrained(out).chat_template == tokenizer.chat_template


def test_stop_tokens_of_the_base_are_kept_beside_those_of_the_training(tmp_path: Path) -> None:
    make_base(tmp_path / "base")
    (tmp_path / "base" / "generation_config.json").write_text(
        '{"eos_token_id": 9, "temperature": 0.6, "do_sample": true}'
    )
    make_checkpoint(tmp_path / "checkpoint", tmp_path / "base", args={})
    (tmp_path / "checkpoint" / "generation_config.json").write_text('{"eos_token_id": [2, 6]}')
    out, lines = merged(tmp_path / "checkpoint", tmp_path / "out")
    assert read_json(out / "generation_config.json")["eos_token_id"] == [2, 6, 9]
    assert not any("generation_config" in line for line in lines)


@pytest.mark.compat
@pytest.mark.parametrize(
    ("settings", "dropped"),
    [
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.9}, []),
        ({"temperature": 0.6, "top_p": 0.9, "top_k": 20}, ["temperature", "top_p", "top_k"]),
        ({"do_sample": False, "temperature": 1.0, "top_k": 50}, []),
        ({"num_beams": 1, "early_stopping": True}, ["early_stopping"]),
        ({"num_beams": 4, "early_stopping": True}, []),
        ({"eos_token_id": 2, "max_new_tokens": -3}, ["max_new_tokens"]),
    ],
)
def test_settings_that_contradict_each_other(
    settings: dict[str, Any], dropped: list[str], tmp_path: Path
) -> None:
    from transformers import GenerationConfig

    kept, gone = mended(settings)
    assert gone == dropped and kept == {k: v for k, v in settings.items() if k not in dropped}
    GenerationConfig(**kept).save_pretrained(tmp_path)


def test_no_code_and_no_path_of_this_machine_travels(tmp_path: Path) -> None:
    make_base(tmp_path / "base")
    (tmp_path / "base" / "modeling_x.py").write_text("raise SystemExit")
    (tmp_path / "base" / "LICENSE").write_text("terms")
    make_checkpoint(
        tmp_path / "checkpoint", tmp_path / "base", args={"dataset": [str(tmp_path / "my.jsonl")]}
    )
    out, _ = merged(tmp_path / "checkpoint", tmp_path / "out")
    assert not list(out.glob("*.py")) and (out / "LICENSE").read_text() == "terms"
    card = (out / "README.md").read_text()
    assert (
        "\n# out\n" in card
        and "Trained on my.jsonl" in card
        and "rank 4, alpha 8" in card
        and card.startswith("---\n")
    )
    assert "licence of the base model, base" in card
    for path in out.iterdir():
        assert str(tmp_path) not in path.read_bytes().decode("latin-1"), path.name


def test_the_tiny_vocabulary_is_the_toy_s() -> None:
    assert len(toy.tokenizer("plain")) <= tiny.VOCABULARY


def test_case_20_from_the_first_step_to_the_merged_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run of one step on a base with contradictory settings: warned at its start, saved, merged, loaded."""
    from transformers import GenerationConfig

    import swiftkit

    tiny.make_toy(tmp_path / "base", template="alternate-nosystem")
    text = Path(toy.case("20-generation-config.json")).read_text()
    (tmp_path / "base" / "generation_config.json").write_text(text)
    run = swiftkit.sft(
        model=tmp_path / "base", dataset=toy.case("11-turn-end-not-eos.jsonl"), max_steps=1, device="cpu",
        sample_prompts="none", report_to="none", output_dir=tmp_path / "runs",
    )  # fmt: skip
    header = capsys.readouterr().out.partition("\nstep ")[0]
    assert "temperature" in header and "top_p" in header
    out, _ = merged(run.folder, tmp_path / "out")
    for folder in (run.adapter_dir, out):
        settings = GenerationConfig.from_pretrained(folder)
        assert settings.eos_token_id == toy.expected("20-generation-config")["eos_token_id_kept"]
        settings.save_pretrained(tmp_path / "again")
