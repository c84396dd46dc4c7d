"""The grid of a quantized matrix: which values a weight may take, and the nearest of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from swiftkit.formats.codes import Codes

LEAST_SCALE = 2.0**-14  # the smallest normal float16: a row of zeros still has a scale above 0


@dataclass(frozen=True)
class Scheme:
    """What is asked of every matrix.

    Args:
        bits: of a code.
        group_size: columns that share a scale; -1 is all of a row.
        symmetric: the zero point is the middle code.
        scale_dtype: in which scales are stored.
        least_zero: the smallest zero point that the format can hold.
    """

    bits: int
    group_size: int
    symmetric: bool
    scale_dtype: torch.dtype = torch.float16
    least_zero: int = 0

    def group(self, width: int) -> int:
        """Columns of a group in a matrix of this width."""
        return width if self.group_size == -1 else self.group_size


@dataclass(frozen=True, eq=False)
class Grid:
    """Scales in the type in which they are stored, and zero points as uint8: both [out, groups]."""

    scales: Tensor
    zeros: Tensor
    bits: int
    group_size: int

    def columns(self, index: int | Tensor) -> tuple[Tensor, Tensor]:
        """Scale and zero point of some columns, float32 [out, columns] (of one column, [out])."""
        group = index // self.group_size
        return self.scales[:, group].float(), self.zeros[:, group].float()

    def round(self, weight: Tensor) -> Codes:
        """The nearest codes of a matrix [out, in]."""
        grouped = weight.float().view(weight.shape[0], -1, self.group_size)
        scale, zero = self.scales.float()[..., None], self.zeros.float()[..., None]
        values = (torch.round(grouped / scale) + zero).clamp_(0, (1 << self.bits) - 1)
        return self.codes(values.view(weight.shape))

    def codes(self, values: Tensor) -> Codes:
        """Codes [out, in] with this grid."""
        return Codes(values.to(torch.uint8), self.scales, self.zeros, self.bits, self.group_size)


def find_grid(weight: Tensor, scheme: Scheme, *, limit: Tensor | None = None) -> Grid:
    """The grid that spans each group's values, zero among them.

    Args:
        weight: [out, in].
        scheme: bits, groups, symmetry.
        limit: [out, groups]; larger values are clipped.
    """
    size = scheme.group(weight.shape[1])
    grouped = weight.float().view(weight.shape[0], -1, size)  # [out, groups, size]
    low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    if limit is not None:
        low, high = torch.maximum(low, -limit), torch.minimum(high, limit)
    top = (1 << scheme.bits) - 1
    if scheme.symmetric:
        span = 2 * torch.maximum(-low, high)
    else:
        low = torch.minimum(low, -high * (scheme.least_zero / (top - scheme.least_zero)))
        span = high - low
    # Codes are found with the scale as it is stored, so that nothing is rounded twice.
    scales = (span / top).clamp(min=LEAST_SCALE).to(scheme.scale_dtype)
    if scheme.symmetric:
        zeros = torch.full_like(span, 1 << (scheme.bits - 1))
    else:
        zeros = torch.round(-low / scales.float()).clamp(scheme.least_zero, top)
    return Grid(scales, zeros.to(torch.uint8), scheme.bits, size)
