"""What the Triton kernels share: conversions, power-of-two scales, the second look at blocks cast too early.

The conversions are inline PTX: they convert two or four values at a time, where the compiler's own one-by-one
conversions run at a quarter of the rate.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

FP8_MAX_INVERSE = tl.constexpr(1.0 / 448.0)
SCALE_FLOOR = tl.constexpr(1e-30)
HEADROOM = tl.constexpr(4.0)
PTX = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1")


@triton.jit
def to_bf16(x):
    """fp32 to bf16, two at a time."""
    if PTX:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=tl.bfloat16, is_pure=False, pack=2
        )
    return x.to(tl.bfloat16)


@triton.jit
def fp8_to_bf16(x):
    """e4m3 to bf16, four at a time: its bits moved into place, times 2**120 for the exponents' biases."""
    if PTX:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 word, sign, big;
            mov.b32 big, 0x7B807B80;
            prmt.b32 word, $2, 0, 0x1404;
            and.b32 sign, word, 0x80008000;
            shr.b32 word, word, 4;
            and.b32 word, word, 0x07F007F0;
            or.b32 word, word, sign;
            mul.rn.bf16x2 $0, word, big;
            prmt.b32 word, $2, 0, 0x3424;
            and.b32 sign, word, 0x80008000;
            shr.b32 word, word, 4;
            and.b32 word, word, 0x07F007F0;
            or.b32 word, word, sign;
            mul.rn.bf16x2 $1, word, big;
            }""",
            "=r,=r,r", [x], dtype=tl.bfloat16, is_pure=False, pack=4,
        )  # fmt: skip
    return x.to(tl.bfloat16)


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)) with the hardware's reciprocal (1 ulp)."""
    denominator = 1.0 + tl.exp2(x * -1.4426950408889634)
    if PTX:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [denominator], dtype=tl.float32, is_pure=True, pack=1
        )
    return 1.0 / denominator


@triton.jit
def power_of_two_scale(amax):
    """See rows.power_of_two_scale."""
    ratio = tl.maximum(amax * FP8_MAX_INVERSE, SCALE_FLOOR)
    bits = ratio.to(tl.int32, bitcast=True)
    return (((bits + 0x7FFFFF) >> 23) << 23).to(tl.float32, bitcast=True)


@triton.jit
def inverse(scale):
    """1 / scale of a power of two, by its exponent."""
    return ((254 << 23) - scale.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def grow(scale, amax, is_first):
    """The running scale after one more block."""
    need = power_of_two_scale(amax)
    return tl.maximum(scale, tl.where(is_first, need * HEADROOM, need))


@triton.jit
def low_rank_tile(factor, columns, ranks, column_stride, rank_stride, RANKS: tl.constexpr):
    """A [columns, ranks] tile of an adapter's factor; ranks above RANKS are zero."""
    at = factor + columns[:, None] * column_stride + ranks[None, :] * rank_stride
    return tl.load(at, mask=ranks[None, :] < RANKS, other=0.0)


@triton.jit
def settle(
    out, block_scale, first, scale, rows, row_mask, tokens,
    STRIDE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Cast again the blocks that were written with a smaller scale than their row's final one.

    Rare: it happens where a later block is over HEADROOM times larger than the first. A step of the loop
    before wrote block n, and where gate and up go side by side also block n + STEPS.
    """
    if tl.max(tl.where(row_mask & (scale > first), 1, 0), axis=0) > 0:
        tl.debug_barrier()  # other threads of this program wrote the tiles
        for block in range(WIDTH // BLOCK):
            used = tl.load(block_scale + (block % STEPS) * tokens + rows, mask=row_mask, other=0.0)
            behind = row_mask & (used < scale)
            columns = block * BLOCK + tl.arange(0, BLOCK)
            at = out + rows.to(tl.int64)[:, None] * STRIDE + columns[None, :]
            old = tl.load(at, mask=behind[:, None], other=0.0).to(tl.float32)
            ratio = tl.where(behind, used, scale) * inverse(scale)
            tl.store(at, (old * ratio[:, None]).to(out.dtype.element_ty), mask=behind[:, None])
