"""Which windows an optimizer step takes: a pure function of the step, so that a resumed run is exact."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray


def windows_of_run(num_windows: int, epochs: float) -> int:
    """Windows that a run of `epochs` passes takes in all, at least one."""
    return max(1, round(num_windows * epochs))


def num_steps(num_windows: int, windows_per_step: int, epochs: float) -> int:
    """Optimizer steps of a run; the last one may be smaller."""
    return math.ceil(windows_of_run(num_windows, epochs) / windows_per_step)


def windows_of_step(
    num_windows: int, windows_per_step: int, *, seed: int, step: int, limit: int | None = None
) -> list[int]:
    """The windows of one optimizer step.

    Epoch after epoch, each in a seeded order of its own, the windows form one endless stream; step k
    takes places [k * windows_per_step, (k + 1) * windows_per_step) of it. Ranks play no role.

    Args:
        num_windows: windows of the data set.
        windows_per_step: windows that an optimizer step takes, over all ranks and micro-batches.
        seed: of the order.
        step: from 0.
        limit: windows of the whole run (`windows_of_run`); the last step ends there.
    """
    stop = (step + 1) * windows_per_step
    places = range(step * windows_per_step, stop if limit is None else min(stop, limit))
    return [
        int(_epoch_order(num_windows, seed, place // num_windows)[place % num_windows]) for place in places
    ]


@lru_cache(maxsize=4)
def _epoch_order(num_windows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    # numpy promises that raw bits stay the same over versions; it does not promise so for `permutation`.
    keys = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(num_windows)
    return np.argsort(keys, kind="stable")
