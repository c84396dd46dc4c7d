"""Step time and efficiency of a layout, and which layout wins.

What is taken to hide behind what:

- Gathers of a sharded model are prefetched one block ahead, and its gradients are scattered while the
  backward goes on; what is longer than the computation beside it is waited for, and so is the first block.
- Gradients of a whole model's copies are reduced during the backward of the last micro-batch.
- Adapter gradients travel in one bucket, when the backward is done: nothing hides them.
- Sums and gathers of tensor parallelism are waited for.
- Computation is not slowed down by communication beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swiftkit.errors import UserError
from swiftkit.plan.collectives import Traffic
from swiftkit.plan.compute import Compute, micro_batch, optimizer_step, undivided
from swiftkit.plan.job import SAVINGS, Cut, Job
from swiftkit.plan.layout import Layout, layouts
from swiftkit.plan.machine import Machine
from swiftkit.plan.memory import Memory, memory
from swiftkit.plan.shape import ModelShape
from swiftkit.plan.traffic import StepTraffic, step_traffic

USABLE = 0.92
"""Share of a GPU's memory that a plan fills: what is reserved is a little more than what is allocated."""


@dataclass(frozen=True)
class Prediction:
    """One layout's step.

    Args:
        layout: of all GPUs.
        cut: of a step, the fastest that fits (where none fits, the smallest).
        micro_batches: of a step.
        memory: bytes of one GPU.
        fits: whether that is at most `USABLE` of what it has.
        traffic: what one GPU sends in a step.
        compute: seconds of a step without communication.
        waiting: seconds of a step for communication that nothing hides.
        communication: seconds of a step for all of it, were nothing hidden.
        undivided: seconds of the same tokens on one GPU that had memory for everything.
        tokens: of a step, for each GPU.
    """

    layout: Layout
    cut: Cut
    micro_batches: int
    memory: Memory
    fits: bool
    traffic: Traffic
    compute: float
    waiting: float
    communication: float
    undivided: float
    tokens: int

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.compute + self.waiting

    @property
    def tokens_per_second(self) -> float:
        """For each GPU."""
        return self.tokens / self.seconds

    @property
    def efficiency(self) -> float:
        """Speed of a GPU beside that of one alone with memory for everything."""
        return self.undivided / self.seconds

    @property
    def efficiency_unhidden(self) -> float:
        """The same, were no communication hidden: the lower bound."""
        return self.undivided / (self.compute + self.communication)


def predict(shape: ModelShape, job: Job, machine: Machine, layout: Layout) -> Prediction:
    """The fastest step of a layout that fits.

    Args:
        shape: of the model.
        job: what is trained.
        machine: a node; more GPUs than it has are more of them.
        layout: of all GPUs.
    """
    tried = [_step(shape, job, machine, layout, cut) for cut in _cuts(job, layout)]
    fitting = [found for found in tried if found.fits]
    if fitting:
        return min(fitting, key=lambda found: (round(found.seconds, 4), found.micro_batches))
    return min(tried, key=lambda found: found.memory.total)


def _cuts(job: Job, layout: Layout) -> list[Cut]:
    """Micro-batches of whole windows that divide the step of a data-parallel group, with every saving."""
    windows = job.tokens_per_gpu * layout.tp // job.sequence
    sizes = [n for n in range(1, windows + 1) if windows % n == 0]
    # A weight that is gathered for each pass comes in one copy.
    one_copy = job.base == "fp8" and layout.shard > 1
    savings = [saving for saving in SAVINGS if not (one_copy and saving.two_copies)]
    return [Cut(n * job.sequence, saving) for n in sizes for saving in savings]


def _step(shape: ModelShape, job: Job, machine: Machine, layout: Layout, cut: Cut) -> Prediction:
    micro_batches = job.tokens_per_gpu * layout.tp // cut.micro_tokens
    room = memory(shape, job, layout, cut)
    compute = micro_batch(shape, job, machine, cut, tp=layout.tp)
    sent = step_traffic(shape, job, layout, cut, node=machine.gpus)
    whole = sent.step(micro_batches)
    waiting = micro_batches * _waited(sent, compute, machine, shape.layers)
    waiting += _waited_gradients(sent, compute, machine, job)
    parts = (sent.gather_forward, sent.gather_backward, sent.scatter, sent.tensor)
    communication = micro_batches * sum(part.seconds(machine) for part in parts)
    trained = job.trained(shape) / (layout.shard * layout.tp if job.tuner == "full" else 1)
    return Prediction(
        layout=layout,
        cut=cut,
        micro_batches=micro_batches,
        memory=room,
        fits=room.total <= USABLE * machine.memory,
        traffic=whole,
        compute=micro_batches * compute.total + optimizer_step(trained, machine),
        waiting=waiting,
        communication=communication + sent.gradients.seconds(machine),
        undivided=undivided(shape, job, machine),
        tokens=job.tokens_per_gpu,
    )


def _waited(sent: StepTraffic, compute: Compute, machine: Machine, layers: int) -> float:
    """Seconds of one micro-batch that nothing hides."""
    waited = sent.tensor.seconds(machine)
    beside = (layers - 1) / layers  # the first block's weights come before anything can be computed
    for traffic, seconds in (
        (sent.gather_forward, compute.forward),
        (sent.gather_backward + sent.scatter, compute.backward),
    ):
        waited += max(traffic.seconds(machine) - beside * seconds, traffic.seconds(machine) / layers)
    return waited


def _waited_gradients(sent: StepTraffic, compute: Compute, machine: Machine, job: Job) -> float:
    seconds = sent.gradients.seconds(machine)
    return max(0.0, seconds - compute.backward) if job.tuner == "full" else seconds


def compare(shape: ModelShape, job: Job, machine: Machine, gpus: int) -> list[Prediction]:
    """Every layout of so many GPUs, the best first; those that do not fit come last.

    Raises:
        UserError: for a number of GPUs that fills no whole nodes.
    """
    found = [predict(shape, job, machine, layout) for layout in layouts(shape, gpus, node=machine.gpus)]
    return sorted(found, key=lambda one: (not one.fits, one.seconds if one.fits else one.memory.total))


def best(shape: ModelShape, job: Job, machine: Machine, gpus: int) -> Prediction:
    """The fastest layout of so many GPUs.

    Raises:
        UserError: where none fits, with what the smallest would need.
    """
    found = compare(shape, job, machine, gpus)[0]
    if not found.fits:
        raise UserError(
            f"{shape.name} does not fit on {gpus} GPUs of {machine.memory / 2**30:.0f} GiB: "
            f"{found.layout.name} would need {found.memory.total / 2**30:.0f} GiB on each; take more GPUs"
            + ("" if job.tuner == "lora" else ", or train an adapter (--tuner_type lora)")
        )
    return found


def why(ranked: Sequence[Prediction]) -> str:
    """One sentence: what the winner has over the best layout of each other kind.

    Args:
        ranked: what `compare` gave.
    """
    first = ranked[0]
    if not first.fits:
        return f"none fits: {first.layout.name} would need {first.memory.total / 2**30:,.0f} GiB"
    others: dict[str, Prediction] = {}
    for one in ranked[1:]:
        others.setdefault(kind(one.layout), one)
    others.pop(kind(first.layout), None)
    reasons = [
        f"{name} takes {1e3 * one.seconds:,.0f} and waits {1e3 * one.waiting:,.0f}"
        if one.fits
        else f"{name} needs {one.memory.total / 2**30:,.0f} GiB"
        for name, one in others.items()
    ]
    lead = f"takes {1e3 * first.seconds:,.0f} ms and waits {1e3 * first.waiting:,.0f} of them"
    return "; ".join([lead, *reasons])


def kind(layout: Layout) -> str:
    """A layout's name without its numbers."""
    parts = ["tp"] if layout.tp > 1 else []
    if layout.shard > 1:
        parts.append("hsdp" if layout.replicate > 1 else "fsdp")
    elif layout.replicate > 1:
        parts.append("ddp")
    return " x ".join(parts) or "one GPU"
