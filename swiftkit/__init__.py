"""swiftkit fine-tunes open language models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from swiftkit.api import dpo, evaluate, merge, quantize_model, report, reward, reward_model, sft
    from swiftkit.train.run import Run

_DOORS = ("dpo", "evaluate", "merge", "quantize_model", "report", "reward", "reward_model", "sft")

__all__ = [
    "Run",
    "__version__",
    "dpo",
    "evaluate",
    "merge",
    "quantize_model",
    "report",
    "reward",
    "reward_model",
    "sft",
]


def __getattr__(name: str) -> Any:
    """Import the doors when they are used: `import swiftkit` alone stays instant."""
    if name in _DOORS:
        from swiftkit import api

        return getattr(api, name)
    if name == "Run":
        from swiftkit.train.run import Run

        return Run
    raise AttributeError(f"module 'swiftkit' has no attribute {name!r}")
