"""What fused layers keep between forward and backward, and which of two savings a run needs to fit."""

from __future__ import annotations

from dataclasses import dataclass

from swiftkit.engine.fused.base import BaseKind, kind_of
from swiftkit.engine.fused.layer import LINEARS, LayerShape
from swiftkit.errors import UserError

# Bytes of a stored parameter with its block scales; the second copy of FP8 comes on top.
STORED = {"plain": 2.0, "fp8": 1.0, "fp8-backward": 3.0, "nf4": 0.5 + 4 / 64, "nf4-fp8": 0.5 + 4 / 64}
# Of the free memory: the rest is for the head's chunks, workspaces of products, and the allocator's gaps.
USABLE = 0.88


@dataclass(frozen=True)
class MemoryPolicy:
    """The two trades of a fused layer, cheaper one first.

    Args:
        two_copies: keep FP8 weights transposed as well; without, each backward product transposes (about 4 %)
        recompute_mlp: make the gate/up product again in the backward instead of keeping it (about 12 %).
    """

    two_copies: bool = True
    recompute_mlp: bool = False


def weight_bytes(shape: LayerShape, base: BaseKind, *, two_copies: bool) -> float:
    """Bytes of a layer's frozen weights."""
    total = 0.0
    for name in LINEARS:
        rows, columns = shape.out_in(name)
        kind = kind_of(name.rpartition(".")[2], base)
        total += rows * columns * (STORED[kind] + (1.0 if kind == "fp8" and two_copies else 0.0))
    return total


def kept_bytes(shape: LayerShape, base: BaseKind, *, tokens: int, recompute_mlp: bool) -> float:
    """Bytes that a layer keeps for its backward, in 16-bit activations."""
    queries, keys = shape.heads.queries * shape.heads.width, shape.heads.keys * shape.heads.width
    columns = 2.0 * (
        2 * shape.hidden + queries + 2 * keys + queries
    )  # two residuals, q k v, attention's output
    cast = base in ("fp8", "nf4-fp8")
    if cast:
        columns += shape.hidden * (2 if base == "nf4-fp8" else 1)  # normalized inputs, one byte each
    if not recompute_mlp:
        columns += 2.0 * 2 * shape.inter + (shape.inter if cast else 0)
    return tokens * columns


def choose(
    shape: LayerShape, base: BaseKind, *, layers: int, tokens: int, free: float, other: float
) -> MemoryPolicy:
    """The fastest policy whose weights and activations fit.

    Args:
        shape: of a layer.
        base: storage of its weights.
        layers: how many.
        tokens: of the largest micro-batch.
        free: bytes free on the device before anything is loaded.
        other: bytes of everything else (embedding, head, adapters with their optimizer states).

    Raises:
        UserError: when none fits.
    """
    policies = [
        MemoryPolicy(),
        MemoryPolicy(two_copies=False),
        MemoryPolicy(two_copies=False, recompute_mlp=True),
    ]
    for policy in policies:
        weights = weight_bytes(shape, base, two_copies=policy.two_copies)
        kept = kept_bytes(shape, base, tokens=tokens, recompute_mlp=policy.recompute_mlp)
        if layers * (weights + kept) + other <= USABLE * free:
            return policy
    gib = 2**30
    raise UserError(
        f"this run does not fit on the GPU: {layers * weights / gib:.0f} GiB of frozen weights, "
        f"{layers * kept / gib:.0f} GiB that {tokens:,} tokens keep for the backward pass, "
        f"{other / gib:.0f} GiB of the rest, and {free / gib:.0f} GiB are free; make "
        "--per_device_train_batch_size or --max_length smaller, or take --base_precision nf4"
    )
