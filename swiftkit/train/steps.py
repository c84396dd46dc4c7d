"""How many optimizer steps a run has, and which windows each of them takes: known before the first one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from swiftkit.config import TrainKnobs
from swiftkit.data import HostBatch, Trainable, windows_of_run, windows_of_step
from swiftkit.errors import UserError
from swiftkit.parallel.world import ALONE, World, dealt

DEFAULT_GLOBAL_BATCH = 8
FEWEST_STEPS = 50
ROW_MULTIPLE = 128  # of tokens: tiles of the kernels
TOKENS_AT_ONCE = {"cuda": 16_384, "cpu": 4_096}


@dataclass(frozen=True)
class StepPlan:
    """The whole run in numbers.

    Args:
        steps: optimizer steps.
        global_batch_size: windows a step.
        micro_batch_size: windows that go through the model at once, on each rank.
        windows: windows over the whole run; the last step may be smaller.
        tokens: of a micro-batch of the longest windows, padding included.
        pad_to: tokens of every micro-batch, padding included, so that compiled layers see one shape; None
            where nothing is compiled and padding would only cost.
        pad_multiple: else micro-batches are padded to its next multiple, in tokens; None is no padding.
        note: why a step is smaller than usual, or an empty string.
        ranks: that the windows of a step are dealt to; the step's windows do not depend on them.
    """

    steps: int
    global_batch_size: int
    micro_batch_size: int
    windows: int
    tokens: int
    pad_to: int | None = None
    pad_multiple: int | None = None
    note: str = ""
    ranks: int = 1

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches a step, on the rank that has most windows."""
        return math.ceil(math.ceil(self.global_batch_size / self.ranks) / self.micro_batch_size)


def plan_steps(
    knobs: TrainKnobs,
    *,
    num_windows: int,
    max_length: int,
    device_type: str,
    fixed_length: bool = False,
    lengths: Sequence[int] = (),
    ranks: int = 1,
    tokens_at_once: int | None = None,
) -> StepPlan:
    """Turn batch sizes, epochs and `max_steps` into a number of steps.

    Args:
        knobs: sizes and lengths as asked for.
        num_windows: of the data set.
        max_length: tokens of a window at most.
        device_type: cuda or cpu.
        fixed_length: every micro-batch is as long as the longest can be.
        lengths: tokens of each window; without them all count as full.
        ranks: that a step's windows are dealt to.
        tokens_at_once: that a micro-batch may have, where no size is given; None goes by the device.

    Raises:
        UserError: when the batch sizes do not agree.
    """
    check_batch_sizes(knobs, ranks)
    windows = windows_of_run(num_windows, knobs.num_train_epochs)
    # A small data set gets smaller steps, for FEWEST_STEPS of them; where their number is given, a step only
    # takes no window twice.
    whole, note = _global_batch(knobs, num_windows if knobs.max_steps > 0 else windows // FEWEST_STEPS, ranks)
    steps = math.ceil(windows / whole)
    if knobs.max_steps > 0:
        steps, windows = knobs.max_steps, knobs.max_steps * whole
    if fixed_length or not lengths:
        lengths = [max_length] * whole
    longest = sorted(lengths, reverse=True)
    # A data set of fewer windows than a step comes more than once in it.
    longest += longest[:1] * (whole - len(longest))
    room = tokens_at_once or TOKENS_AT_ONCE[device_type]
    micro = _micro_batch(knobs, math.ceil(whole / ranks), longest, room)
    multiple = ROW_MULTIPLE if device_type == "cuda" or fixed_length else 1
    tokens = _round_up(sum(longest[:micro]), multiple)
    return StepPlan(
        steps,
        whole,
        micro,
        windows,
        tokens,
        pad_to=tokens if fixed_length else None,
        pad_multiple=None if fixed_length or multiple == 1 else multiple,
        note="; ".join(filter(None, [note, _idle(whole, ranks)])),
        ranks=ranks,
    )


def _round_up(tokens: int, multiple: int) -> int:
    return math.ceil(tokens / multiple) * multiple


def _micro_batch(knobs: TrainKnobs, whole: int, longest: Sequence[int], room: int) -> int:
    """Windows at once, of the `whole` of a rank.

    On auto as many of the longest as there is room for (in tokens), so that no others are too many.
    """
    if knobs.per_device_train_batch_size != "auto":
        return knobs.per_device_train_batch_size
    if knobs.gradient_accumulation_steps != "auto":
        return math.ceil(whole / knobs.gradient_accumulation_steps)
    fitting = sum(tokens <= room for tokens in accumulate(longest))
    return max(size for size in range(1, whole + 1) if whole % size == 0 and size <= max(1, fitting))


def _global_batch(knobs: TrainKnobs, most: int, ranks: int) -> tuple[int, str]:
    """Windows a step, at most `most` where nobody asked for a number; and a word where that is few."""
    whole, micro, times = (
        knobs.global_batch_size, knobs.per_device_train_batch_size, knobs.gradient_accumulation_steps
    )  # fmt: skip
    if whole != "auto":
        return whole, ""
    if micro != "auto" and times != "auto":
        return micro * times * ranks, ""
    unit = micro if micro != "auto" else times if times != "auto" else 1
    usual = max(DEFAULT_GLOBAL_BATCH, unit) // unit * unit
    small = max(1, most // unit) * unit
    if small >= usual:
        return usual, ""
    return small, f"a step takes {small} instead of {usual} windows, as the data set is small"


def check_batch_sizes(knobs: TrainKnobs, ranks: int) -> None:
    """Refuse three sizes that do not make up one step over these processes.

    Raises:
        UserError: naming them.
    """
    whole, micro, times = (
        knobs.global_batch_size, knobs.per_device_train_batch_size, knobs.gradient_accumulation_steps
    )  # fmt: skip
    if whole == "auto" or micro == "auto" or times == "auto" or whole == micro * times * ranks:
        return
    over = f" x {ranks} processes" if ranks > 1 else ""
    raise UserError(
        f"--global_batch_size {whole} is not --per_device_train_batch_size {micro} x "
        f"--gradient_accumulation_steps {times}{over}; leave one of the three on auto"
    )


def _idle(whole: int, ranks: int) -> str:
    if whole >= ranks:
        return ""
    return (
        f"a step has {whole} windows for {ranks} processes, so that {ranks - whole} have nothing to do in it"
    )


def microbatches_of_step(
    data: Trainable, plan: StepPlan, *, step: int, seed: int, pad_id: int, world: World = ALONE
) -> list[HostBatch]:
    """This rank's packed micro-batches of one step (counted from 0).

    The step's windows are a function of the step alone; they are dealt to the ranks one by one. In a last,
    smaller step a rank may get none.
    """
    indices = windows_of_step(
        data.num_windows, plan.global_batch_size, seed=seed, step=step, limit=plan.windows
    )
    return list(_collated(data, dealt(indices, world), plan, pad_id))


def evaluation_batches(
    data: Trainable, plan: StepPlan, *, pad_id: int, world: World = ALONE
) -> Iterator[HostBatch]:
    """This rank's share of the windows, in order: every window once over all ranks."""
    return _collated(data, dealt(range(data.num_windows), world), plan, pad_id)


def evaluation_rounds(data: Trainable, plan: StepPlan) -> int:
    """Batches of the rank that has most of an evaluation."""
    return math.ceil(math.ceil(data.num_windows / plan.ranks) / plan.micro_batch_size)


def _collated(data: Trainable, indices: list[int], plan: StepPlan, pad_id: int) -> Iterator[HostBatch]:
    size = plan.micro_batch_size
    for start in range(0, len(indices), size):
        some = indices[start : start + size]
        pad_to = plan.pad_to
        if plan.pad_multiple is not None:
            pad_to = _round_up(data.tokens_of(some), plan.pad_multiple)
        yield data.collate(some, pad_id=pad_id, pad_to=pad_to)
