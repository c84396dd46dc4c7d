"""What one GPU sends in a step, by what it is sent for."""

from __future__ import annotations

from dataclasses import dataclass

from swiftkit.plan.collectives import NOTHING, Traffic, all_gather, all_reduce, reduce_scatter
from swiftkit.plan.job import ACTIVATION, REDUCED, STORED, Cut, Job
from swiftkit.plan.layout import Layout
from swiftkit.plan.shape import ModelShape


@dataclass(frozen=True)
class StepTraffic:
    """Bytes that one GPU sends, apart by when they are needed.

    Args:
        gather_forward, gather_backward: weights of a sharded model, of one micro-batch.
        scatter: gradients of a sharded model that is trained whole, of one micro-batch.
        tensor: activations between the parts of a product, of one micro-batch.
        gradients: once a step, over the copies.
    """

    gather_forward: Traffic = NOTHING
    gather_backward: Traffic = NOTHING
    scatter: Traffic = NOTHING
    tensor: Traffic = NOTHING
    gradients: Traffic = NOTHING

    def step(self, micro_batches: int) -> Traffic:
        """Of a whole step."""
        each = self.gather_forward + self.gather_backward + self.scatter + self.tensor
        return each * micro_batches + self.gradients


def gathered_bytes(shape: ModelShape, job: Job) -> tuple[float, float]:
    """Bytes of a block that are gathered for its forward and for its backward, in their own precision."""
    whole = STORED[job.base] * shape.layer_weights
    if job.base == "fp8":  # q, k and v: bf16 forward, FP8 backward
        return whole + shape.qkv_weights, whole
    return whole, whole


def step_traffic(shape: ModelShape, job: Job, layout: Layout, cut: Cut, *, node: int) -> StepTraffic:
    """What one GPU sends.

    Args:
        shape: of the model.
        job: what is trained.
        layout: of all GPUs.
        cut: of a step.
        node: GPUs of a node.
    """
    return StepTraffic(
        *_sharded(shape, job, layout, node),
        tensor=_tensor(shape, layout, cut, node),
        gradients=_gradients(shape, job, layout, node),
    )


def _sharded(shape: ModelShape, job: Job, layout: Layout, node: int) -> tuple[Traffic, Traffic, Traffic]:
    """Weights gathered layer by layer, twice; a whole model's gradients back to their owners."""
    if layout.shard == 1:
        return NOTHING, NOTHING, NOTHING
    group = layout.group("shard", node=node)
    forward, backward = (part / layout.tp for part in gathered_bytes(shape, job))
    end = ACTIVATION * shape.vocab * shape.hidden / layout.tp
    gather_forward = all_gather(forward, group) * shape.layers + all_gather(end, group)
    gather_backward = all_gather(backward, group) * shape.layers
    if not shape.tied:
        gather_forward += all_gather(end, group)
    if job.tuner == "lora":
        return gather_forward, gather_backward, NOTHING
    layer = REDUCED * shape.layer_weights / layout.tp
    ends = REDUCED * shape.end_weights / layout.tp
    scatter = reduce_scatter(layer, group) * shape.layers + reduce_scatter(ends, group)
    return gather_forward, gather_backward, scatter


def _tensor(shape: ModelShape, layout: Layout, cut: Cut, node: int) -> Traffic:
    """Into attention and MLP a gather of tokens, out of them a scattered sum; backward the mirror."""
    if layout.tp == 1:
        return NOTHING
    group = layout.group("tp", node=node)
    activations = ACTIVATION * cut.micro_tokens * shape.hidden
    gather, scatter = all_gather(activations, group), reduce_scatter(activations, group)
    layer = (gather + scatter) * 4
    if not cut.saving.keep_layer:  # the second forward needs no sum behind the MLP
        layer += gather * 2 + scatter
    # Out of the embedding, into the head, and its gradient back; the loss needs three float32 a token.
    ends = scatter * 2 + gather + all_reduce(12.0 * cut.micro_tokens, group)
    return layer * shape.layers + ends


def _gradients(shape: ModelShape, job: Job, layout: Layout, node: int) -> Traffic:
    """Once a step: adapters over everything that read other rows, or a whole model over its copies."""
    if job.tuner == "full":
        if layout.replicate == 1:
            return NOTHING
        part = REDUCED * shape.weights / (layout.tp * layout.shard)
        return all_reduce(part, layout.group("replicate", node=node))
    cut_factors, whole_factors = shape.adapter_weights(job.rank)
    found = NOTHING
    if layout.data_parallel > 1:
        found += all_reduce(REDUCED * cut_factors / layout.tp, layout.group("shard", "replicate", node=node))
    if layout.gpus > 1:  # factors that tp holds whole have partial gradients on each of its ranks
        found += all_reduce(REDUCED * whole_factors, layout.group("tp", "shard", "replicate", node=node))
    return found
