"""Tensors that lie in parts on several processes, as a folder to which each process writes its own.

The files are those of `torch.distributed.checkpoint` over safetensors (`HuggingFaceStorageWriter`): there is
no pickle, and each file's header says which part of which tensor it has. They are read in any other parts.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from swiftkit.errors import UserError
from swiftkit.parallel.shards import Shard
from swiftkit.parallel.worker import PeerLostError

CONTENTS = "parts.json"


class Part(NamedTuple):
    """What one process holds of a tensor.

    Args:
        tensor: on the host.
        shard: which part it is, of one range; None where it is all.
    """

    tensor: Tensor
    shard: Shard | None = None

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Of the tensor."""
        shape = tuple(self.tensor.shape)
        return shape if self.shard is None else self.shard.whole_shape(shape)


def write_parts(folder: Path, parts: Mapping[str, Part], group: dist.ProcessGroup) -> None:
    """Write a folder that has its name once every process wrote, and read back what it wrote.

    Args:
        folder: to be made; what bears its name is replaced.
        parts: this process's, by the tensors' names; what all have whole, the first of them writes. Each
            tensor has a dimension, and not two ranges on one process.
        group: the processes, over CPU tensors. They call this together, from any thread that has the group
            for itself.

    Raises:
        OSError: on every process, when one of them could not write.
        PeerLostError: when one of them has ended.
    """
    first = dist.get_rank(group) == 0
    beside = folder.with_name(f".{folder.name}.partial")
    held = {name: part for name, part in parts.items() if first or part.shard is not None}
    held = {name: part for name, part in held.items() if part.tensor.numel()}

    def begin() -> None:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)

    def write() -> None:
        writer = HuggingFaceStorageWriter(str(beside), save_distributed=True)
        save(dict(held), storage_writer=writer, planner=_Write(), process_group=group)

    def name_it() -> None:
        sizes = {path.name: path.stat().st_size for path in sorted(beside.iterdir())}
        with (beside / CONTENTS).open("w", encoding="utf-8") as file:
            json.dump({"files": sizes}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        if folder.exists():
            shutil.rmtree(folder)
        beside.rename(folder)

    try:
        together(group, begin if first else None)
        together(group, write)
        together(group, lambda: _check(beside, held))
        together(group, name_it if first else None)
    except OSError:
        if first:
            shutil.rmtree(beside, ignore_errors=True)
        raise


def read_parts(folder: Path, parts: Mapping[str, Part]) -> None:
    """Fill parts, cut in any way, from what `write_parts` wrote; nothing else of the files is read.

    Args:
        folder: complete.
        parts: whose tensors are filled.

    Raises:
        UserError: when a file is missing or cut, or the tensors are not those of `parts`.
    """
    _check_files(folder)
    _fill(folder, parts)


def contents(folder: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """The whole shapes and the types of the tensors in a folder.

    Raises:
        UserError: when a file is missing or cut.
    """
    _check_files(folder)
    stored: Any = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {name: (tuple(entry.size), entry.properties.dtype) for name, entry in stored.items()}


class _Write(DefaultSavePlanner):
    """Hands torch each range of each part."""

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        self.pieces = _pieces(state_dict)
        self.wholes = {name: torch.Size(part.whole_shape) for name, part in state_dict.items()}
        super().set_up_planner({}, storage_meta, is_coordinator)

    def create_local_plan(self) -> SavePlan:
        items = [
            WriteItem(
                MetadataIndex(index.fqn, index.offset),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    _chunk(index, piece), TensorProperties.create_from_tensor(piece), self.wholes[index.fqn]
                ),
            )
            for index, piece in self.pieces.items()
        ]
        self.plan = SavePlan(items, planner_data={})
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self.pieces[write_item.index]


class _Read(DefaultLoadPlanner):
    """Asks torch for each range of each part."""

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        self.pieces = _pieces(state_dict)
        super().set_up_planner({}, metadata, is_coordinator)

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items = []
        for index, piece in self.pieces.items():
            stored: Any = self.metadata.state_dict_metadata[index.fqn]
            items += create_read_items_for_chunk_list(index.fqn, stored, [_chunk(index, piece)])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.pieces[index]


def _pieces(parts: Mapping[str, Part]) -> dict[MetadataIndex, Tensor]:
    """Views of the parts' ranges, by the tensor's name and where they lie in it."""
    return {
        MetadataIndex(name, torch.Size(offset)): view
        for name, part in parts.items()
        for offset, view in _ranges(part)
    }


def _ranges(part: Part) -> Iterator[tuple[list[int], Tensor]]:
    offset = [0] * part.tensor.dim()
    if part.shard is None:
        yield offset, part.tensor
        return
    at, dim = 0, part.shard.dim
    for start, stop in part.shard.ranges:
        view = part.tensor.narrow(dim, at, stop - start)
        at += stop - start
        if view.numel():
            yield [*offset[:dim], start, *offset[dim + 1 :]], view


def _chunk(index: MetadataIndex, piece: Tensor) -> ChunkStorageMetadata:
    assert index.offset is not None
    return ChunkStorageMetadata(index.offset, piece.shape)


def _fill(folder: Path, parts: Mapping[str, Part]) -> None:
    from safetensors import SafetensorError

    reader = HuggingFaceStorageReader(str(folder))
    try:
        stored = reader.read_metadata().state_dict_metadata
        for name, part in parts.items():
            entry: Any = stored.get(name)
            found = None if entry is None else (tuple(entry.size), entry.properties.dtype)
            if found != (part.whole_shape, part.tensor.dtype):
                raise UserError(
                    f"{folder} has for {name} {found or 'nothing'}, the run asks for "
                    f"{part.whole_shape, part.tensor.dtype}; take another checkpoint"
                )
        load(dict(parts), storage_reader=reader, planner=_Read(), no_dist=True)
    except SafetensorError as broken:
        raise UserError(f"{folder} is damaged ({broken}); take another checkpoint") from None


def _check(folder: Path, held: Mapping[str, Part]) -> None:
    """Read this process's parts back and compare them with what should be there."""
    for name, part in held.items():
        again = Part(torch.empty_like(part.tensor), part.shard)
        _fill(folder, {name: again})
        if not torch.equal(_bytes(again.tensor), _bytes(part.tensor)):
            raise OSError(f"{folder}: {name} reads back other than it was written; is the disk sound?")


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _check_files(folder: Path) -> None:
    path = folder / CONTENTS
    try:
        sizes = dict(json.loads(path.read_text(encoding="utf-8"))["files"])
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{path} is missing or damaged; take another checkpoint") from None
    for name, size in sizes.items():
        file = folder / name
        if not file.is_file() or file.stat().st_size != size:
            raise UserError(f"{file} is missing or cut; take another checkpoint")


def together(group: dist.ProcessGroup | None, work: Callable[[], object] | None) -> None:
    """Do it, and wait until all others of the group have done theirs; one's failure is everyone's.

    Args:
        group: the processes, over CPU tensors; None where there is but one.
        work: of this process, which may have none.

    Raises:
        UserError: this process's own.
        OSError, PeerLostError: as `write_parts`.
    """
    if group is None:
        if work is not None:
            work()
        return
    failure, refusal = None, None
    try:
        if work is not None:
            work()
    except UserError as own:
        failure, refusal = str(own), own
    except (Exception, CheckpointException) as own:  # whatever it is: nobody may be left waiting
        failure = (str(own).strip().splitlines() or ["no reason given"])[-1]
    words: list[str | None] = [None] * dist.get_world_size(group)
    try:
        dist.all_gather_object(words, failure, group=group)
    except RuntimeError as lost:
        raise PeerLostError(f"a checkpoint was not finished: {str(lost).splitlines()[0]}") from lost
    if refusal is not None:
        raise refusal
    odd = next((word for word in words if word is not None), None)
    if odd is not None:
        raise OSError(odd)
