"""The processes of a run as a grid with named axes."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, fields
from typing import Literal

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from swiftkit.plan import layout as planned


@dataclass(frozen=True)
class Layout:
    """How many processes stand along each axis; an axis of one is not used.

    Args:
        pp: stages of the model, one behind the other.
        replicate: copies of the frozen weights, each with rows of its own.
        shard: parts that weights are stored in, gathered where they are needed (FSDP).
        cp: parts of a sequence, for attention over long ones.
        tp: parts of each weight, which compute together.
        ep: parts of the experts.
    """

    pp: int = 1
    replicate: int = 1
    shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    @property
    def size(self) -> int:
        """Processes in all."""
        return math.prod(astuple(self))

    @property
    def name(self) -> str:
        """As people say it: tp 4 x ddp 2."""
        if self.size == 1:
            return "one process"
        return planned.Layout(replicate=self.replicate, shard=self.shard, tp=self.tp).name

    @property
    def storage(self) -> Literal["ddp", "fsdp", "hsdp"]:
        """Where weights lie, as `--layout` has it."""
        if self.shard == 1:
            return "ddp"
        return "fsdp" if self.replicate == 1 else "hsdp"

    def mesh(self, device_type: str) -> DeviceMesh:
        """The grid over the process group that stands; neighbours differ in `ep`, then in `tp`.

        Args:
            device_type: cuda or cpu.

        Raises:
            RuntimeError: when there are other than `size` processes.
        """
        names = tuple(field.name for field in fields(self))
        return init_device_mesh(device_type, astuple(self), mesh_dim_names=names)
