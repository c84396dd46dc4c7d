"""Gradients of the adapters' factors: tall, skinny products over the tokens that read activations once.

With y += (x @ A^T) @ B^T, u = dy @ B and t = x @ A^T: dA = u^T x, dB = dy^T t. The wide side is read as it is
stored, FP8 bytes or bf16: its row scale goes into the narrow side, its channel factor onto the result. Each
of `rows.SLICES` parts of the tokens writes its own partial sum, so the result does not depend on timing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from swiftkit.engine.kernels.rows import Rows, runs_triton, widen


def adapter_gradient(
    narrow: Tensor,
    wide: Rows,
    *,
    out: Tensor,
    factor: float = 1.0,
    col_factor: Tensor | None = None,
    col_divisor: Tensor | None = None,
    segments: tuple[int, ...] | None = None,
) -> None:
    """out[s] = narrow^T @ wide over the s-th slice of the tokens, times factor * col_factor / col_divisor.

    Args:
        narrow: [tokens, ranks], u or t.
        wide: [tokens, width], x or dy.
        out: [SLICES, ranks, width] fp32 (any strides), written.
        factor: on the result.
        col_factor, col_divisor: [width], on the columns of the result; None is one.
        segments: widths of the projections that are merged in `wide`, where each has its own `rank` columns
            of `narrow`; `out` is then [SLICES, rank, width].
    """
    if runs_triton(narrow):
        from swiftkit.engine.kernels import adapter_gradient_triton

        adapter_gradient_triton.adapter_gradient(narrow, wide, out, factor, col_factor, col_divisor, segments)
        return
    adapter_gradient_reference(narrow, wide, out, factor, col_factor, col_divisor, segments)


def adapter_gradient_reference(
    narrow: Tensor, wide: Rows, out: Tensor, factor: float, col_factor: Tensor | None,
    col_divisor: Tensor | None, segments: tuple[int, ...] | None,
) -> None:  # fmt: skip
    """See `adapter_gradient`; all of the sum is in the first slice."""
    dense = wide.dense()
    columns = dense.split(list(segments), 1) if segments else (dense,)
    smalls = widen(narrow).chunk(len(columns), 1)
    result = torch.cat([t.T @ x for t, x in zip(smalls, columns, strict=True)], 1) * factor
    if col_factor is not None:
        result = result * col_factor
    if col_divisor is not None:
        result = result / col_divisor
    out.zero_()
    out[0] = result
