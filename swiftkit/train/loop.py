"""The training loop. There is one, and every method runs on it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from swiftkit.config import TrainKnobs
from swiftkit.data import Prepared
from swiftkit.engine import Batch, Engine, Loss, Sums
from swiftkit.errors import UserError
from swiftkit.train.log import Log
from swiftkit.train.optim import adamw, clip_gradients, learning_rate
from swiftkit.train.steps import StepPlan, evaluation_batches, microbatches_of_step

Save = Callable[[int], None]


def fit(
    engine: Engine,
    data: Prepared,
    loss: Loss,
    *,
    knobs: TrainKnobs,
    plan: StepPlan,
    log: Log,
    save: Save,
    pad_id: int,
    evaluation: Prepared | None = None,
) -> None:
    """Train for `plan.steps` optimizer steps.

    Args:
        engine: the model; its parameters change.
        data: packed windows.
        loss: the method's loss; its denominator is the number of trained tokens of the step.
        knobs: rates, intervals, seed.
        plan: from `plan_steps`.
        log: takes the metrics.
        save: called with the number of finished steps when a checkpoint is due.
        pad_id: the padding token's id.
        evaluation: windows to evaluate on, before the first step, every `eval_steps`, and at the end.

    Raises:
        UserError: when a loss, a gradient norm or the adapter is not finite, before that is logged or saved.
    """
    torch.manual_seed(knobs.seed)  # of the dropout
    optimizer = adamw(engine.parameters.values(), knobs)
    meter = Meter(engine.device)
    watch = Watch(knobs)
    progress = Progress(optimizer, save, watch)

    def judge(step: int) -> None:
        if evaluation is not None:
            with meter.paused():
                values = evaluate(engine, evaluation, loss, plan=plan, pad_id=pad_id)
            watch.check(values, step=step)
            log.evaluation(values, step=step)

    def train(index: int) -> None:
        packed = microbatches_of_step(data, plan, step=index, seed=knobs.seed, pad_id=pad_id)
        rate = learning_rate(index, plan.steps, knobs)
        sums, norm = step(
            engine,
            [Batch.of(p, device=engine.device) for p in packed],
            loss,
            optimizer,
            denominator=sum(p.trained_tokens for p in packed),
            rate=rate,
            max_norm=knobs.max_grad_norm,
        )
        meter.add(
            sums, norm, tokens=sum(p.tokens for p in packed), trained=sum(p.trained_tokens for p in packed)
        )
        done, last = index + 1, index + 1 == plan.steps
        progress.finished(done)
        if last or done == 1 or done % knobs.logging_steps == 0:
            epoch = min(done * plan.global_batch_size, plan.windows) / len(data.windows)
            values = meter.read()
            watch.check(values, step=done)
            log.training(values, step=done, epoch=epoch, learning_rate=rate)
        else:
            log.advance(done)
        if last or done % knobs.eval_steps == 0:
            judge(done)
        if last or done % knobs.save_steps == 0:
            with meter.paused():
                progress.save()

    judge(0)
    with progress.kept_when_interrupted():
        for index in range(plan.steps):
            train(index)


def step(
    engine: Engine,
    microbatches: list[Batch],
    loss: Loss,
    optimizer: torch.optim.Optimizer,
    *,
    denominator: int,
    rate: float,
    max_norm: float,
) -> tuple[Sums, Tensor]:
    """One optimizer step; returns the loss's sums and the gradient norm before clipping, on the device."""
    sums = engine.forward_backward(microbatches, loss, denominator=denominator)
    norm = clip_gradients(engine.parameters.values(), max_norm)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return sums, norm


def evaluate(engine: Engine, data: Prepared, loss: Loss, *, plan: StepPlan, pad_id: int) -> dict[str, float]:
    """Mean loss a trained token, and its perplexity."""
    batches = list(evaluation_batches(data, plan, pad_id=pad_id))
    sums = engine.evaluate((Batch.of(b, device=engine.device) for b in batches), loss)
    mean = float(sums["loss"]) / sum(b.trained_tokens for b in batches)
    return {"eval_loss": mean, "eval_perplexity": math.exp(min(mean, 700.0))}


@dataclass
class Watch:
    """Ends a run whose numbers are not finite any more: nothing that follows would be of use.

    Args:
        knobs: named in the mend.
    """

    knobs: TrainKnobs
    _last: tuple[float, int] | None = None  # loss, step

    def check(self, values: Mapping[str, float], *, step: int) -> None:
        """Look at the metrics of a step.

        Raises:
            UserError: naming the step, the last finite loss and the mend.
        """
        odd = next((name for name, value in values.items() if not math.isfinite(value)), None)
        if odd is not None:
            raise self.error(f"{odd} is {values[odd]}", step=step)
        if "loss" in values:
            self._last = values["loss"], step

    def error(self, what: str, *, step: int) -> UserError:
        """What to say when something is not finite."""
        if self._last is None:
            return UserError(
                f"step {step}: {what} before anything was trained: the model's weights are damaged, or too "
                "large for this precision; try --base_precision bf16 or fp32, or download the model again"
            )
        (loss, at), knobs = self._last, self.knobs
        return UserError(
            f"step {step}: {what}, training has diverged (last finite loss {loss:.4f} at step {at}); "
            f"lower --learning_rate ({knobs.learning_rate:g}), raise --warmup_ratio "
            f"({knobs.warmup_ratio:g}), or clip to a smaller --max_grad_norm ({knobs.max_grad_norm:g})"
        )


class Progress:
    """What is finished, and what of it is on disk.

    Args:
        optimizer: of the trained tensors.
        save: writes a checkpoint of them.
        watch: says what to do where they are not finite.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, save: Save, watch: Watch):
        self._optimizer, self._save, self._watch = optimizer, save, watch
        self._parameters: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
        self._finished = self._saved = 0

    def finished(self, step: int) -> None:
        """The parameters are those after `step` steps."""
        self._finished = step

    def save(self) -> None:
        """Write a checkpoint of the finished steps.

        Raises:
            UserError: when the parameters are not finite.
        """
        if not self._finite():
            raise self._watch.error("the adapter is not finite", step=self._finished)
        self._save(self._finished)
        self._saved = self._finished

    @contextmanager
    def kept_when_interrupted(self) -> Iterator[None]:
        """On Ctrl-C, save the finished steps, unless it came amid or behind an update of the next one."""
        try:
            yield
        except KeyboardInterrupt:
            if self._finished > self._saved and self._untouched() and self._finite():
                self._save(self._finished)
            raise

    def _untouched(self) -> bool:
        """Whether no update came after the finished steps; AdamW counts before it writes."""
        counts = (state["step"] for state in self._optimizer.state.values())
        return all(int(count) == self._finished for count in counts)

    @torch.no_grad()
    def _finite(self) -> bool:
        return bool(torch.stack(torch._foreach_norm(self._parameters)).isfinite().all())


@dataclass
class Meter:
    """Sums between two log lines. They stay on the device until a line is due."""

    device: torch.device
    _sums: Sums = field(default_factory=dict)
    _norm: Tensor | None = None
    _tokens: int = 0
    _trained: int = 0
    _since: float = field(default_factory=time.perf_counter)

    def add(self, sums: Sums, norm: Tensor, *, tokens: int, trained: int) -> None:
        """Take in one step."""
        for name, value in sums.items():
            self._sums[name] = self._sums[name] + value if name in self._sums else value
        self._norm = norm
        self._tokens += tokens
        self._trained += trained

    def read(self) -> dict[str, float]:
        """Means over the steps since the last line (the gradient norm is the last step's), and start anew."""
        values = {
            name: float(value) / self._trained for name, value in self._sums.items()
        }  # waits for the device
        assert self._norm is not None
        values["grad_norm"] = float(self._norm)
        values["tokens_per_second"] = self._tokens / (time.perf_counter() - self._since)
        if self.device.type == "cuda":
            values["memory_allocated_gib"] = torch.cuda.max_memory_allocated(self.device) / 2**30
            values["memory_reserved_gib"] = torch.cuda.max_memory_reserved(self.device) / 2**30
        self._sums, self._tokens, self._trained = {}, 0, 0
        self._since = time.perf_counter()
        return values

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time of an evaluation or a checkpoint out of the rate."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        start = time.perf_counter()
        yield
        self._since += time.perf_counter() - start
