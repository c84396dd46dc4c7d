"""Triton kernel of cross_entropy.py: a program takes one row, twice: for the sum, then for the gradient."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from swiftkit.engine.kernels.cross_entropy import Fp8Head
from swiftkit.engine.kernels.rows import FP8, Rows
from swiftkit.engine.kernels.rows_triton import inverse, power_of_two_scale

BLOCK, WARPS = 8192, 16


@triton.jit
def _score(raw, scale, softcap, CAPPED: tl.constexpr):
    score = raw.to(tl.float32) * scale
    if CAPPED:
        score = softcap * (2 * tl.sigmoid(2 * score / softcap) - 1)  # tanh
    return score


@triton.jit
def _loss_and_gradient(
    logits, targets, losses, scale, softcap, col_scale, col_largest, out, out_scale,
    WIDTH: tl.constexpr, CAPPED: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    logits += row.to(tl.int64) * WIDTH
    target = tl.load(targets + row)
    largest = float("-inf")
    total = 0.0
    for start in range(0, WIDTH, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        raw = tl.load(logits + columns, mask=columns < WIDTH, other=0.0)
        score = tl.where(columns < WIDTH, _score(raw, scale, softcap, CAPPED), float("-inf"))
        higher = tl.maximum(largest, tl.max(score, axis=0))
        total = total * tl.exp(largest - higher) + tl.sum(tl.exp(score - higher), axis=0)
        largest = higher
    log_z = largest + tl.log(total)
    own = _score(tl.load(logits + target), scale, softcap, CAPPED)
    tl.store(losses + row, log_z - own)
    if GRADIENT:
        tl.debug_barrier()  # every thread has read the target's logit
        if col_scale is not None:
            # No entry's probability is larger than what the target lacks to 1 (known to about 2**-16).
            lack = tl.maximum(1.0 - tl.exp(own - log_z), 1.0 / (1 << 16))
            row_scale = power_of_two_scale(lack * scale * tl.load(col_largest))
            tl.store(out_scale + row, row_scale)
            of_row = inverse(row_scale)
            out += row.to(tl.int64) * WIDTH
        for start in range(0, WIDTH, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            raw = tl.load(logits + columns, mask=columns < WIDTH, other=0.0)
            score = _score(raw, scale, softcap, CAPPED)
            slope = tl.exp(score - log_z) - tl.where(columns == target, 1.0, 0.0)
            if CAPPED:
                slope = slope * (1 - (score / softcap) * (score / softcap))
            slope = slope * scale
            if col_scale is not None:
                factor = tl.load(col_scale + columns, mask=columns < WIDTH, other=0.0)
                cast = (slope * factor * of_row).to(out.dtype.element_ty)
                tl.store(out + columns, cast, mask=columns < WIDTH)
            else:
                tl.store(logits + columns, slope.to(logits.dtype.element_ty), mask=columns < WIDTH)


def loss_and_gradient_(
    logits: Tensor, targets: Tensor, scale: float, softcap: float | None, wants_gradient: bool,
    fp8: Fp8Head | None,
) -> tuple[Tensor, Rows | None]:  # fmt: skip
    """See cross_entropy.loss_and_gradient_."""
    rows, width = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    casts = fp8 is not None and wants_gradient
    out = torch.empty_like(logits, dtype=FP8) if casts else None
    out_scale = torch.empty_like(losses) if casts else None
    _loss_and_gradient[(rows,)](
        logits, targets, losses, scale, 1.0 if softcap is None else softcap,
        fp8.scale if fp8 is not None and casts else None,
        fp8.largest if fp8 is not None and casts else None, out, out_scale,
        WIDTH=width, CAPPED=softcap is not None, GRADIENT=wants_gradient,
        BLOCK=min(BLOCK, triton.next_power_of_2(width)), num_warps=WARPS,
    )  # fmt: skip
    if not wants_gradient:
        return losses, None
    return losses, Rows(logits, None) if out is None else Rows(out, out_scale)
