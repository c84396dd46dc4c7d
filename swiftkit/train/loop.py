"""The training loop. There is one, and every method runs on it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack

import torch
from torch import Tensor

from swiftkit.config import TrainKnobs
from swiftkit.data import HostBatch, PackedBatch, Trainable
from swiftkit.engine import Batch, Engine, Loss, Sums
from swiftkit.parallel.standings import Standings
from swiftkit.parallel.world import ALONE, World, seed_of_step
from swiftkit.train.guards import BadBatches, StepGuard, Watch
from swiftkit.train.judge import Judge
from swiftkit.train.keeper import Best, Keeper
from swiftkit.train.log import Log
from swiftkit.train.meter import Meter
from swiftkit.train.optim import adamw, clip_gradients, learning_rate, set_rate
from swiftkit.train.state import OptimizerState, RandomState, Stateful, TrainingState
from swiftkit.train.steps import StepPlan, evaluation_batches, evaluation_rounds, microbatches_of_step
from swiftkit.train.stop import Stop, Stopped, stop_by_signal
from swiftkit.train.watchdog import Watchdog

FIRST_STEPS = 2  # after which every tensor that can be trained has had a gradient


def fit(
    engine: Engine,
    data: Trainable,
    loss: Loss,
    *,
    knobs: TrainKnobs,
    plan: StepPlan,
    log: Log,
    pad_id: int,
    evaluation: Trainable | None = None,
    keeper: Keeper | None = None,
    world: World = ALONE,
) -> None:
    """Train for `plan.steps` optimizer steps, or what a resumed run has left of them.

    Args:
        engine: the model; its parameters change.
        data: packed windows.
        loss: the method's loss; its denominator is that of the step's batches: trained tokens, or rows.
        knobs: rates, intervals, seed.
        plan: from `plan_steps`.
        log: takes the metrics.
        pad_id: the padding token's id.
        evaluation: windows to evaluate on, before the first step, every `eval_steps`, and at the end.
        keeper: writes checkpoints, and has the one to go on from; None keeps nothing.
        world: the processes of the run, each of which calls this with the same arguments.

    Raises:
        UserError: when training diverges, a tensor gets no gradient, or a checkpoint cannot be written.
        KeyboardInterrupt, Terminated: when a signal stopped it; the finished steps are saved then.
    """
    torch.manual_seed(knobs.seed)  # of the dropout
    with ExitStack() as around:
        stop = around.enter_context(stop_by_signal(quiet=not world.first))
        watchdog = around.enter_context(
            Watchdog(
                knobs.hang_timeout,
                log.say,
                standings=None if world.size == 1 else Standings(world.rank, world.size),
                folder=None if keeper is None else keeper.folder,
            )
        )
        if keeper is not None:
            around.enter_context(keeper)
        run = _Run(
            engine, data, loss, knobs=knobs, plan=plan, log=log, pad_id=pad_id, evaluation=evaluation,
            keeper=keeper, stop=stop, watchdog=watchdog, world=world,
        )  # fmt: skip
        try:
            run.begin()
            while not run.finished:
                run.train_step()
                run.look_after()
        except Stopped:
            run.save()
    world.wait()  # what is to be saved is saved
    stop.exit()
    run.end()


def step(
    engine: Engine,
    microbatches: list[Batch],
    loss: Loss,
    optimizer: torch.optim.Optimizer,
    *,
    denominator: int,
    rate: float,
    max_norm: float,
    guard: StepGuard | None = None,
    world: World = ALONE,
) -> tuple[Sums, Tensor]:
    """One optimizer step; returns the loss's sums and the gradient norm before clipping, on the device.

    Nothing is read back from the device. Without a guard every update is taken. The denominator is that of
    all ranks: then gradients and sums are added up, and every rank takes or holds back the same update.
    """
    sums = engine.forward_backward(microbatches, loss, denominator=denominator)
    world.sum_gradients(engine.unsummed)
    sums = world.sum_named(sums, engine.device)
    if guard is not None:
        guard.look(engine.parameters)
    norm = engine.gradient_norm()
    clip_gradients(engine.parameters.values(), norm, max_norm)
    set_rate(optimizer, rate)
    if guard is None:
        optimizer.step()
    else:
        guard.update(sums["loss"] / denominator, norm)
    optimizer.zero_grad(set_to_none=True)
    return sums, norm


def evaluate(
    engine: Engine, batches: Iterable[HostBatch], loss: Loss, *, world: World = ALONE
) -> dict[str, float]:
    """The means of the loss's sums over the batches of all ranks; over trained tokens, its perplexity too."""
    counted, by_token = 0, False

    def sent() -> Iterator[Batch]:
        nonlocal counted, by_token
        for packed in batches:
            counted += packed.denominator
            by_token = isinstance(packed, PackedBatch)
            yield Batch.of(packed, device=engine.device)

    sums = world.sum_named(engine.evaluate(sent(), loss), engine.device)
    counted, by_tokens = world.totals(*world.of_rows(counted, int(by_token)))
    values = {f"eval_{name}": float(value) / counted for name, value in sums.items()}
    if by_tokens:
        values["eval_perplexity"] = math.exp(min(values["eval_loss"], 700.0))
    return values


class _Run:
    """What `fit` goes over: everything that one run is made of, and what is due when."""

    def __init__(
        self,
        engine: Engine,
        data: Trainable,
        loss: Loss,
        *,
        knobs: TrainKnobs,
        plan: StepPlan,
        log: Log,
        pad_id: int,
        evaluation: Trainable | None,
        keeper: Keeper | None,
        stop: Stop,
        watchdog: Watchdog,
        world: World,
    ):
        self._engine, self._data, self._loss, self._knobs, self._plan = engine, data, loss, knobs, plan
        self._log, self._pad_id, self._evaluation, self._keeper = log, pad_id, evaluation, keeper
        self._stop, self._watchdog, self._world = stop, watchdog, world
        self._optimizer = adamw(engine.parameters, knobs)
        self._guard = StepGuard(
            self._optimizer,
            device=engine.device,
            spike_factor=knobs.loss_spike_factor,
            on_update=lambda: self._enter("update"),
            ranks=None if engine.cut is None else engine.cut.ranks,
        )
        self._meter, self._judge = Meter(engine.device), Judge.of(knobs)
        folder = None if keeper is None or not keeper.writes else keeper.folder
        self._watch = Watch(knobs, BadBatches(folder, data, plan=plan, seed=knobs.seed), log.say)
        parts: dict[str, Stateful] = {
            "optimizer": OptimizerState(self._optimizer, engine.parameters),
            "random": RandomState(engine.device),
            "guard": self._guard,
            "meter": self._meter,
            "judge": self._judge,
            "watch": self._watch,
        }
        self._state = TrainingState(engine.parameters, parts, engine.cut, engine.parts)

    @property
    def finished(self) -> bool:
        """Whether all steps are done, or more of them bring nothing."""
        return self._state.step >= self._plan.steps or self._judge.gives_up

    def begin(self) -> None:
        """Put a checkpoint back, refuse what will not fit on the disk, and make up a missing evaluation."""
        if self._keeper is not None:
            if self._keeper.resumed is not None:
                self._state.restore(self._keeper.resumed)
                self._keeper.name_best(self._best())  # of this step, whatever a crash left
            self._keeper.check_space(self._state, self._optimizer, saves=self._saves_to_come())
        done = self._state.step
        missing = self._judge.evaluated < done  # a signal came while it was made
        if missing and (done == 0 or self._due(self._knobs.eval_steps)) and self._evaluate():
            self.save()

    def train_step(self) -> None:
        """One optimizer step over its rows, which are a function of the step alone."""
        index, knobs = self._state.step, self._knobs
        self._enter("data")
        world = self._world
        packed = microbatches_of_step(
            self._data, self._plan, step=index, seed=knobs.seed, pad_id=self._pad_id, world=world
        )
        counted, tokens = self._stop.agree(
            world, sum(p.denominator for p in packed), sum(p.tokens for p in packed)
        )
        if world.data_size > 1:
            torch.manual_seed(
                seed_of_step(knobs.seed, step=index, rank=world.data_rank, size=world.data_size)
            )
        batches = [Batch.of(p, device=self._engine.device) for p in packed]
        self._enter("forward and backward")
        self._guard.looking = index < FIRST_STEPS
        sums, norm = step(
            self._engine,
            batches,
            self._loss,
            self._optimizer,
            denominator=counted,
            rate=learning_rate(index, self._plan.steps, knobs),
            max_norm=knobs.max_grad_norm,
            guard=self._guard,
            world=world,
        )
        self._meter.add(
            sums,
            norm,
            self._guard.held,
            step=index + 1,
            tokens=tokens,
            trained=counted,
        )
        self._state.step = index + 1

    def look_after(self) -> None:
        """What is due after a step: a log line, an evaluation, a checkpoint."""
        done, knobs = self._state.step, self._knobs
        if done == 1 or self._due(knobs.logging_steps):
            self._report()
        else:
            self._log.advance(done)
        if self._guard.looking:
            self._guard.check(step=done)
        best = self._due(knobs.eval_steps) and self._evaluate()
        if best or self._due(knobs.save_steps) or self._judge.gives_up:
            self.save()
        elif self._keeper is not None:
            self._keeper.check()

    def save(self) -> None:
        """Hand a copy of the finished steps to the thread that writes it."""
        if self._keeper is None or self._state.step == 0:
            return
        self._enter("saving")
        self._keeper.save(self._state, best=self._best(), log=self._log.position())

    def end(self) -> None:
        """Take the best checkpoint, where that is the run's result.

        Raises:
            UserError: when not one update was taken.
        """
        self._watch.conclude(step=self._state.step)
        best = self._judge.best_step
        if self._knobs.load_best_model_at_end and self._keeper is not None and best is not None:
            self._keeper.load_best(self._state, best)

    def _best(self) -> Best | None:
        judge = self._judge
        if judge.best_step is None or judge.metric is None:
            return None
        return Best(judge.best_step, judge.metric, judge.best)

    def _enter(self, phase: str) -> None:
        self._watchdog.enter(phase, done=self._state.step)

    def _due(self, interval: int) -> bool:
        return self._state.step == self._plan.steps or self._state.step % interval == 0

    def _report(self) -> None:
        """A log line, which is where the device is waited for; held steps come out here."""
        done, plan = self._state.step, self._plan
        self._enter("waiting for the device")
        reading = self._meter.read()
        self._watch.look(reading)
        self._log.training(
            reading.values,
            step=done,
            epoch=min(done * plan.global_batch_size, plan.windows) / self._data.num_windows,
            learning_rate=learning_rate(done - 1, plan.steps, self._knobs),
        )

    def _evaluate(self) -> bool:
        """Evaluate now, where there are rows for it; whether it is a new best."""
        if self._evaluation is None:
            return False
        done = self._state.step
        with self._meter.paused():
            values = evaluate(self._engine, self._watched(self._evaluation), self._loss, world=self._world)
        self._watch.check(values, step=done)
        self._log.evaluation(values, step=done)
        return self._judge.take(values, step=done)

    def _watched(self, data: Trainable) -> Iterator[HostBatch]:
        """This rank's batches of an evaluation; ranks that have one less agree all the same."""
        batches = evaluation_batches(data, self._plan, pad_id=self._pad_id, world=self._world)
        for _ in range(evaluation_rounds(data, self._plan)):
            self._stop.agree(self._world)
            self._enter("evaluation")
            packed = next(batches, None)
            if packed is not None:
                yield packed

    def _saves_to_come(self) -> int:
        knobs, first, last = self._knobs, self._state.step + 1, self._plan.steps
        due = {*range(knobs.save_steps, last, knobs.save_steps), last}
        if self._judge.metric is not None:  # every evaluation may be a new best
            due |= {*range(knobs.eval_steps, last, knobs.eval_steps)}
        return sum(step >= first for step in due)
