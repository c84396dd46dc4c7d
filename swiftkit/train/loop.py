"""The training loop. There is one, and every method runs on it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from swiftkit.config import TrainKnobs
from swiftkit.data import Prepared
from swiftkit.engine import Batch, Engine, Loss, Sums
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
    """
    torch.manual_seed(knobs.seed)  # of the dropout
    optimizer = adamw(engine.parameters.values(), knobs)
    meter = Meter(engine.device)

    def judge(step: int) -> None:
        if evaluation is not None:
            with meter.paused():
                log.evaluation(evaluate(engine, evaluation, loss, plan=plan, pad_id=pad_id), step=step)

    judge(0)
    for index in range(plan.steps):
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
        if last or done == 1 or done % knobs.logging_steps == 0:
            epoch = min(done * plan.global_batch_size, plan.windows) / len(data.windows)
            log.training(meter.read(), step=done, epoch=epoch, learning_rate=rate)
        else:
            log.advance(done)
        if last or done % knobs.eval_steps == 0:
            judge(done)
        if last or done % knobs.save_steps == 0:
            with meter.paused():
                save(done)


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
