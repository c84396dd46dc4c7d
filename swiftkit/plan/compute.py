"""Time of a micro-batch on one GPU without any communication, from measured rates.

Products and attention go by their floating-point operations, everything else by the bytes it touches. The
constants are read from docs/performance.md ("Where a step goes") and from the trials on the same card.
"""

from __future__ import annotations

from dataclasses import dataclass

from swiftkit.plan.job import ACTIVATION, NO_SAVING, Cut, Job, Saving
from swiftkit.plan.machine import Machine
from swiftkit.plan.shape import ModelShape

PASSES = 11.5
"""Times that all other kernels read or write a block's activations, forward and backward.

127.5 ms a step of an 8B model: SwiGLU 14 + 36, adapter gradients 20, norms 19, rotary 12, low-rank products
12, attention's helpers 10, cross-entropy 4.5; at 4.06 TB/s, over 32 blocks of 16,384 tokens of 86,016 bytes.
"""
FORWARD_PASSES = PASSES / 3
TRANSPOSE = 1.1e-12
"""Seconds a weight to transpose FP8: 0.26 ms for 28,672 x 8,192, compiled."""
DEQUANTIZE = 2.0e-12
"""Seconds a weight to unpack NF4 once: 26 to 29 ms a step of an 8B model, which does it twice."""
OPTIMIZER_BYTES = 28.0
"""AdamW reads gradient, value and two moments of a number, and writes the last three and the weight."""


@dataclass(frozen=True)
class Compute:
    """Seconds of one micro-batch on one GPU, forward and backward; with checkpointing the latter has both."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        """Both ways."""
        return self.forward + self.backward


def width(shape: ModelShape) -> int:
    """Numbers of a token's activations in one block: residuals, q, k, v, and what gate and up put out."""
    return 2 * shape.hidden + shape.query_width + 2 * shape.kv_width + 2 * shape.inter


def linear_flops(shape: ModelShape, job: Job, tokens: int) -> float:
    """Floating-point operations of all products of a step: 4 N a token for an adapter, 6 N for the whole.

    The embedding is looked up, not multiplied.
    """
    times = 4.0 if job.tuner == "lora" else 6.0
    return times * (shape.block_weights + shape.vocab * shape.hidden) * tokens


def attention_flops(shape: ModelShape, sequence: int, tokens: int) -> float:
    """Floating-point operations of the attention's forward: scores and values, the unmasked half of them.

    The backward pass has 2.5 times as many (five products for two).
    """
    return 2.0 * tokens * sequence * shape.query_width * shape.layers


def micro_batch(shape: ModelShape, job: Job, machine: Machine, cut: Cut, *, tp: int = 1) -> Compute:
    """Seconds of one micro-batch, its work spread evenly over `tp` GPUs.

    A narrower product is taken to reach the rate of a whole one, which the narrowest will not.
    """
    tokens, saving = cut.micro_tokens, cut.saving
    rate = machine.fp8 if job.products_in_fp8 else machine.bf16
    per_weight = 2.0 * tokens / tp
    ends = shape.vocab * shape.hidden * per_weight
    quarter = per_weight * shape.block_weights
    forward_products = quarter / rate
    if job.base == "fp8":  # the forward product of q, k and v stays in bf16
        forward_products += per_weight * shape.layers * shape.qkv_weights * (1 / machine.bf16 - 1 / rate)
    attention = attention_flops(shape, job.sequence, tokens) / tp
    touched = tokens * shape.layers * width(shape) * ACTIVATION / machine.hbm / tp
    blocks_forward = forward_products + attention / machine.attention_forward + FORWARD_PASSES * touched
    forward = blocks_forward + ends / machine.bf16
    backward = quarter / rate + 2.5 * attention / machine.attention_backward
    backward += (PASSES - FORWARD_PASSES) * touched + ends / rate
    if job.tuner == "full":
        backward += (quarter + ends) / machine.bf16
    backward += _again(shape, job, saving, blocks_forward, per_weight / rate, tp)
    if job.base in ("nf4", "nf4-fp8"):
        forward += DEQUANTIZE * shape.block_weights / tp
        backward += DEQUANTIZE * shape.block_weights / tp
    return Compute(forward, backward)


def _again(
    shape: ModelShape, job: Job, saving: Saving, blocks_forward: float, per_weight: float, tp: int
) -> float:
    """What the backward pass does a second time, to save memory."""
    seconds = 0.0
    if job.base == "fp8" and not saving.two_copies:
        seconds += TRANSPOSE * shape.block_weights / tp
    if not saving.keep_layer:
        unpacked = DEQUANTIZE * shape.block_weights / tp if job.base in ("nf4", "nf4-fp8") else 0.0
        return seconds + blocks_forward + unpacked
    if not saving.keep_mlp:
        seconds += per_weight * shape.layers * 2 * shape.inter * shape.hidden
    return seconds


def optimizer_step(numbers: float, machine: Machine) -> float:
    """Seconds of AdamW over so many numbers on one GPU."""
    return numbers * OPTIMIZER_BYTES / machine.hbm


def undivided(shape: ModelShape, job: Job, machine: Machine) -> float:
    """Seconds of a GPU's tokens of a step, had it memory for everything: efficiency is counted against it."""
    cut = Cut(job.tokens_per_gpu, NO_SAVING)
    return micro_batch(shape, job, machine, cut).total
