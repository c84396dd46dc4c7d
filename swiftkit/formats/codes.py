"""A quantized matrix as it is before any format: whole numbers, scales and zero points."""

from __future__ import annotations

from dataclasses import dataclass, replace

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
        group_size: columns of a group.
        groups: int64 [in], the group of each column; None where groups are those of neighbouring columns.
    """

    values: Tensor
    scales: Tensor
    zeros: Tensor
    bits: int
    group_size: int
    groups: Tensor | None = None

    def dequantize(self) -> Tensor:
        """The matrix, float32 [out, in]."""
        rows, width = self.values.shape
        if self.groups is not None:
            centred = self.values.float() - self.zeros.float()[:, self.groups]
            return centred * self.scales.float()[:, self.groups]
        grouped = self.values.reshape(rows, -1, self.group_size).float()
        grouped = (grouped - self.zeros.float()[..., None]) * self.scales.float()[..., None]
        return grouped.view(rows, width)

    @property
    def symmetric(self) -> bool:
        """Whether every zero point is the middle code."""
        return bool((self.zeros == 1 << (self.bits - 1)).all())

    def with_groups(self, groups: Tensor | None) -> Codes:
        """The same codes with the group of each column, as files have it, [in]; None is neighbours."""
        if groups is None:
            return self
        groups = groups.long()
        neighbours = torch.arange(len(groups), device=groups.device) // self.group_size
        return self if torch.equal(groups, neighbours) else replace(self, groups=groups)


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
    if WORD % bits == 0:
        whole = values.to(torch.int64).view(*shape, -1, WORD // bits)
        words = (whole << torch.arange(0, WORD, bits, device=values.device)).sum(-1)
    else:
        shifts = torch.arange(bits, device=values.device)
        stream = (values.to(torch.int64)[..., None] >> shifts & 1).view(*shape, -1, WORD)
        words = (stream << torch.arange(WORD, device=values.device)).sum(-1)
    return (words - ((words >> (WORD - 1)) << WORD)).to(torch.int32)


def unpack(words: Tensor, bits: int) -> Tensor:
    """The reverse of `pack`: int32 [..., n * bits / 32] to uint8 [..., n]."""
    *shape, count = words.shape
    if WORD % bits == 0:  # no code lies over the edge of a word
        shifts = torch.arange(0, WORD, bits, dtype=torch.int32, device=words.device)
        codes = (words[..., None] >> shifts) & ((1 << bits) - 1)
        return codes.to(torch.uint8).reshape(*shape, count * WORD // bits)
    starts = torch.arange(WORD, device=words.device) * bits  # of 32 codes, which fill `bits` words
    blocks = words.to(torch.int64).view(*shape, count // bits, bits) & 0xFFFFFFFF
    low = blocks[..., starts // WORD] >> starts % WORD
    high = blocks[..., (starts // WORD + 1).clamp(max=bits - 1)] << WORD - starts % WORD
    return ((low | high) & ((1 << bits) - 1)).to(torch.uint8).reshape(*shape, count * WORD // bits)
