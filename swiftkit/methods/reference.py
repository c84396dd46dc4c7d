"""The reference policy's log-probabilities: computed once, before the first step, kept in the run folder."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from swiftkit.config import DpoConfig, ReadyModelKnobs
from swiftkit.data import Pairs
from swiftkit.engine import Batch, Engine
from swiftkit.errors import UserError
from swiftkit.generate.find import find
from swiftkit.generate.load import ReadyModel, Say, prepare_model
from swiftkit.methods.preference import answer_logprobs
from swiftkit.parallel.world import ALONE, World, collected
from swiftkit.train.steps import StepPlan, evaluation_batches

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FILE = "reference.npz"
ANSWERS = 2  # of a row: chosen and rejected, or of a labelled row its own and the mismatched one


def logprobs(
    engine: Engine, data: Pairs, plan: StepPlan, *, pad_id: int, world: World = ALONE
) -> NDArray[np.float64]:
    """Of every answer in order, [answers], on every rank; each computes its rows. Dropout is off."""
    packed = evaluation_batches(data, plan, pad_id=pad_id, world=world)
    batches = (Batch.of(one, device=engine.device) for one in packed)
    found = engine.results(batches, answer_logprobs)
    rows = [pair for own in found for pair in own.double().view(-1, ANSWERS).tolist()]
    return np.array(collected(rows, world)).reshape(-1)


def open_reference(
    config: DpoConfig, tokenizer: PreTrainedTokenizerFast, data: Pairs, say: Say
) -> ReadyModel | None:
    """`--ref_model` on disk, checked; None where the reference is what training starts from.

    Raises:
        UserError: it is not there, or has not the policy's tokens.
    """
    if config.ref_model is None:
        return None
    knobs = ReadyModelKnobs(
        model=config.ref_model,
        model_source=config.model_source,
        device=config.device,
        base_precision=config.base_precision,
    )
    where = find(checkpoint=config.ref_model)
    ready = prepare_model(where, knobs.with_changes(model=where.model), say=say)
    if data.largest_id >= ready.vocabulary or ready.tokenizer.get_vocab() != tokenizer.get_vocab():
        raise UserError(
            f"--ref_model {config.ref_model} has other tokens than --model {config.model}, so their "
            "log-probabilities cannot be compared; give a reference of the same family"
        )
    return ready


class Reference:
    """Log-probabilities of the training and the evaluation rows by the reference.

    Args:
        folder: the run folder; what a resumed run finds there is taken as it is.
        plan: sizes of the batches.
        pad_id: the padding token's id.
        world: the processes of the run; the first one reads and writes.
    """

    def __init__(self, folder: Path, plan: StepPlan, *, pad_id: int, world: World = ALONE):
        self._path, self._world = folder / FILE, world
        self._compute = partial(logprobs, plan=plan, pad_id=pad_id, world=world)

    def known(self, parts: dict[str, Pairs]) -> dict[str, Pairs] | None:
        """The parts with what an earlier process has written; None where that is not of these rows."""
        found = self._world.from_first(partial(self._read, parts))
        if found is None:
            return None
        return {name: data.with_reference(found[name]) for name, data in parts.items()}

    def _read(self, parts: dict[str, Pairs]) -> dict[str, NDArray[np.float64]] | None:
        if not self._path.is_file():
            return None
        with np.load(self._path) as kept:
            for name, data in parts.items():
                if name not in kept or str(kept[f"{name}_rows"]) != data.fingerprint:
                    return None
            return {name: kept[name] for name in parts}

    def computed(self, engine: Engine, parts: dict[str, Pairs]) -> dict[str, Pairs]:
        """The parts with what the engine, as it is now, says of them; written for a resume."""
        found: dict[str, Any] = {name: self._compute(engine, data) for name, data in parts.items()}
        arrays: dict[str, Any] = {f"{name}_rows": np.array(data.fingerprint) for name, data in parts.items()}
        if self._world.first:
            partial_file = self._path.with_suffix(".partial.npz")
            np.savez(partial_file, **{**found, **arrays})
            partial_file.replace(self._path)
        return {name: data.with_reference(found[name]) for name, data in parts.items()}
