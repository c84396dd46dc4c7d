"""How many rows each source gives to a mix, and which."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np

StoppingStrategy: TypeAlias = Literal["first_exhausted", "all_exhausted"]


def mixed(
    rows: Sequence[int], shares: Sequence[float], *, strategy: StoppingStrategy, seed: int
) -> list[list[int]]:
    """The rows that each source gives, so that the shares hold to a row.

    One source gives each of its rows once: with `first_exhausted` the one that is scarcest for its share,
    so that no row comes twice; with `all_exhausted` the most plentiful, and the others repeat theirs. (The
    words are those of `datasets.interleave_datasets`, which draws at random and gives about these counts.)

    Args:
        rows: how many each source has, each at least one.
        shares: of each source in the mix; only their ratios count.
        strategy: as above.
        seed: of the draw, where a source gives not all or some once more.

    Returns:
        For each source the indices of its rows in ascending order, a repeated one as often as it is taken.
    """
    scale = [count / share for count, share in zip(rows, shares, strict=True)]
    whole = (min if strategy == "first_exhausted" else max)(scale)
    return [
        _drawn(count, max(1, round(share * whole)), seed=[seed, source])
        for source, (count, share) in enumerate(zip(rows, shares, strict=True))
    ]


def _drawn(count: int, take: int, *, seed: list[int]) -> list[int]:
    """`take` of `count` rows: all of them as often as they go, then a seeded choice."""
    passes, rest = divmod(take, count)
    # numpy promises that raw bits stay the same over versions; it does not promise so for `permutation`.
    keys = np.random.PCG64(np.random.SeedSequence(seed)).random_raw(count)
    chosen = np.argsort(keys, kind="stable")[:rest]
    return sorted([*(list(range(count)) * passes), *chosen.tolist()])
