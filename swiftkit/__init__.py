"""swiftkit fine-tunes open language models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from swiftkit.api import evaluate, merge, quantize_model, report, sft
    from swiftkit.train.run import Run

__all__ = ["Run", "__version__", "evaluate", "merge", "quantize_model", "report", "sft"]


def __getattr__(name: str) -> Any:
    """Import the doors when they are used: `import swiftkit` alone stays instant."""
    if name in ("evaluate", "merge", "quantize_model", "report", "sft"):
        from swiftkit import api

        return getattr(api, name)
    if name == "Run":
        from swiftkit.train.run import Run

        return Run
    raise AttributeError(f"module 'swiftkit' has no attribute {name!r}")
