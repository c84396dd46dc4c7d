"""What every configuration shares: the base class, the declaration of a knob, and its types."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
)

Auto = Literal["auto"]
Precision = Literal["auto", "fp32", "bf16", "fp8", "nf4", "int8", "int4", "int3"]


def one_or_many(value: Any) -> Any:
    """One word is a list of one."""
    return [value] if isinstance(value, str) else value


def json_object(value: Any) -> Any:
    """A mapping as it is, or as JSON text (on a command line)."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as failure:
        raise ValueError(f'a JSON object such as {{"question": "MINE"}} ({failure})') from None


def words(value: Any) -> Any:
    """Words in a list, or between commas."""
    parts = [value] if isinstance(value, str) else value
    if not isinstance(parts, list | tuple) or not all(isinstance(part, str) for part in parts):
        return value
    return [word for part in parts for word in part.split(",") if word]


def word_of_bool(value: Any) -> Any:
    """YAML and Python say `true` as a boolean."""
    return str(value).lower() if isinstance(value, bool) else value


Many = Annotated[list[str], BeforeValidator(one_or_many)]
"""A list, for which one value may stand alone."""


def knob(default: Any, help: str, *, group: str, unit: str = "", **limits: Any) -> Any:
    """A field of the schema. `group` is its heading in --help; `limits` go to pydantic."""
    return Field(default, description=help, json_schema_extra={"group": group, "unit": unit}, **limits)


class Config(BaseModel):
    """What all configurations share: unknown keys are refused, values are checked once, at the edge."""

    model_config = ConfigDict(
        extra="forbid", validate_default=True, protected_namespaces=(), frozen=True, allow_inf_nan=False
    )

    def with_changes(self, **changes: Any) -> Self:
        """A checked copy with some knobs replaced (how `auto` becomes a number)."""
        return type(self).model_validate({**self.model_dump(), **changes})
