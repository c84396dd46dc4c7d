"""Transpose of a matrix of bytes: FP8 weights for the backward product, where no second copy is kept."""

from __future__ import annotations

from torch import Tensor

from swiftkit.engine.kernels.rows import runs_triton


def transpose(x: Tensor) -> Tensor:
    """A contiguous [columns, rows] of a [rows, columns] uint8 whose rows are contiguous."""
    if runs_triton(x):
        from swiftkit.engine.kernels import transpose_triton

        return transpose_triton.transpose(x)
    return x.T.contiguous()
