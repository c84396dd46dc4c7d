"""What older readers expect in config.json: rotary settings under their names before transformers 5."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def with_older_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config with `rope_theta`, and `rope_scaling` where positions are scaled, beside `rope_parameters`.

    transformers 5 writes `rope_parameters` alone, and older readers fall back to a theta of 10,000 without a
    word. Settings that are there already stay.
    """
    made = dict(config)
    rope = made.get("rope_parameters")
    if not isinstance(rope, Mapping):
        return made
    local = rope.get("sliding_attention")
    if isinstance(local, Mapping) and "rope_theta" in local:
        made.setdefault("rope_local_base_freq", local["rope_theta"])
    whole = rope.get("full_attention", rope)
    if isinstance(whole, Mapping) and "rope_theta" in whole:
        made.setdefault("rope_theta", whole["rope_theta"])
        scaled = {name: value for name, value in whole.items() if name != "rope_theta"}
        if scaled.get("rope_type", "default") != "default":
            made.setdefault("rope_scaling", scaled)
    return made
