"""Command-line words to knobs: the flags and the help of a schema, made from its fields."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo

from swiftkit import migrate
from swiftkit.config import Config, canonical, unknown
from swiftkit.errors import UserError
from swiftkit.recipe_file import choices, to_yaml

YAML = (".yaml", ".yml")
FILES = (*YAML, ".json")


def parse(
    schema: type[Config], words: Sequence[str], *, file: bool = True
) -> tuple[str | None, dict[str, Any]]:
    """Read flags.

    Dashes and underscores both work, `--name value` and `--name=value` too; a list takes all values up to the
    next flag; a boolean alone is true.

    Args:
        schema: says which knobs there are.
        words: the arguments behind the verb.
        file: whether the first word may be a config file.

    Returns:
        The config file, if there is one, and the knobs as they were written; the schema checks the values.

    Raises:
        UserError: for an unknown flag, with the nearest known one; for a value that is missing or too many.
    """
    rest = list(words)
    path = rest.pop(0) if file and rest and not rest[0].startswith("--") else None
    if path is not None and not path.endswith(FILES):
        raise UserError(f"{path!r} is neither a flag nor a config file (.yaml, or a run's args.json)")
    knobs: dict[str, Any] = {}
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            raise UserError(
                f"{word!r} stands alone; values follow their --flag, and a config file comes first"
            )
        name, equals, value = word[2:].partition("=")
        values = [value] if equals else []
        while not equals and rest and not rest[0].startswith("--"):
            values.append(rest.pop(0))
        name, renamed = knob_of(schema, name)
        if name not in schema.model_fields:
            raise UserError(unknown(schema, name))
        # A switch needs no value and most knobs take one: what follows may be a file in the wrong place.
        surplus = values[0 if schema.model_fields[name].annotation is bool else 1 :]
        late = next((value for value in surplus if file and _names_config(value)), None)
        if late is not None:
            raise UserError(f"{late} is a config file: it comes first, before the flags")
        if name in knobs:
            raise UserError(f"--{name} is given twice")
        values = [renamed.get(value, value) for value in values]
        knobs[name] = _value(schema.model_fields[name], name, values)
    return path, knobs


def _names_config(word: str) -> bool:
    return word.endswith(YAML) and not any(letter.isspace() for letter in word)


def knob_of(schema: type[Config], name: str) -> tuple[str, Mapping[str, str]]:
    """The knob that a name means, and the values that are called otherwise here.

    Dashes and underscores are one, and ms-swift's words are translated. A name that nobody knows stays: the
    schema refuses it.

    Raises:
        UserError: for a word of ms-swift that has no knob here.
    """
    name = canonical(name)
    entry = None if name in schema.model_fields else migrate.lookup(name)
    if entry is None:
        return name, {}
    if entry.ours not in schema.model_fields:
        raise UserError(entry.sentence())
    return entry.ours, entry.values


def _value(field: FieldInfo, name: str, values: list[str]) -> Any:
    if _takes_many(field):
        if not values:
            raise UserError(f"--{name} needs a value")
        return values
    if len(values) > 1:
        raise UserError(f"--{name} takes one value, not {len(values)}: {' '.join(values)}")
    if not values:
        if field.annotation is not bool:
            raise UserError(f"--{name} needs a value")
        return True
    return values[0]


def _takes_many(field: FieldInfo) -> bool:
    kinds = [field.annotation, *get_args(field.annotation)]
    return any(get_origin(kind) is list for kind in kinds)


def describe(schema: type[Config], verb: str, *, file: bool = True) -> str:
    """The text of `swiftkit VERB --help`: every flag under its heading, with default and unit."""
    width = min(shutil.get_terminal_size((100, 24)).columns, 110)
    usage = f"swiftkit {verb} {'[FILE.yaml] ' if file else ''}--flag value ..."
    lines = [usage, "", *textwrap.wrap(" ".join((schema.__doc__ or "").split()).replace("`", ""), width)]
    group = ""
    for name, field in schema.model_fields.items():
        extra = field.json_schema_extra
        assert isinstance(extra, dict)
        if extra["group"] != group:
            group = str(extra["group"])
            lines += ["", f"{group}:"]
        lines += _entry(name, field, str(extra["unit"]), width)
    return "\n".join(lines)


def _entry(name: str, field: FieldInfo, unit: str, width: int) -> list[str]:
    accepted = [word for word in choices(field.annotation) if word != "auto"]
    kind = "|".join(accepted) if accepted else unit.upper() or _kind(field)
    kind += " ..." if _takes_many(field) else ""
    default = "required" if field.is_required() else f"default {_plain(field.default)}"
    if unit and isinstance(field.default, int | float):
        default += f" {unit}"
    head = f"  --{name} {kind}"
    body = f"{field.description} [{default}]"
    column = 40
    if len(head) > column - 2:
        first, body_lines = [head], textwrap.wrap(body, width - column)
        return first + [" " * column + line for line in body_lines]
    wrapped = textwrap.wrap(body, width - column)
    return [head.ljust(column) + wrapped[0], *(" " * column + line for line in wrapped[1:])]


def _kind(field: FieldInfo) -> str:
    kinds = {field.annotation, *get_args(field.annotation)}
    if bool in kinds:
        return "[true|false]"
    return "NUMBER" if kinds & {int, float} else "TEXT"


def _plain(value: Any) -> str:
    if value is None or value == []:
        return "none"
    if isinstance(value, list):
        return " ".join(map(str, value))
    return value if isinstance(value, str) else to_yaml(value)
