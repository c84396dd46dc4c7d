"""Guards of the step: a harmful update is held back, and a tensor that would learn nothing is named."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from swiftkit.config import TrainKnobs
from swiftkit.data import Document, Trainable, windows_of_step
from swiftkit.errors import UserError
from swiftkit.parallel.collectives import Ranks
from swiftkit.train.optim import peak_rate
from swiftkit.train.state import StateDict
from swiftkit.train.steps import StepPlan

BAD_BATCHES = "bad_batches.jsonl"
RECENT = 32  # losses whose median a leap is measured against
FEWEST = 8  # of them, before anything counts as a leap
ROWS_NAMED = 3
MOST_IN_A_ROW = 25  # held steps, after which skipping them is given up


class StepGuard:
    """Holds an update back where loss or gradient norm is not finite, or the loss leaps.

    The decision falls on the device. Parameters, moments and step counts of a held step stay as they are:
    fused AdamW takes the flag as `found_inf`; for another optimizer the host reads the flag (on a CPU there
    is nothing to wait for).

    Args:
        optimizer: of the trained tensors.
        device: where losses are.
        spike_factor: a loss of more than this many times the median of the last steps is held; 0 is never.
        on_update: called before the update, when the gradients are there.
        ranks: that have parts of the trained tensors; None where these are whole.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        device: torch.device,
        spike_factor: float = 0.0,
        on_update: Callable[[], None] = lambda: None,
        ranks: Ranks | None = None,
    ):
        self._optimizer, self._on_update, self._ranks = optimizer, on_update, ranks
        self._on_device = bool(optimizer.defaults.get("fused"))
        self._factor = spike_factor
        self._recent = torch.full((RECENT,), math.nan, dtype=torch.float64, device=device)
        self._gradients: tuple[list[str], Tensor] | None = None
        self.held = torch.zeros((), dtype=torch.bool, device=device)  # whether the last update was
        self.looking = False  # whether `look` notes anything

    def look(self, parameters: Mapping[str, Tensor]) -> None:
        """Note the norms of all gradients and trained tensors, on the device, in the first steps."""
        if not self.looking:
            return
        values = list(parameters.values())
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in values]
        norms = torch.stack([*torch._foreach_norm(gradients), *torch._foreach_norm(values)]).detach()
        if self._ranks is not None:  # one rank's words of the vocabulary may not be in a step's rows
            norms = self._ranks.max(norms)
        self._gradients = list(parameters), norms.view(2, -1)

    def check(self, *, step: int) -> None:
        """Read what was noted: every trained tensor has a gradient, as soon as its partner is not zero.

        lora_B starts at zero, so that lora_A follows one step behind it. A held step says nothing.

        Raises:
            UserError: naming the tensors that have none.
        """
        if self._gradients is None or bool(self.held):
            return
        names, norms = self._gradients
        gradients, sizes = (dict(zip(names, row, strict=True)) for row in norms.tolist())
        dead = [name for name in names if gradients[name] == 0 and sizes.get(_partner(name), 1.0) != 0]
        if dead:
            others = f" and {len(dead) - 1} more tensors" if len(dead) > 1 else ""
            raise UserError(
                f"step {step}: no gradient reaches {dead[0]}{others}: the loss does not depend on it, and it "
                "would never be trained; leave that layer out of --target_modules"
            )

    def update(self, loss: Tensor, norm: Tensor) -> None:
        """Take the optimizer's step, or hold it back.

        Args:
            loss: mean of the step, a scalar.
            norm: of the gradients before clipping, a scalar.
        """
        self._on_update()
        held = ~(loss.isfinite() & norm.isfinite())
        if self._factor > 0:
            known = self._recent.isfinite().sum() >= FEWEST
            held = held | (known & (loss > self._factor * self._recent.nanmedian()))
            newest = torch.where(held, math.nan, loss.double())
            self._recent = torch.cat([self._recent[1:], newest[None]])
        self.held = held
        if self._on_device:
            self._optimizer.found_inf = held.float()  # type: ignore[attr-defined]
            self._optimizer.step()
        elif not bool(held):
            self._optimizer.step()

    def state_dict(self) -> StateDict:
        """The recent losses."""
        return {"recent": self._recent}

    def load_state_dict(self, state: StateDict) -> None:
        """Go on with them."""
        self._recent = state["recent"].to(self._recent.device)


def _partner(name: str) -> str:
    """The other factor of an adapter; the name itself where there is none."""
    owner, _, leaf = name.rpartition(".")
    other = {"lora_A": "lora_B", "lora_B": "lora_A"}.get(leaf)
    return f"{owner}.{other}" if other else ""


@dataclass(frozen=True)
class BadStep:
    """A step whose update was held back.

    Args:
        step: counted from 1.
        loss, grad_norm: as they came out.
    """

    step: int
    loss: float
    grad_norm: float

    def __str__(self) -> str:
        if math.isfinite(self.loss) and math.isfinite(self.grad_norm):
            return f"loss leaps to {self.loss:.4f}"
        name = "grad_norm" if math.isfinite(self.loss) else "loss"
        return f"{name} is {getattr(self, name)}"


@dataclass(frozen=True)
class Reading:
    """What happened since the last log line.

    Args:
        step: the last one, counted from 1.
        taken: how many steps were taken.
        values: means over them, the last gradient norm, rate and memory.
        bad: the steps that were held back.
    """

    step: int
    taken: int
    values: dict[str, float]
    bad: list[BadStep]


class BadBatches:
    """Writes the rows of held steps to the run's `bad_batches.jsonl`.

    Args:
        folder: the run folder, or None to write nothing.
        data: where the rows are.
        plan, seed: they say which rows a step takes.
    """

    def __init__(self, folder: Path | None, data: Trainable, *, plan: StepPlan, seed: int):
        self._folder, self._data, self._plan, self._seed = folder, data, plan, seed

    def record(self, steps: Sequence[BadStep]) -> None:
        """Add a line for each step: what was wrong, and file, line and tokens of its rows."""
        if self._folder is None:
            return
        path = self._folder / BAD_BATCHES
        before = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        # A resumed run comes by the same steps again.
        kept = [line for line in before if json.loads(line)["step"] < steps[0].step]
        lines = [json.dumps(self._line(bad), ensure_ascii=False) for bad in steps]
        path.write_text("".join(f"{line}\n" for line in [*kept, *lines]), encoding="utf-8")

    def _line(self, bad: BadStep) -> dict[str, Any]:
        return {
            "step": bad.step,
            "why": str(bad),
            "loss": str(bad.loss),  # as text: JSON has no words for nan and inf
            "grad_norm": str(bad.grad_norm),
            "rows": [{"row": str(d.origin), "ids": d.ids.tolist()} for d in self._documents(bad.step)],
        }

    def describe(self, bad: BadStep) -> str:
        """The rows of a step, the first few by file and line."""
        rows = [str(document.origin) for document in self._documents(bad.step)]
        named = ", ".join(rows[:ROWS_NAMED])
        more = f" and {len(rows) - ROWS_NAMED} more" if len(rows) > ROWS_NAMED else ""
        where = "" if self._folder is None else f" (all in {self._folder / BAD_BATCHES})"
        return f"its rows are {named}{more}{where}"

    def _documents(self, step: int) -> list[Document]:
        indices = windows_of_step(
            self._data.num_windows,
            self._plan.global_batch_size,
            seed=self._seed,
            step=step - 1,
            limit=self._plan.windows,
        )
        return [document for index in indices for document in self._data.window(index)]


class Watch:
    """Looks at the numbers that a log line shows, and ends a run whose numbers are not finite any more.

    Args:
        knobs: what follows a held step, and what the mend names.
        bad_batches: takes the rows of held steps.
        say: takes sentences for people.
    """

    def __init__(self, knobs: TrainKnobs, bad_batches: BadBatches, say: Callable[[str], None]):
        self._knobs, self._bad_batches, self._say = knobs, bad_batches, say
        self._last: tuple[float, int] | None = None  # loss, step
        self._in_a_row = 0

    def look(self, reading: Reading) -> None:
        """Report the held steps, and take in the loss.

        Raises:
            UserError: naming a held step, its rows and the mend, unless held steps are to be skipped.
        """
        if reading.bad:
            self._bad_batches.record(reading.bad)
        self._in_a_row = 0 if reading.taken else self._in_a_row + len(reading.bad)
        for bad in reading.bad:
            rows = self._bad_batches.describe(bad)
            if self._knobs.on_bad_loss == "stop":
                raise self.error(str(bad), step=bad.step, rows=rows)
            self._say(f"warning   step {bad.step}: {bad}, so its update was held back; {rows}")
        if self._in_a_row >= MOST_IN_A_ROW:
            raise self.error(f"{self._in_a_row} updates in a row were held back", step=reading.step)
        if reading.taken:
            self._last = reading.values["loss"], reading.step

    def conclude(self, *, step: int) -> None:
        """The run is over.

        Raises:
            UserError: when not one of its updates was taken.
        """
        if self._last is None:
            raise self.error("every update was held back", step=step)

    def check(self, values: Mapping[str, float], *, step: int) -> None:
        """Look at an evaluation.

        Raises:
            UserError: when it is not finite.
        """
        odd = next((name for name, value in values.items() if not math.isfinite(value)), None)
        if odd is not None:
            raise self.error(f"{odd} is {values[odd]}", step=step)

    def error(self, what: str, *, step: int, rows: str = "") -> UserError:
        """What to say when something is not finite: the step, the last finite loss, the mend, the rows."""
        rows = f"; {rows}" if rows else ""
        if self._last is None:
            return UserError(
                f"step {step}: {what} before anything was trained: the model's weights are damaged, or too "
                "large for this precision; try --base_precision bf16 or fp32, or download the model "
                f"again{rows}"
            )
        (loss, at), knobs = self._last, self._knobs
        return UserError(
            f"step {step}: {what}, training has diverged (last finite loss {loss:.4f} at step {at}); "
            f"lower --learning_rate ({peak_rate(knobs):g}), raise --warmup_ratio "
            f"({knobs.warmup_ratio:g}), clip to a smaller --max_grad_norm ({knobs.max_grad_norm:g}), or pass "
            f"over such steps with --on_bad_loss skip{rows}"
        )

    def state_dict(self) -> StateDict:
        """The last finite loss."""
        return {"last": self._last, "in_a_row": self._in_a_row}

    def load_state_dict(self, state: StateDict) -> None:
        """Go on from there."""
        self._last = None if state["last"] is None else tuple(state["last"])
        self._in_a_row = state["in_a_row"]
