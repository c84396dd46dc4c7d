"""generation_config.json: settings that contradict each other load everywhere and can be saved nowhere.

transformers checks them only when a model is saved, after the training (`GenerationConfig.validate`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# What only sampling reads, with the values that mean nothing.
SAMPLING = {
    "temperature": 1.0, "top_p": 1.0, "top_k": 50, "min_p": None, "typical_p": 1.0, "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0, "top_h": None,
}  # fmt: skip
# What only a search over several beams reads.
BEAMS = {"early_stopping": False, "length_penalty": 1.0, "num_beam_groups": 1, "diversity_penalty": 0.0}


def mended(settings: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Settings that can be saved again, and the names of those that had to go.

    Left out is what has no effect under the file's own `do_sample` and `num_beams`; and where transformers
    still refuses the rest, all but the token ids.
    """
    dropped: list[str] = []
    if not settings.get("do_sample", False):
        dropped += [name for name, none in SAMPLING.items() if settings.get(name, none) not in (none, None)]
    if settings.get("num_beams", 1) in (None, 1):
        dropped += [name for name, none in BEAMS.items() if settings.get(name, none) not in (none, None)]
    kept = {name: value for name, value in settings.items() if name not in dropped}
    if not _can_be_saved(kept):
        ids = {name: value for name, value in kept.items() if name.endswith("_token_id")}
        dropped += [name for name in kept if name not in ids]
        kept = ids
    return kept, dropped


def _can_be_saved(settings: Mapping[str, Any]) -> bool:
    from transformers import GenerationConfig

    try:
        GenerationConfig(**settings).validate(strict=True)
    except (ValueError, TypeError):
        return False
    return True
