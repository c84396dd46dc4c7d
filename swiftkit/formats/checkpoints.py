"""Where a run's checkpoints are, and what lies in each of them beside the adapter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from swiftkit.errors import UserError

ARGS = "args.json"


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints of a run folder, the oldest first."""
    found = [p for p in folder.glob("checkpoint-*") if p.name.removeprefix("checkpoint-").isdigit()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("checkpoint-")))


def recorded(folder: Path) -> dict[str, Any]:
    """The `args.json` of a run or a checkpoint; empty where there is none of ours.

    ms-swift writes a file of this name too, with the settings at its top: ours has `method` and `config`.

    Raises:
        UserError: the file is not JSON.
    """
    path = folder / ARGS
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as broken:
        raise UserError(f"{path} is not JSON ({broken}); take another checkpoint") from None
    ours = isinstance(content, dict) and "method" in content and isinstance(content.get("config"), dict)
    return content if ours else {}
