"""What `ls`, `show` and `cp` print: above all, that a copied YAML is the recipe."""

from __future__ import annotations

import pytest
import yaml

from swiftkit import recipe_file, registry
from swiftkit.config import SftConfig, build
from swiftkit.errors import UserError
from swiftkit.registry import Default, Recipe

SERVED = [pytest.param(recipe, id=recipe.name) for recipe in registry.recipes() if recipe.served]
FLAGS = {"dataset": [recipe_file.EXAMPLE_DATASET]}


def recipe_of(name: str) -> Recipe:
    recipe = registry.find(name)
    assert recipe is not None
    return recipe


@pytest.mark.parametrize("recipe", SERVED)
def test_copied_yaml_is_the_same_run_as_the_name(recipe: Recipe) -> None:
    copied = yaml.safe_load(recipe_file.render(recipe, "sft"))
    named = build(SftConfig, FLAGS | {"model": recipe.name}, registry.defaults(recipe, "sft"))
    assert copied.keys() == SftConfig.model_fields.keys()
    assert build(SftConfig, copied, registry.defaults(recipe, "sft")) == named
    assert build(SftConfig, copied) == named


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        ("learning_rate", 1e-5),
        ("learning_rate", 3e-16),
        ("sample_prompts", ["yes", "null", "1e-3", "a: b # c", "two\nlines", "  x  ", "‘ü’", "long " * 60]),
        ("sample_prompts", "none"),
        ("system", "You: 'are' \"a\" # poet\n"),
        ("report_to", ["none"]),
        ("max_length", 4096),
        ("packing", False),
        ("save_total_limit", 3),
        ("revision", "1.10"),
        ("target_modules", ["q_proj", "v_proj"]),
    ],
)
def test_any_value_survives_the_file(knob: str, value: object) -> None:
    plain = recipe_of("llama3-70b")
    recipe = Recipe(**vars(plain) | {"defaults": {"sft": {knob: Default(value, "a test")}}})
    copied = yaml.safe_load(recipe_file.render(recipe, "sft"))
    assert build(SftConfig, copied) == build(SftConfig, FLAGS | {"model": recipe.name, knob: value})


def test_yaml_explains_itself() -> None:
    text = recipe_file.render(recipe_of("llama3-8b-base"), "sft", path="mine.yaml")
    lines = text.splitlines()
    assert "#   swiftkit sft mine.yaml" in lines[:4]
    assert max(map(len, lines)) <= recipe_file.WIDTH
    assert "accept its licence on https://huggingface.co/meta-llama/Meta-Llama-3-8B" in text.replace(
        "\n# ", " "
    )
    flat = text.replace("\n# ", " ")
    for name, field in SftConfig.model_fields.items():
        assert field.description is not None and field.description in flat, name
    assert "[tokens] max_length: auto" in flat.replace("\n", " ")
    assert "Here chatml, not null: this base model's tokenizer has no chat template" in flat
    headings = [line.split()[2] for line in lines if line.startswith("# --- ")]
    assert headings == ["model", "data", "adapter", "training", "run"]


def test_a_folder_can_be_copied_too() -> None:
    dimensions = recipe_of("smollm2-135m").dimensions
    recipe = registry.from_config_json({"model_type": "llama", **vars(dimensions)}, "./my-model")
    copied = build(SftConfig, yaml.safe_load(recipe_file.render(recipe, "sft")))
    assert (copied.model, copied.learning_rate) == ("./my-model", 1e-3)


def test_methods_that_are_not_there_say_what_is_missing() -> None:
    with pytest.raises(UserError, match=r"'stf'; did you mean sft\?"):
        recipe_file.check_method("stf")
    if "nf4" in recipe_file.choices(SftConfig.model_fields["base_precision"].annotation):
        assert "base_precision: nf4" in recipe_file.render(recipe_of("llama3-70b"), "qlora")
        return
    for refused in (recipe_file.render, recipe_file.show):
        with pytest.raises(
            UserError, match=r"qlora is `swiftkit sft --base_precision nf4`, and this version"
        ):
            refused(recipe_of("llama3-70b"), "qlora")
    assert "not yet: qlora is" in recipe_file.show(recipe_of("llama3-70b"))


@pytest.mark.parametrize("recipe", SERVED)
def test_show_tells_what_a_user_decides_by(recipe: Recipe) -> None:
    text = recipe_file.show(recipe, "sft")
    assert recipe.hf in text and recipe.licence in text and ("gated" in text) == recipe.gated
    assert f"{recipe.context_length:,} tokens" in text
    flat = " ".join(text.split())
    for knob, entry in registry.reasons(recipe, "sft").items():
        assert f"{knob}: {recipe_file.to_yaml(entry.value)} {entry.why}" in flat
    assert f"swiftkit sft --model {recipe.name} --dataset my.jsonl" in text
    assert all(where in text for where in recipe.source.values())


@pytest.mark.parametrize("name", [recipe.name for recipe in registry.recipes() if not recipe.served])
def test_a_model_that_cannot_be_trained_yet_says_so_everywhere(name: str) -> None:
    recipe = recipe_of(name)
    text = recipe_file.show(recipe)
    assert f"not yet: models of type {recipe.model_type} cannot be trained with this version" in text
    assert "run it:" not in text
    assert "no training yet" in recipe_file.listing([recipe], piped=False)
    with pytest.raises(UserError, match=rf"{name}: this version cannot train models of type"):
        recipe_file.render(recipe, "sft")


def test_a_mixture_tells_what_a_token_meets() -> None:
    text = recipe_file.show(recipe_of("qwen3-30b-a3b"))
    assert "parameters    30.5B, of which 3.35B are active for a token" in text
    assert "num_experts 128" in text and "null" not in text
    assert "num_experts" not in recipe_file.show(recipe_of("qwen3-8b"))


def test_listing() -> None:
    recipes = registry.search(["smollm2"])
    assert recipe_file.listing(recipes, piped=True).split("\n") == [recipe.name for recipe in recipes]
    table = recipe_file.listing(recipes, piped=False, width=120).split("\n")
    assert len(table) == len(recipes) + 1
    starts = {line.find("HuggingFaceTB/") for line in table[1:]}
    assert len(starts) == 1 and table[0].find("hub id") in starts
    assert table[1].split() == [
        "smollm2-135m",
        "135M",
        "8,192",
        "Apache-2.0",
        "HuggingFaceTB/SmolLM2-135M-Instruct",
    ]
    narrow = recipe_file.listing(registry.recipes(), piped=False, width=50).split("\n")
    assert max(map(len, narrow)) == 50
    assert recipe_file.listing([], piped=True) == ""
