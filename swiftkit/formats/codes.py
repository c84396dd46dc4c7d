"""A quantized matrix as it is before any format: whole numbers, scales and zero points."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

WORD = 32  # bits of what codes are packed into


@dataclass(frozen=True, eq=False)
class Codes:
    """w = (code - zero) * scale, with one scale and one zero point a row and group of columns.

    Args:
        values: uint8 [out, in], from 0 to 2^bits - 1.
        scales: [out, groups], above 0, in the type in which they are stored.
        zeros: uint8 [out, groups].
        bits: of a code.
        group_size: neighbouring columns of a group.
    """

    values: Tensor
    scales: Tensor
    zeros: Tensor
    bits: int
    group_size: int

    def dequantize(self) -> Tensor:
        """The matrix, float32 [out, in]."""
        rows, width = self.values.shape
        grouped = self.values.view(rows, -1, self.group_size).float()
        grouped = (grouped - self.zeros.float()[..., None]) * self.scales.float()[..., None]
        return grouped.view(rows, width)

    @property
    def symmetric(self) -> bool:
        """Whether every zero point is the middle code."""
        return bool((self.zeros == 1 << (self.bits - 1)).all())


def pack(values: Tensor, bits: int) -> Tensor:
    """Codes behind one another as one stream of bits, the lowest first, in words of 32.

    Args:
        values: uint8 [..., n], where n codes fill whole words.
        bits: of a code, 1 to 8.

    Returns:
        int32 [..., n * bits / 32].
    """
    *shape, count = values.shape
    assert count * bits % WORD == 0, f"{count} codes of {bits} bits do not fill words"
    shifts = torch.arange(bits, device=values.device)
    stream = (values.to(torch.int64)[..., None] >> shifts & 1).view(*shape, -1, WORD)
    words = (stream << torch.arange(WORD, device=values.device)).sum(-1)
    return (words - ((words >> (WORD - 1)) << WORD)).to(torch.int32)


def unpack(words: Tensor, bits: int) -> Tensor:
    """The reverse of `pack`: int32 [..., n * bits / 32] to uint8 [..., n]."""
    *shape, count = words.shape
    stream = words.to(torch.int64)[..., None] >> torch.arange(WORD, device=words.device) & 1
    pieces = stream.reshape(*shape, count * WORD // bits, bits)
    return (pieces << torch.arange(bits, device=words.device)).sum(-1).to(torch.uint8)
