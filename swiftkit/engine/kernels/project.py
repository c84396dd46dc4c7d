"""Cast and low-rank product of a matrix in one pass; sum of a product, its adapter and a residual."""

from __future__ import annotations

from torch import Tensor

from swiftkit.engine.kernels.rows import Rows, cast_rows, low_rank, runs_triton, widen, with_room


def cast_project(
    x: Tensor, *, factor: Tensor | None, fp8: bool, col_scale: Tensor | None = None, room: int = 0
) -> tuple[Rows, Tensor | None]:
    """The cast of x * col_scale, and x @ factor.

    Args:
        x: [tokens, width].
        factor: [width, rank]; an A factor is given transposed, as a view.
        fp8: whether x is cast to FP8; otherwise it comes back as it is (col_scale must then be None).
        col_scale: [width] fp32, the channel scales of the weight whose backward product reads x.
        room: columns behind each row of an FP8 result that are left for `outliers.carry`.
    """
    if not fp8:
        return Rows(x, None), None if factor is None else x @ factor
    if runs_triton(x):
        from swiftkit.engine.kernels import project_triton

        return project_triton.cast_project(x, factor, col_scale, room)
    return cast_project_reference(x, factor, col_scale, room)


def cast_project_reference(
    x: Tensor, factor: Tensor | None, col_scale: Tensor | None, room: int = 0
) -> tuple[Rows, Tensor | None]:
    """See `cast_project`."""
    wide = widen(x)
    projected = None if factor is None else (wide @ widen(factor)).to(x.dtype)
    return with_room(cast_rows(wide if col_scale is None else wide * col_scale), room), projected


def add_low_rank(
    y: Tensor, *, t: Tensor | None = None, b: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """y + t @ b^T + residual.

    Args:
        y: [tokens, width].
        t, b: [tokens, rank] and [width, rank] (any strides), an adapter.
        residual: [tokens, width] or None.
    """
    if t is None and residual is None:
        return y
    if runs_triton(y):
        from swiftkit.engine.kernels import project_triton

        return project_triton.add_low_rank(y, t, b, residual)
    return add_low_rank_reference(y, t, b, residual)


def add_low_rank_reference(y: Tensor, t: Tensor | None, b: Tensor | None, residual: Tensor | None) -> Tensor:
    """See `add_low_rank`."""
    value = widen(y) + low_rank(t, b)
    return (value if residual is None else value + widen(residual)).to(y.dtype)
