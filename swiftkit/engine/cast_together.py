"""The cast to FP8 of rows that lie on several ranks: with the scale that the whole row would have.

Scales of a rank's own would be powers of two as well and change nothing but the smallest values, but that is
enough to round a few of them otherwise, and a run would depend on the number of ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from swiftkit.engine.kernels.rows import (
    FIRST,
    FP8,
    FP8_MAX,
    HEADROOM,
    Rows,
    power_of_two_scale,
    widen,
    with_room,
)
from swiftkit.parallel.collectives import Sharding


def cast_together(x: Tensor, sharding: Sharding, *, col_scale: Tensor | None = None, room: int = 0) -> Rows:
    """As `kernels.rows.cast_rows` casts the whole of x * col_scale.

    Args:
        x: [tokens, own width].
        sharding: which columns these are.
        col_scale: [own width] fp32, see `kernels.project.cast_project`.
        room: columns behind each row that are left for `kernels.outliers.carry`.
    """
    wide = widen(x) if col_scale is None else widen(x) * col_scale
    largest = wide.abs().amax(1)
    has_first = sharding.shard.ranges[0][0] == 0  # widths are multiples of the first block's
    first = wide[:, :FIRST].abs().amax(1) if has_first else torch.zeros_like(largest)
    largest, first = sharding.ranks.max(torch.stack([largest, first]))
    scale = torch.maximum(power_of_two_scale(largest), HEADROOM * power_of_two_scale(first))
    data = (wide / scale[:, None]).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    return with_room(Rows(data, scale), room)
