"""The processes of a run, as one of them sees it: what they sum, agree on, and wait for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from swiftkit.errors import UserError
from swiftkit.parallel.mesh import Layout
from swiftkit.parallel.standings import record_calls
from swiftkit.parallel.worker import PeerLostError

T = TypeVar("T")

BUCKET = 1 << 28  # numbers that are summed in one call; an adapter's gradients are fewer
PATIENCE = timedelta(days=1)  # the first rank of a node may be downloading, or preparing data


@dataclass(eq=False)
class World:
    """This process among those of the run; alone, every call is what one process would do.

    Args:
        rank, size: its place among all, and how many there are.
        local_rank, local_size: the same on this node.
        device: where this rank computes; None where the run chooses.
        layout: how the ranks stand.
        replicas: those that take other rows, and hold the same weights or other parts; None without any.
        shards: the mesh whose last axis are those that weights lie on in parts, its first one copies of all
            parts; None where every replica has whole ones.
        tp: those that hold the other parts of these weights, and take the same rows; None likewise.
        writers: those of the first copy that lies in parts, for what they write from a thread of their own;
            None for others.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    device: torch.device | None = None
    layout: Layout = field(default_factory=Layout)
    replicas: dist.ProcessGroup | None = None
    shards: DeviceMesh | None = None
    tp: dist.ProcessGroup | None = None
    writers: dist.ProcessGroup | None = None
    _names: list[str] = field(default_factory=list)

    @property
    def first(self) -> bool:
        """Whether this rank writes and speaks for all."""
        return self.rank == 0

    @property
    def nodes(self) -> int:
        """Machines."""
        return self.size // self.local_size

    @property
    def data_size(self) -> int:
        """How many shares the rows of a step are dealt in."""
        return self.size // self.layout.tp

    @property
    def data_rank(self) -> int:
        """Whose share of the rows this rank takes; ranks of one `tp` group take the same."""
        return self.rank // self.layout.tp

    @property
    def copy(self) -> int:
        """Which copy of the model's weights this rank has a part of, or all."""
        return self.data_rank // self.layout.shard

    def arranged(self, layout: Layout) -> World:
        """The same processes in another layout; every rank must call it.

        Args:
            layout: of as many processes as there are.
        """
        if self.size == 1 or layout == self.layout:
            return self
        assert self.device is not None
        mesh = layout.mesh(self.device.type)
        rows = mesh["replicate", "shard"]
        shards = None if layout.shard == 1 else rows if layout.replicate > 1 else mesh["shard"]
        flat = rows._flatten("rows") if layout.replicate > 1 and layout.shard > 1 else None
        axis = "shard" if layout.shard > 1 else "replicate"
        groups = mesh.get_group(axis) if flat is None else flat.get_group(), mesh.get_group("tp")
        replicas, tp = (group if group.size() > 1 else None for group in groups)
        arranged = replace(self, layout=layout, replicas=replicas, shards=shards, tp=tp)
        if layout.shard > 1 and layout.tp == 1:
            group = dist.new_group(list(range(layout.shard)), timeout=PATIENCE, backend="gloo")
            arranged.writers = group if arranged.copy == 0 else None
        return arranged

    # ---- numbers on the device ---------------------------------------------------------------------------

    @torch.no_grad()
    def sum_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Sum the gradients of tensors that every rank holds: in one float32 bucket, or a few large ones.

        A rank that had no rows in this step has no gradients, and takes part with zeros.
        """
        if self.replicas is None:
            return
        for members in _buckets(parameters):
            parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in members]
            bucket = torch.cat([part.reshape(-1).float() for part in parts])
            self._call(dist.all_reduce, bucket, group=self.replicas)
            pieces = bucket.split([p.numel() for p in members])
            for p, part, piece in zip(members, parts, pieces, strict=True):
                p.grad = part.copy_(piece.view_as(p))

    def sum_named(self, sums: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
        """Sum scalars by name, in float64; a rank that had no rows has none, and takes part with zeros."""
        if self.replicas is None:
            return sums
        if not self._names:  # once: which names there are
            known = self.gathered(sorted(sums))
            self._names = sorted({name for names in known for name in names})
        zero = torch.zeros((), dtype=torch.float64, device=device)
        values = torch.stack([sums.get(name, zero).double() for name in self._names])
        self._call(dist.all_reduce, values, group=self.replicas)
        return dict(zip(self._names, values.unbind(), strict=True))

    def sum_up(self, *tensors: Tensor) -> None:
        """Sum over all ranks, in place."""
        for tensor in tensors if self.size > 1 else ():
            self._call(dist.all_reduce, tensor)

    def take_from(self, rank: int, *tensors: Tensor) -> None:
        """Overwrite contiguous tensors with what a rank holds, byte by byte."""
        for tensor in tensors if self.size > 1 else ():
            self._call(dist.broadcast, tensor.view(torch.uint8), src=rank)

    # ---- words on the host -------------------------------------------------------------------------------

    def totals(self, *numbers: int) -> list[int]:
        """Sums over all ranks. The hosts wait for each other; their devices are not asked."""
        if self.size == 1:
            return list(numbers)
        values = torch.tensor(numbers, dtype=torch.int64)
        self._call(dist.all_reduce, values)
        return [int(value) for value in values]

    def of_rows(self, *numbers: int) -> list[int]:
        """What this rank adds to sums over rows: of ranks that take the same rows one counts them."""
        return [number if self.rank % self.layout.tp == 0 else 0 for number in numbers]

    def wait(self) -> None:
        """Until every rank is here."""
        self.totals(0)

    def from_first(self, work: Callable[[], T]) -> T:
        """What the first rank finds out, on every rank.

        Raises:
            UserError: the first rank's.
        """
        if self.size == 1:
            return work()
        value, refusal = _tried(work) if self.first else (None, None)
        box: list[Any] = [(value, refusal)]
        self._call(dist.broadcast_object_list, box, src=0)
        return _value(*box[0])

    def once_a_node(self, work: Callable[[], T]) -> T:
        """Let the first rank of each node do it, then the others, who find it done.

        Raises:
            UserError: that of the lowest rank, on every rank.
        """
        if self.size == 1:
            return work()
        value, refusal = _tried(work) if self.local_rank == 0 else (None, None)
        refusals = [words for words in self.gathered(refusal) if words is not None]
        if refusals:
            raise UserError(refusals[0])
        return _value(value, None) if self.local_rank == 0 else work()

    def check_same(self, value: str, what: str) -> None:
        """Refuse to go on where ranks do not hold the same.

        Raises:
            UserError: saying what differs, and between whom.
        """
        if self.size == 1:
            return
        odd = [rank for rank, other in enumerate(self.gathered(value)) if other != value]
        if odd:
            raise UserError(f"ranks {self.rank} and {odd[0]} have other {what}; give every node the same")

    def gathered(self, value: T) -> list[T]:
        """Every rank's value, in their order, on every rank."""
        if self.size == 1:
            return [value]
        box: list[Any] = [None] * self.size
        self._call(dist.all_gather_object, box, value)
        return box

    def _call(self, collective: Callable[..., Any], *args: Any, **options: Any) -> None:
        """One collective call.

        Raises:
            PeerLostError: when another rank has ended, or does not answer.
        """
        try:
            collective(*args, **options)
        except RuntimeError as failure:
            words = str(failure).strip().splitlines() or ["no reason given"]
            raise PeerLostError(f"{collective.__name__} failed: {words[0]}") from failure


ALONE = World()


def _tried(work: Callable[[], T]) -> tuple[T | None, str | None]:
    """The value, or the words of a refusal."""
    try:
        return work(), None
    except UserError as refusal:
        return None, str(refusal)


def _value(value: Any, refusal: str | None) -> Any:
    if refusal is not None:
        raise UserError(refusal)
    return value


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors in order, up to BUCKET numbers together."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and size + tensor.numel() > BUCKET:
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.numel()
    if bucket:
        yield bucket


@contextmanager
def joined(device: str) -> Iterator[World]:
    """This process's world: that of torchrun's environment, where it was started by that.

    Args:
        device: cpu or cuda.

    Raises:
        UserError: when this rank has no GPU of its own, or the others cannot be reached.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        yield ALONE
        return
    local = int(os.environ.get("LOCAL_RANK", 0))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    place = _own_device(device, local)
    begun = not dist.is_initialized()
    if begun:
        _begin(place)
    world = World(dist.get_rank(), dist.get_world_size(), local, local_size, place)
    yield world.arranged(Layout(replicate=world.size))
    if begun:  # after an error the process ends, and with it the group: nobody must be waited for
        dist.destroy_process_group()


def _own_device(device: str, local: int) -> torch.device:
    if device == "cpu":
        return torch.device("cpu")
    if local >= torch.cuda.device_count():
        raise UserError(
            f"local rank {local} has no GPU: torch sees {torch.cuda.device_count()} here "
            f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}); start one process "
            "a GPU, or give --device cpu"
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def _begin(place: torch.device) -> None:
    """Meet the other ranks. CPU tensors travel by gloo in any case: hosts agree without asking the GPU."""
    record_calls()
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    try:
        if place.type == "cuda":
            dist.init_process_group("cpu:gloo,cuda:nccl", timeout=PATIENCE)
        else:
            dist.init_process_group("gloo", timeout=PATIENCE)
    except (dist.DistError, ValueError) as failure:
        words = (str(failure).strip().splitlines() or ["no reason given"])[0]
        raise UserError(f"the other processes cannot be met at {where}: {words}") from failure


def seed_of_step(seed: int, *, step: int, rank: int, size: int) -> int:
    """From what dropout draws in a step: for each share of the rows its own, the same again after a resume.

    Args:
        seed: of the run.
        step: counted from 0.
        rank, size: of the shares.
    """
    return (seed * 1_000_003 + step * size + rank) % (1 << 63)


def dealt(items: Sequence[T], world: World) -> list[T]:
    """This rank's share, one by one in turn: no rank has two more than another."""
    return list(items[world.data_rank :: world.data_size])


def collected(share: Sequence[T], world: World) -> list[T]:
    """What each rank made of its `dealt` items, in the order of all items, on every rank."""
    shares = world.gathered(list(share))[:: world.layout.tp]
    whole: list[T] = [item for own in shares for item in own]
    for rank, own in enumerate(shares):
        whole[rank :: world.data_size] = own
    return whole
