"""What fused layers keep between forward and backward, and which of two savings a run needs to fit."""

from __future__ import annotations

from dataclasses import dataclass

from swiftkit.engine.fused.base import BaseKind, kind_of
from swiftkit.engine.fused.layer import LINEARS, LayerShape
from swiftkit.engine.kernels.outliers import how_many
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
    """Bytes of a layer's frozen weights, all of one storage."""
    total = 0.0
    for name in LINEARS:
        rows, columns = shape.out_in(name)
        carried = 2 * how_many(columns) / columns if base in ("fp8", "nf4-fp8") else 0.0
        total += rows * columns * (STORED[base] + carried + (1.0 if base == "fp8" and two_copies else 0.0))
    return total


def kept_bytes(shape: LayerShape, base: BaseKind, *, tokens: int, recompute_mlp: bool) -> float:
    """Bytes that a layer keeps for its backward, in 16-bit activations."""
    queries, keys = shape.heads.queries * shape.heads.width, shape.heads.keys * shape.heads.width
    columns = 2.0 * (
        2 * shape.hidden + queries + 2 * keys + queries
    )  # two residuals, q k v, attention's output
    cast = base in ("fp8", "nf4-fp8")
    if cast:
        columns += 2 * (shape.hidden + 2 * how_many(shape.hidden))  # normalized inputs, one byte each
    if not recompute_mlp:
        columns += 2.0 * 2 * shape.inter + (shape.inter + 2 * how_many(shape.inter) if cast else 0)
    return tokens * columns


def choose(
    shape: LayerShape,
    base: BaseKind,
    *,
    layers: int,
    tokens: int,
    free: float,
    other: float,
    parts: int = 1,
) -> MemoryPolicy:
    """The fastest policy whose weights and activations fit.

    Args:
        shape: of a layer.
        base: storage of its weights.
        layers: how many.
        tokens: of the largest micro-batch.
        free: bytes free on the device before anything is loaded.
        other: bytes of everything else (embedding, head, adapters with their optimizer states).
        parts: in which the weights lie on as many ranks; two layers of them are whole at a time then, and
            there are no second copies.

    Raises:
        UserError: when none fits.
    """
    policies = [
        MemoryPolicy(),
        MemoryPolicy(two_copies=False),
        MemoryPolicy(two_copies=False, recompute_mlp=True),
    ]
    for policy in policies if parts == 1 else policies[1:]:
        inner, end = (
            weight_bytes(shape, kind_of(f"layers.{n}.", base, layers), two_copies=policy.two_copies)
            for n in (1, 0)
        )
        weights = max(0, layers - 2) * inner + min(2, layers) * end
        weights = weights if parts == 1 else weights / parts + 2 * max(inner, end)
        kept = layers * kept_bytes(shape, base, tokens=tokens, recompute_mlp=policy.recompute_mlp)
        if weights + kept + other <= USABLE * free:
            return policy
    gib = 2**30
    raise UserError(
        f"this run does not fit on the GPU: {weights / gib:.0f} GiB of frozen weights, "
        f"{kept / gib:.0f} GiB that {tokens:,} tokens keep for the backward pass, "
        f"{other / gib:.0f} GiB of the rest, and {free / gib:.0f} GiB are free; make "
        "--per_device_train_batch_size or --max_length smaller, or take --base_precision nf4"
    )
