"""Evaluations during a run: which was best, and when to give up."""

from __future__ import annotations

import math
from collections.abc import Mapping

from swiftkit.config import TrainKnobs
from swiftkit.data import Trainable
from swiftkit.errors import UserError
from swiftkit.train.state import StateDict


class Judge:
    """Remembers the best evaluation of the steps that have a checkpoint.

    Args:
        metric: of an evaluation, the smaller the better; None keeps no best.
        patience: evaluations in a row without a new best that end the run; 0 is never.
    """

    def __init__(self, metric: str | None, patience: int = 0):
        self.metric, self._patience = metric, patience
        self.best = math.inf
        self.best_step: int | None = None
        self._worse = 0
        self.evaluated = -1

    @classmethod
    def of(cls, knobs: TrainKnobs) -> Judge:
        """As the knobs say."""
        return cls(best_metric(knobs), knobs.early_stopping_patience)

    def take(self, values: Mapping[str, float], *, step: int) -> bool:
        """Take in an evaluation after `step` steps; whether it is a new best that should be saved.

        The untrained model (step 0) has no checkpoint and cannot be the best.
        """
        self.evaluated = step
        if self.metric is None or step == 0:
            return False
        value = values[self.metric]
        if value < self.best:
            self.best, self.best_step, self._worse = value, step, 0
            return True
        self._worse += 1
        return False

    @property
    def gives_up(self) -> bool:
        """Whether patience is at its end."""
        return 0 < self._patience <= self._worse

    def state_dict(self) -> StateDict:
        """Best value and step, and what came since."""
        best = None if self.best_step is None else self.best
        return {
            "metric": self.metric,
            "best": best,
            "best_step": self.best_step,
            "worse": self._worse,
            "evaluated": self.evaluated,
        }

    def load_state_dict(self, state: StateDict) -> None:
        """Go on from there; what was best by another metric says nothing."""
        self.evaluated = state["evaluated"]
        if state["metric"] == self.metric:
            self.best_step, self._worse = state["best_step"], state["worse"]
            self.best = math.inf if state["best"] is None else state["best"]


def best_metric(knobs: TrainKnobs) -> str | None:
    """The metric that decides which checkpoint is best; None where none has to be."""
    wanted = knobs.load_best_model_at_end or knobs.early_stopping_patience > 0
    return knobs.metric_for_best_model or ("eval_loss" if wanted else None)


def check_evaluated(knobs: TrainKnobs, evaluation: Trainable | None) -> None:
    """Refuse to look for the best checkpoint where nothing is evaluated.

    Raises:
        UserError: naming the knob that asks for it.
    """
    asking = ("metric_for_best_model", "early_stopping_patience", "load_best_model_at_end")
    asked = [name for name in asking if getattr(knobs, name)]
    if asked and evaluation is None:
        raise UserError(
            f"--{asked[0]} needs rows to evaluate on; give --val_dataset, or a share of the rows by "
            "--split_dataset_ratio"
        )
