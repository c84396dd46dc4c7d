"""The families that the engine serves, and what each does after its last norm.

We call the inner model and own the head, so a scale or a soft cap that lives in a family's `ForCausalLM`
forward has to stand here. A family enters when its test passes (`tests/test_engine_families.py`): packed
equals unpacked, logits equal transformers', adapters' gradients equal PEFT's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from swiftkit.errors import UserError, nearest


@dataclass(frozen=True)
class LogitRule:
    """logits = softcap * tanh(scale * hidden @ W^T / softcap), the cap only where there is one."""

    scale: float = 1.0
    softcap: float | None = None


def _plain(_: Any) -> LogitRule:
    return LogitRule()


def _capped(config: Any) -> LogitRule:
    return LogitRule(softcap=config.final_logit_softcapping)


def _divided(config: Any) -> LogitRule:
    return LogitRule(scale=1.0 / config.logits_scaling)


def _multiplied(config: Any) -> LogitRule:
    return LogitRule(scale=config.logit_scale)


FAMILIES: dict[str, Callable[[Any], LogitRule]] = {
    "llama": _plain,
    "mistral": _plain,
    "qwen2": _plain,
    "qwen3": _plain,
    "smollm3": _plain,
    "olmo2": _plain,
    "phi3": _plain,
    "glm4": _plain,
    "gemma2": _capped,
    "gemma3_text": _capped,
    "granite": _divided,
    "cohere2": _multiplied,
}


def logit_rule(config: Any) -> LogitRule:
    """What the family of this transformers config does to its logits.

    Raises:
        UserError: for a family that has not been admitted.
    """
    family = config.model_type
    if family not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        offer = nearest(family, FAMILIES, say=" (near: {})")
        raise UserError(f"models of type {family!r} are not served yet{offer}; served are {known}")
    return FAMILIES[family](config)
