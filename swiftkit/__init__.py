"""swiftkit fine-tunes open language models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from swiftkit.api import sft
    from swiftkit.train.run import Run

__all__ = ["Run", "__version__", "sft"]


def __getattr__(name: str) -> Any:
    """Import the doors when they are used: `import swiftkit` alone stays instant."""
    if name == "sft":
        from swiftkit.api import sft

        return sft
    if name == "Run":
        from swiftkit.train.run import Run

        return Run
    raise AttributeError(f"module 'swiftkit' has no attribute {name!r}")
