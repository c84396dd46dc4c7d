"""The texts of a quantization: some calibrate, others, which it never sees, are judged."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from swiftkit.data import PackedBatch, Prepared, collate, prepare
from swiftkit.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

HELD_OUT = 8  # of so many windows one is judged, where there are no rows for it


@dataclass(frozen=True)
class Texts:
    """Windows of text.

    Args:
        calibration: what activations are taken from; empty for methods that need none.
        judged: what perplexity is measured on.
        held_out: whether the judged windows took no part in the calibration.
    """

    calibration: list[PackedBatch]
    judged: list[PackedBatch]
    held_out: bool

    @property
    def fingerprint(self) -> str:
        """Other windows give another value."""
        digest = hashlib.sha256()
        for batch in (*self.calibration, *self.judged):
            digest.update(batch.input_ids.tobytes() + b"|")
        return digest.hexdigest()

    @property
    def tokens(self) -> int:
        """Of the calibration."""
        return sum(batch.tokens for batch in self.calibration)


def prepare_texts(
    *,
    dataset: Sequence[str],
    val_dataset: Sequence[str],
    tokenizer: PreTrainedTokenizerFast,
    vocabulary: int,
    max_length: int,
    calibration_windows: int,
    eval_windows: int,
    calibrates: bool,
    seed: int,
    settings: dict[str, Any],
) -> Texts:
    """Rows by the chat template (or plain text), packed into windows; documents never see each other.

    Args:
        dataset, val_dataset: as `data.read` takes them; without the latter some windows are held out.
        vocabulary: tokens that the model has.
        max_length: tokens of a window; longer rows are cut.
        calibration_windows, eval_windows: at most so many of each.
        calibrates: whether the method looks at activations.
        seed: draws the windows.
        settings: further ones of `data.prepare`.

    Raises:
        UserError: no usable row, or a token that the model has no embedding for.
    """

    def windows(sources: Sequence[str]) -> Prepared:
        made = prepare(
            sources,
            tokenizer=tokenizer,
            max_length=max_length,
            packing=True,
            truncation_strategy="right",
            train_on="all",
            **settings,
        )
        if made.largest_id >= vocabulary:
            raise UserError(
                f"{', '.join(sources)}: the tokenizer makes token {made.largest_id}, the model has "
                f"{vocabulary} (from 0); take the tokenizer that belongs to the model"
            )
        return made

    rows = windows(dataset)
    order = np.random.default_rng(seed).permutation(len(rows.windows)).tolist()
    if val_dataset:
        other = windows(val_dataset)
        judged = [_batch(other, index) for index in range(len(other.windows))[:eval_windows]]
        chosen = order[:calibration_windows] if calibrates else []
        return Texts([_batch(rows, index) for index in chosen], judged, True)
    if not calibrates:
        return Texts([], [_batch(rows, index) for index in order[:eval_windows]], True)
    kept = min(eval_windows, max(1, len(order) // HELD_OUT)) if len(order) > 1 else 0
    kept = max(kept, min(eval_windows, len(order) - calibration_windows))
    chosen = order[kept:][:calibration_windows]
    return Texts(
        [_batch(rows, index) for index in chosen],
        [_batch(rows, index) for index in (order[:kept] or chosen)],
        kept > 0,
    )


def _batch(data: Prepared, index: int) -> PackedBatch:
    return collate([data.window(index)], pad_id=0)
