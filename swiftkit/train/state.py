"""All that changes in a run, as one thing: copied to the host for a checkpoint, put back by a resume."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from swiftkit.formats.parts import Part, contents, read_parts
from swiftkit.parallel.shards import Shard

StateDict = dict[str, Any]
"""Nested mappings with text keys; the leaves are tensors and what JSON can hold."""
MOMENTS = "optimizer/"
"""What the paths of an optimizer's state begin with; then come a parameter's name and what it is."""


class Stateful(Protocol):
    """A part of a run that a checkpoint has to hold."""

    def state_dict(self) -> StateDict:
        """What it needs to go on."""

    def load_state_dict(self, state: StateDict) -> None:
        """Go on from there."""


class Cut(Protocol):
    """How trained tensors are cut over ranks; every rank calls each method for the same names in order."""

    def whole(self, name: str, own: Tensor) -> Tensor:
        """A tensor of the shape of the parameter `name`, put together from all ranks."""

    def own(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of it."""

    def whole_shape(self, name: str, own: tuple[int, ...]) -> tuple[int, ...]:
        """Its whole shape, from that of this rank's part."""


@dataclass(frozen=True)
class Snapshot:
    """A run at the end of a step, on the host.

    Args:
        step: finished optimizer steps.
        model: the trained tensors by name.
        tensors: everything else that is a tensor, by path.
        facts: everything else that is not, nested.
        ready: after this event the copies are whole; None where they are already.
        parts: this process's parts of what stays in parts, by path.
        stored: the folder that has these, of a snapshot that was read.
    """

    step: int
    model: dict[str, Tensor]
    tensors: dict[str, Tensor]
    facts: StateDict
    ready: torch.cuda.Event | None
    parts: dict[str, Part] = field(default_factory=dict)
    stored: Path | None = None


class TrainingState:
    """The trained tensors and all parts that a resumed run needs.

    Args:
        parameters: the trained tensors by name.
        parts: the optimizer, counters and the like, by name.
        cut: how the trained tensors are cut over ranks; None where they are whole. A snapshot has whole ones.
        shards: this rank's part of the tensors whose moments stay in parts: those of a whole model would be
            too much for one host.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        parts: Mapping[str, Stateful],
        cut: Cut | None = None,
        shards: Mapping[str, Shard] | None = None,
    ):
        self.parameters = parameters
        self._parts = parts
        self._cut = cut
        self._shards = shards or {}
        self._buffers: dict[str, Tensor] = {}  # pinned, used again by every copy
        self.step = 0

    def state_dict(self) -> tuple[dict[str, Tensor], StateDict]:
        """What the parts need, as tensors by path and the nested rest."""
        return flatten({name: part.state_dict() for name, part in self._parts.items()})

    def whole_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the trained tensors as a snapshot has them."""
        shapes = {name: tuple(parameter.shape) for name, parameter in self.parameters.items()}
        if self._cut is None:
            return shapes
        return {name: self._cut.whole_shape(name, shape) for name, shape in shapes.items()}

    def snapshot(self, *, whole: bool = True, parts: bool = True) -> Snapshot:
        """Copy everything to the host. An earlier snapshot must not be in use any more.

        From a GPU the copies only join its queue: the host does not wait for them. Where tensors are cut,
        every rank calls this.

        Args:
            whole: whether this process gets what is put together from all; otherwise it only gives its parts.
            parts: whether it gets its own of what stays in parts.
        """
        tensors, facts = self.state_dict()
        model = {}
        for name, tensor in self._whole_parameters():
            if whole:
                model[name] = self._copy(f"model/{name}", tensor)
        rest = {}
        for path, tensor in self._whole_tensors(tensors):
            if whole:
                rest[path] = self._copy(path, tensor)
        own = {}
        for path, shard in self._parted(tensors):
            if parts:
                own[path] = Part(self._copy(path, tensors[path]), shard)
        ready = None
        if any(t.is_cuda for t in self.parameters.values()):
            ready = torch.cuda.Event()
            ready.record()
        return Snapshot(self.step, model, rest, facts, ready, own)

    def restore(self, snapshot: Snapshot) -> None:
        """Put a snapshot back.

        Raises:
            KeyError: when it has other trained tensors.
            UserError: when what it has in parts on the disk is damaged.
        """
        self.set_parameters(snapshot.model)
        tensors = {path: self._own(self._owner(path), t) for path, t in snapshot.tensors.items()}
        if snapshot.stored is not None:
            tensors |= self._read(snapshot.stored)
        state = unflatten(tensors, snapshot.facts)
        for name, part in self._parts.items():
            part.load_state_dict(state.get(name, {}))
        self.step = snapshot.step

    @torch.no_grad()
    def set_parameters(self, tensors: Mapping[str, Tensor]) -> None:
        """Set the trained tensors to whole ones.

        Raises:
            KeyError: when one is missing.
        """
        for name, parameter in self.parameters.items():
            parameter.copy_(self._own(name, tensors[name]))

    def _whole_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """One at a time: together they need not fit on the device."""
        for name, parameter in self.parameters.items():
            yield name, parameter if self._cut is None else self._cut.whole(name, parameter)

    def _whole_tensors(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        parted = {path for path, _ in self._parted(tensors)}
        for path, tensor in tensors.items():
            owner = self._owner(path)
            if path in parted:
                continue
            if self._cut is None or owner is None or tensor.shape != self.parameters[owner].shape:
                yield path, tensor
            else:
                yield path, self._cut.whole(owner, tensor)

    def _parted(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Shard]]:
        """What stays in parts."""
        for path, tensor in tensors.items():
            owner = self._owner(path)
            if owner is None or owner not in self._shards:
                continue
            if tensor.shape == self.parameters[owner].shape:
                yield path, self._shards[owner]

    def _read(self, folder: Path) -> dict[str, Tensor]:
        """This rank's parts, from those that any number of ranks wrote."""
        wanted = {}
        for path, (shape, dtype) in contents(folder).items():
            shard = self._shards.get(self._owner(path) or "")
            shape = shape if shard is None else shard.shape(shape)
            wanted[path] = Part(torch.empty(shape, dtype=dtype), shard)
        read_parts(folder, wanted)
        return {
            path: part.tensor if part.shard is not None else self._own(self._owner(path), part.tensor)
            for path, part in wanted.items()
        }

    def _owner(self, path: str) -> str | None:
        """The parameter that something of the optimizer's state belongs to."""
        name = path.removeprefix(MOMENTS).rpartition("/")[0]
        return name if path.startswith(MOMENTS) and name in self.parameters else None

    def _own(self, name: str | None, whole: Tensor) -> Tensor:
        """This rank's part of a tensor that has the parameter's whole shape; anything else as it is."""
        if self._cut is None or name is None:
            return whole
        shape = self._cut.whole_shape(name, tuple(self.parameters[name].shape))
        return self._cut.own(name, whole) if tuple(whole.shape) == shape else whole

    @torch.no_grad()
    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        if not tensor.is_cuda:
            return tensor.clone(memory_format=torch.contiguous_format)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._buffers[name] = buffer
        return buffer.copy_(tensor, non_blocking=True)


class OptimizerState:
    """An optimizer's moments under the names of the tensors that they belong to."""

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]):
        self._optimizer = optimizer
        names = {id(parameter): name for name, parameter in parameters.items()}
        order = (p for group in optimizer.param_groups for p in group["params"])
        self._names = [names[id(parameter)] for parameter in order]

    def state_dict(self) -> StateDict:
        """Moments and step counts by name; rates and the like follow from the config."""
        state = self._optimizer.state_dict()["state"]
        return {self._names[index]: dict(values) for index, values in state.items()}

    def load_state_dict(self, state: StateDict) -> None:
        """Put the moments back."""
        indexed = {index: state[name] for index, name in enumerate(self._names) if name in state}
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": indexed, "param_groups": groups})


class RandomState:
    """torch's generators, from which dropout draws."""

    def __init__(self, device: torch.device):
        self._device = device

    def state_dict(self) -> StateDict:
        """The generators' states as bytes."""
        state = {"cpu": torch.get_rng_state()}
        if self._device.type == "cuda":
            state["cuda"] = torch.cuda.get_rng_state(self._device)
        return state

    def load_state_dict(self, state: StateDict) -> None:
        """Draw on from there; the generator of a device that the checkpoint did not know stays as it is."""
        torch.set_rng_state(state["cpu"])
        if self._device.type == "cuda" and "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"], self._device)


def flatten(state: StateDict) -> tuple[dict[str, Tensor], StateDict]:
    """Tensors by path (`optimizer/name/exp_avg`), and the same nesting with what is no tensor."""
    tensors: dict[str, Tensor] = {}
    rest: StateDict = {}
    for key, value in state.items():
        name = str(key)
        if isinstance(value, Tensor):
            tensors[name] = value
        elif isinstance(value, Mapping):
            inner, rest[name] = flatten(dict(value))
            tensors.update({f"{name}/{path}": tensor for path, tensor in inner.items()})
        else:
            rest[name] = value
    return tensors, rest


def unflatten(tensors: Mapping[str, Tensor], rest: StateDict) -> StateDict:
    """The state that `flatten` took apart."""
    state: StateDict = {
        name: unflatten({}, value) if isinstance(value, dict) else value for name, value in rest.items()
    }
    for path, tensor in tensors.items():
        *outer, leaf = path.split("/")
        place = state
        for name in outer:
            place = place.setdefault(name, {})
        place[leaf] = tensor
    return state
