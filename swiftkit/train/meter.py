"""Numbers of the steps between two log lines. They stay on the device until a line is due."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from swiftkit.engine import Sums
from swiftkit.train.guards import BadStep, Reading
from swiftkit.train.state import StateDict


class Meter:
    """Collects the steps between two log lines.

    Args:
        device: where the sums are.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._forget()

    def _forget(self) -> None:
        self._sums: dict[str, list[Tensor]] = {}
        self._norms: list[Tensor] = []
        self._bad: list[Tensor] = []
        self._steps: list[int] = []
        self._tokens: list[int] = []
        self._trained: list[int] = []
        self._since = time.perf_counter()

    def add(self, sums: Sums, norm: Tensor, bad: Tensor, *, step: int, tokens: int, trained: int) -> None:
        """Take in one step (counted from 1): sums over its tokens, and whether it was held back."""
        for name, value in sums.items():
            self._sums.setdefault(name, []).append(value)
        self._norms.append(norm)
        self._bad.append(bad)
        self._steps.append(step)
        self._tokens.append(tokens)
        self._trained.append(trained)

    def _bad_steps(self) -> list[BadStep]:
        flags, norms = torch.stack(self._bad).tolist(), torch.stack(self._norms).tolist()
        losses = torch.stack(self._sums["loss"]).tolist()
        return [
            BadStep(step, loss / trained, norm)
            for step, loss, trained, norm, bad in zip(
                self._steps, losses, self._trained, norms, flags, strict=True
            )
            if bad
        ]

    def read(self) -> Reading:
        """What happened since the last line, and start anew; waits for the device."""
        bad = self._bad_steps()
        held = {step.step for step in bad}
        taken = [index for index, step in enumerate(self._steps) if step not in held]
        trained = sum(self._trained[index] for index in taken)
        values: dict[str, float] = {}
        for name, kept in self._sums.items():
            numbers = torch.stack(kept).tolist()
            if taken:
                values[name] = sum(numbers[index] for index in taken) / trained
        if taken:
            values["grad_norm"] = float(self._norms[taken[-1]])
        if bad:
            values["skipped_steps"] = len(bad)
        values["tokens_per_second"] = sum(self._tokens) / (time.perf_counter() - self._since)
        if self._device.type == "cuda":
            values["memory_allocated_gib"] = torch.cuda.max_memory_allocated(self._device) / 2**30
            values["memory_reserved_gib"] = torch.cuda.max_memory_reserved(self._device) / 2**30
        reading = Reading(self._steps[-1], len(taken), values, bad)
        self._forget()
        return reading

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time of an evaluation or a checkpoint out of the rate."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        start = time.perf_counter()
        try:
            yield
        finally:
            self._since += time.perf_counter() - start

    def state_dict(self) -> StateDict:
        """The steps since the last line."""
        if not self._steps:
            return {}
        return {
            "sums": {name: torch.stack(values) for name, values in self._sums.items()},
            "norms": torch.stack(self._norms),
            "bad": torch.stack(self._bad),
            "steps": list(self._steps),
            "tokens": list(self._tokens),
            "trained": list(self._trained),
        }

    def load_state_dict(self, state: StateDict) -> None:
        """Go on with them."""
        self._forget()
        if not state:
            return
        place = self._device
        self._sums = {name: list(values.to(place).unbind()) for name, values in state["sums"].items()}
        self._norms = list(state["norms"].to(place).unbind())
        self._bad = list(state["bad"].to(place).unbind())
        self._steps, self._tokens, self._trained = state["steps"], state["tokens"], state["trained"]
