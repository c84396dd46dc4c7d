"""Bytes on one GPU: weights, gradients, optimizer states, what the backward needs, and what is gathered."""

from __future__ import annotations

from dataclasses import dataclass

from swiftkit.plan.compute import width
from swiftkit.plan.job import ACTIVATION, ADAM, REDUCED, STORED, Cut, Job, Saving
from swiftkit.plan.layout import Layout
from swiftkit.plan.shape import ModelShape

GATHERED_LAYERS = 2
"""Blocks that stand whole beside the shards: the one that computes, and the next one."""
ELSEWHERE = 2**30
"""The head's chunk of logits, workspaces of products, the allocator's gaps: measured peaks have them too."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one GPU.

    Args:
        weights: as stored, with the blocks that are gathered at the moment.
        training: gradients and optimizer states.
        activations: kept for the backward, and of the block that computes.
    """

    weights: float
    training: float
    activations: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.weights + self.training + self.activations + ELSEWHERE


def layer_bytes(shape: ModelShape, job: Job, saving: Saving) -> float:
    """Bytes of a block's weights as stored: FP8 with bf16 copies of q, k and v, and maybe transposed ones."""
    stored = STORED[job.base] * shape.layer_weights
    if job.base == "fp8":
        stored += 2.0 * shape.qkv_weights
        stored += (shape.layer_weights - shape.qkv_weights) if saving.two_copies else 0.0
    return stored


def kept_bytes(shape: ModelShape, job: Job, saving: Saving, *, tp: int = 1) -> float:
    """Bytes that one block keeps for one token.

    Under tensor parallelism with sequence parallelism all is divided, but for the inputs of column layers,
    which are gathered and kept whole: the gradients of A (or of the weight) need them.
    """
    if not saving.keep_layer:
        return ACTIVATION * shape.hidden / tp
    one_byte = 1.0 if job.products_in_fp8 else 0.0
    inputs_kept = one_byte or (ACTIVATION if tp > 1 or job.tuner == "full" else 0.0)
    whole = 2 * shape.hidden * inputs_kept
    parts = ACTIVATION * (2 * shape.hidden + 2 * shape.query_width + 2 * shape.kv_width)
    if saving.keep_mlp:
        parts += ACTIVATION * 2 * shape.inter + one_byte * shape.inter
    if job.tuner == "full":  # the input of down_proj
        parts += ACTIVATION * shape.inter
    return whole + parts / tp


def memory(shape: ModelShape, job: Job, layout: Layout, cut: Cut) -> Memory:
    """Bytes of one GPU of a layout.

    Args:
        shape: of the model.
        job: what is trained.
        layout: of all GPUs.
        cut: of a step.
    """
    tp, shard, saving, tokens = layout.tp, layout.shard, cut.saving, cut.micro_tokens
    layer = layer_bytes(shape, job, saving) / tp
    weights = (layer * shape.layers + ACTIVATION * shape.end_weights / tp) / shard
    if shard > 1:
        weights += max(GATHERED_LAYERS * layer, ACTIVATION * shape.vocab * shape.hidden / tp)
    if job.tuner == "full":
        training = shape.weights * (ADAM + ACTIVATION) / (tp * shard)
        if shard > 1:
            training += GATHERED_LAYERS * REDUCED * shape.layer_weights / tp
    else:  # replicated beside a sharded base
        cut_factors, whole_factors = shape.adapter_weights(job.rank)
        training = (cut_factors / tp + whole_factors) * (ADAM + REDUCED)
    kept = tokens * shape.layers * kept_bytes(shape, job, saving, tp=tp)
    working = tokens * ACTIVATION * width(shape) / tp
    if not saving.keep_layer:
        working *= 2
    return Memory(weights, training, kept + working)
