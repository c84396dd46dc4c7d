"""How a model lies over GPUs: replicate x shard x tensor, and which of these a number of GPUs allows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from swiftkit.errors import UserError
from swiftkit.plan.shape import ModelShape


@dataclass(frozen=True)
class Group:
    """The GPUs of one collective: as many in each node, in as many nodes."""

    inside: int
    nodes: int

    @property
    def size(self) -> int:
        """GPUs of the group."""
        return self.inside * self.nodes


@dataclass(frozen=True)
class Layout:
    """A mesh. The innermost axis lies on neighbours: tp in a node first, then shard, then replicate.

    Args:
        replicate: copies of everything.
        shard: parts that the weights are kept in and gathered from, layer by layer (FSDP).
        tp: parts that each matrix product is done in (tensor parallelism, with sequence parallelism).
    """

    replicate: int = 1
    shard: int = 1
    tp: int = 1

    @property
    def gpus(self) -> int:
        """Of the whole mesh."""
        return self.replicate * self.shard * self.tp

    @property
    def data_parallel(self) -> int:
        """Groups of GPUs that read rows of their own."""
        return self.replicate * self.shard

    @property
    def name(self) -> str:
        """As people say it: ddp, fsdp, hsdp 8 x 8, tp 4 x ddp 2."""
        parts = [f"tp {self.tp}"] if self.tp > 1 else []
        if self.shard > 1 and self.replicate > 1:
            parts.append(f"hsdp {self.replicate} x {self.shard}")
        elif self.shard > 1:
            parts.append(f"fsdp {self.shard}")
        elif self.replicate > 1:
            parts.append(f"ddp {self.replicate}")
        return " x ".join(parts) or "one GPU"

    def group(self, *axes: str, node: int) -> Group:
        """The GPUs along one or several neighbouring axes.

        Args:
            axes: of tp, shard and replicate.
            node: GPUs of a node.
        """
        size, stride = 1, 1
        for axis in ("tp", "shard", "replicate"):
            if axis in axes:
                size *= getattr(self, axis)
            elif size == 1:
                stride *= getattr(self, axis)
        inside = min(size, max(1, node // stride))
        assert size % inside == 0, (self, axes, node)
        return Group(inside=inside, nodes=size // inside)


def layouts(shape: ModelShape, gpus: int, *, node: int) -> Iterator[Layout]:
    """Every mesh worth a look: tp inside a node, shards over a node or over everything.

    Args:
        shape: of the model, for the cuts of its heads.
        gpus: all of them.
        node: GPUs of a node.

    Raises:
        UserError: for a number of GPUs that fills no whole nodes.
    """
    if gpus < 1 or (gpus > node and gpus % node):
        raise UserError(f"{gpus} GPUs are no whole number of nodes of {node}")
    within = min(gpus, node)
    for tp in (n for n in range(1, within + 1) if within % n == 0):
        if shape.kv_heads % tp or shape.heads % tp or shape.inter % tp:
            continue
        rest = gpus // tp
        for shard in sorted({1, within // tp, rest}):
            yield Layout(replicate=rest // shard, shard=shard, tp=tp)
