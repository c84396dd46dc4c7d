"""Times a row, watches its limits, and writes down at every phase what is known by then."""

from __future__ import annotations

import faulthandler
import importlib.metadata
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peers.workload import Workload

PACKAGES = {
    "torch": "torch", "triton": "triton", "transformers": "transformers", "peft": "peft", "trl": "trl",
    "accelerate": "accelerate", "bitsandbytes": "bitsandbytes", "liger_kernel": "liger-kernel",
    "torchao": "torchao", "unsloth": "unsloth", "unsloth_zoo": "unsloth_zoo", "swift": "ms-swift",
    "xformers": "xformers", "flash_attn": "flash-attn",
}  # fmt: skip


class Meter:
    """A peer calls `loaded`, then `values` and `step` once an optimizer step, then `finish`.

    Args:
        workload: what is trained.
        record: known facts of the row; grows, and is written to `path` whenever a phase begins.
        path: a JSON file.
        limit: seconds that each phase may take (load, first step, the rest); past it the process ends with
            its stacks on stderr.
    """

    def __init__(self, workload: Workload, *, record: dict[str, Any], path: Path, limit: float):
        self.workload = workload
        self.record = record
        self.path = path
        self.limit = limit
        self.cuda = torch.cuda.is_available()
        self.done = 0
        self._marks: list[Any] = []
        self._losses: list[tuple[Tensor | float, Tensor | float]] = []
        self._phase("load")

    def loaded(self, weight: Tensor | None = None) -> None:
        """The model is on its device, with adapters: the clock of the first step starts.

        Args:
            weight: a frozen linear layer's, to see that the base is of the row's precision.

        Raises:
            RuntimeError: when it is not.
        """
        if weight is not None:
            self.record["base_weight"] = f"{type(weight).__name__} {weight.dtype}"
            plain = type(weight) is torch.nn.Parameter and weight.dtype == torch.bfloat16
            if plain != (self.record["base"] == "bf16"):
                raise RuntimeError(
                    f"the base was to be {self.record['base']}, it is {self.record['base_weight']}"
                )
        if self.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        self.record["load_s"] = self._now() - self._began
        self._phase("first step")

    def values(self, loss: Tensor | float, grad_norm: Tensor | float) -> None:
        """Mean loss and gradient norm (before clipping) of a step; they may stay on the device."""
        if len(self._losses) == 2:
            del self._losses[1]
        self._losses.append((loss, grad_norm))

    def step(self) -> None:
        """An optimizer step has been issued."""
        self.done += 1
        self._mark()
        if self.done == 1:
            self.record["first_step_s"] = self._now() - self._began
            self._phase("steps")
        if self.done == self.workload.warmup:
            self._timed_from = self._now()
        if self.done == self.workload.total_steps:
            self._timed_to = self._now()

    def finish(self) -> None:
        """Turn marks into numbers and write the record.

        Raises:
            RuntimeError: when a step is missing.
        """
        if self.done != self.workload.total_steps:
            raise RuntimeError(f"{self.done} of {self.workload.total_steps} steps were made")
        (first, last) = self._losses[0], self._losses[-1]
        millis = self._step_ms()[self.workload.warmup - 1 :]
        seconds = self._timed_to - self._timed_from
        self.record |= {
            "tokens_per_s": self.workload.step_tokens * self.workload.steps / seconds,
            "median_step_ms": statistics.median(millis),
            "step_ms": millis,
            "first_loss": float(first[0]), "first_grad_norm": float(first[1]),
            "last_loss": float(last[0]), "last_grad_norm": float(last[1]),
        }  # fmt: skip
        if self.cuda:
            self.record["allocated_gib"] = torch.cuda.max_memory_allocated() / 2**30
            self.record["reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
        self._phase("done")
        faulthandler.cancel_dump_traceback_later()

    def _phase(self, phase: str) -> None:
        self.record["phase"] = phase
        self.record["versions"] = versions()
        self.path.write_text(json.dumps(self.record))
        faulthandler.dump_traceback_later(self.limit, exit=True)
        self._began = self._now()

    def _now(self) -> float:
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def _mark(self) -> None:
        """Events keep the host from waiting between timed steps."""
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def _step_ms(self) -> list[float]:
        pairs = zip(self._marks, self._marks[1:], strict=False)
        return [a.elapsed_time(b) if self.cuda else 1e3 * (b - a) for a, b in pairs]


def versions() -> dict[str, str]:
    """Of the libraries that this process has imported."""
    installed = importlib.metadata.packages_distributions()  # a stub in sys.modules has no distribution
    names = [PACKAGES[module] for module in PACKAGES if module in sys.modules and module in installed]
    return {name: importlib.metadata.version(name) for name in names}
