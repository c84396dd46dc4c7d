"""Layers of values to one checked configuration; every complaint names the knob and where it was written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import (
    ValidationError,
)

from swiftkit.config.schema import (
    Config,
)
from swiftkit.errors import UserError, nearest

ConfigT = TypeVar("ConfigT", bound=Config)


def canonical(key: str) -> str:
    """The schema's spelling of a key: `learning-rate` and `learning_rate` are one knob."""
    return key.replace("-", "_")


def build(
    schema: type[ConfigT], *layers: Mapping[str, Any], places: Mapping[str, str] | None = None
) -> ConfigT:
    """One checked configuration from several layers, the first one winning.

    Args:
        schema: the configuration's class.
        layers: mappings from knob to value, for example flags, YAML, recipe.
        places: where a knob was written, for example `my.yaml:3`; a complaint about it begins there.

    Raises:
        UserError: naming every unknown key (with the nearest known one) and every bad value.
    """
    merged: dict[str, Any] = {}
    for layer in reversed(layers):
        merged.update({canonical(key): value for key, value in layer.items()})
    try:
        return schema.model_validate(merged)
    except ValidationError as failure:
        raise UserError(_complaint(schema, failure, places or {})) from None


def unknown(schema: type[Config], name: str) -> str:
    """The sentence that refuses a name which is no knob: the same at every door."""
    return f"unknown name --{name}{nearest(name, schema.model_fields, say='; did you mean --{}?')}"


# What pydantic's errors are called here; what it puts into the braces is the field's own limit.
_RULES = {
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "dict_type": "a JSON object of names",
    "finite_number": "a finite number",
    "float_parsing": "a number",
    "float_type": "a number",
    "greater_than": "more than {gt:g}",
    "greater_than_equal": "at least {ge:g}",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "less_than": "less than {lt:g}",
    "less_than_equal": "at most {le:g}",
    "list_type": "a list",
    "literal_error": "{expected}",
    "string_type": "text",
    "too_short": "at least one value",
}


def _complaint(schema: type[Config], failure: ValidationError, places: Mapping[str, str]) -> str:
    """All that is wrong, in one line: what is missing first, then knob by knob."""
    by_name: dict[str, list[Any]] = {}
    for error in failure.errors():
        by_name.setdefault(str(error["loc"][0]) if error["loc"] else "", []).append(error)
    missing = [name for name, errors in by_name.items() if errors[0]["type"] == "missing"]
    wrong = [name for name in by_name if name not in missing]
    sentences = [_about_missing(schema, missing)] if missing else []
    for name in wrong:
        place = f"{places[name]}: " if name in places else ""
        sentences.append(place + _about(schema, name, by_name[name]))
    return "; ".join(sentences)


def _about_missing(schema: type[Config], names: list[str]) -> str:
    if len(names) == 1:
        return f"--{names[0]} is missing: {schema.model_fields[names[0]].description}"
    flags = [f"--{name}" for name in names]
    example = "--model smollm2-135m --dataset swiftkit::persona"
    return f"{', '.join(flags[:-1])} and {flags[-1]} are missing; for example {example}"


def _about(schema: type[Config], name: str, errors: list[Any]) -> str:
    """One sentence on a knob; a knob of several types has an error for each of them."""
    kind, value = errors[0]["type"], errors[0]["input"]
    if kind == "extra_forbidden":
        return unknown(schema, name)
    if kind == "value_error":
        rule = str(errors[0]["msg"]).removeprefix("Value error, ")
        return f"--{name}: {rule}, not {_shown(value)}" if name else rule
    rules = [_rule(error) for error in errors]
    offer = ""
    if isinstance(value, str):
        words = [word for rule in rules for word in rule.replace(" or ", ", ").split(", ")]
        offer = nearest(value, words, say="; did you mean {}?")
    return f"--{name} takes {' or '.join(dict.fromkeys(rules))}, not {_shown(value)}{offer}"


def _rule(error: Any) -> str:
    known = _RULES.get(error["type"], error["msg"])
    return known.format(**error["ctx"]).replace("'", "") if "ctx" in error else known


def _shown(value: Any) -> str:
    """A value as the user may have written it."""
    if value is None:
        return "nothing"
    plain = isinstance(value, str) and value and not any(map(str.isspace, value))
    return value if plain else repr(value)
