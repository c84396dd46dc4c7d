"""All that changes in a run, as one thing: copied to the host for a checkpoint, put back by a resume."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

StateDict = dict[str, Any]
"""Nested mappings with text keys; the leaves are tensors and what JSON can hold."""


class Stateful(Protocol):
    """A part of a run that a checkpoint has to hold."""

    def state_dict(self) -> StateDict:
        """What it needs to go on."""

    def load_state_dict(self, state: StateDict) -> None:
        """Go on from there."""


@dataclass(frozen=True)
class Snapshot:
    """A run at the end of a step, on the host.

    Args:
        step: finished optimizer steps.
        model: the trained tensors by name.
        tensors: everything else that is a tensor, by path.
        facts: everything else that is not, nested.
        ready: after this event the copies are whole; None where they are already.
    """

    step: int
    model: dict[str, Tensor]
    tensors: dict[str, Tensor]
    facts: StateDict
    ready: torch.cuda.Event | None


class TrainingState:
    """The trained tensors and all parts that a resumed run needs.

    Args:
        parameters: the trained tensors by name.
        parts: the optimizer, counters and the like, by name.
    """

    def __init__(self, parameters: Mapping[str, Tensor], parts: Mapping[str, Stateful]):
        self.parameters = parameters
        self._parts = parts
        self._buffers: dict[str, Tensor] = {}  # pinned, used again by every copy
        self.step = 0

    def state_dict(self) -> tuple[dict[str, Tensor], StateDict]:
        """What the parts need, as tensors by path and the nested rest."""
        return flatten({name: part.state_dict() for name, part in self._parts.items()})

    def snapshot(self) -> Snapshot:
        """Copy everything to the host. An earlier snapshot must not be in use any more.

        From a GPU the copies only join its queue: the host does not wait for them.
        """
        tensors, facts = self.state_dict()
        model = {name: self._copy(f"model/{name}", t) for name, t in self.parameters.items()}
        rest = {name: self._copy(name, t) for name, t in tensors.items()}
        ready = None
        if any(t.is_cuda for t in self.parameters.values()):
            ready = torch.cuda.Event()
            ready.record()
        return Snapshot(self.step, model, rest, facts, ready)

    def restore(self, snapshot: Snapshot) -> None:
        """Put a snapshot back.

        Raises:
            KeyError: when it has other trained tensors.
        """
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(snapshot.model[name])
        state = unflatten(snapshot.tensors, snapshot.facts)
        for name, part in self._parts.items():
            part.load_state_dict(state.get(name, {}))
        self.step = snapshot.step

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
