"""Frozen weights that stay packed as whole numbers, as a GPTQ or AWQ folder has them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from swiftkit.engine.fused.base import Store, held
from swiftkit.engine.fused.carried import Carried
from swiftkit.engine.kernels.rows import Rows
from swiftkit.formats.codes import WORD, Codes, pack, unpack


class IntBase:
    """The codes of one linear layer in words of 32 bits, whatever file they came from.

    The matrix is made for a product, in the forward and again in the backward, and kept by neither.

    Args:
        codes: of the matrix [out, in].
        dtype: of the products.
        device: where it lies.

    Attributes:
        words: int32 [out, words], each row's codes as one stream of bits.
        scales, zeros, groups: as in `Codes`.
        store: all of these.
    """

    fp8 = fp8_backward = False
    col_scale: Tensor | None = None
    carried = Carried()
    words, scales, zeros, groups = held("words"), held("scales"), held("zeros"), held("groups")

    def __init__(self, codes: Codes, *, dtype: torch.dtype, device: torch.device):
        self.dtype, self.bits, self.group_size = dtype, codes.bits, codes.group_size
        self.width = codes.values.shape[1]
        self.store = Store()
        self.words = pack(F.pad(codes.values, (0, -self.width % WORD)), codes.bits).to(device)
        self.scales, self.zeros = codes.scales.to(device), codes.zeros.to(device)
        self.groups = None if codes.groups is None else codes.groups.to(device)

    def stored(self) -> dict[str, Tensor]:
        """What lies in memory; the words are the `weight`."""
        groups = {} if self.groups is None else {"groups": self.groups}
        return {"weight": self.words, "scales": self.scales, "zeros": self.zeros, **groups}

    def forget_copies(self) -> None:
        """There are none."""

    def matrix(self) -> Tensor:
        """What the codes stand for, [out, in] in the type of the products."""
        values = unpack(self.words, self.bits)[:, : self.width]
        codes = Codes(values, self.scales, self.zeros, self.bits, self.group_size, self.groups)
        return codes.dequantize().to(self.dtype)

    def forward(self, x: Rows) -> Rows:
        """x @ weight^T."""
        return Rows(x.data @ self.matrix().T, x.scale)

    def backward(self, g: Rows) -> Tensor:
        """g @ weight."""
        return g.data @ self.matrix()
