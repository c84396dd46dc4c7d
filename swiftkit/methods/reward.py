"""Reward models: a score for an answer, higher for the chosen one of each pair (Bradley and Terry 1952)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

from swiftkit.config import RewardConfig
from swiftkit.data import Pairs
from swiftkit.engine import Batch, Engine, Head, Sums
from swiftkit.engine.placement import find_device
from swiftkit.methods.dpo import check_rows, plan_rows, prepare_rows
from swiftkit.methods.opening import open_base
from swiftkit.methods.scoring import scores_of
from swiftkit.parallel.world import ALONE, World, collected, joined
from swiftkit.train.loop import fit
from swiftkit.train.run import Run, write_whole
from swiftkit.train.steps import StepPlan, evaluation_batches

CALIBRATION = "calibration.json"
BINS = 10


@dataclass(frozen=True)
class RewardLoss:
    """-log sigmoid(chosen - rejected - margin), a sum over pairs (https://arxiv.org/abs/2307.09288, 2).

    Args:
        score: the head.
        centering: weight of (chosen + rejected)^2 (https://arxiv.org/abs/2312.09244).
    """

    score: nn.Linear
    centering: float = 0.0

    def __call__(self, _: Head, hidden: Tensor, batch: Batch) -> Sums:
        """`hidden` is [tokens, hidden] of chosen and rejected answers by turns."""
        assert batch.answers is not None, "a batch of pairs"
        chosen, rejected = scores_of(self.score, hidden, batch).view(-1, 2).unbind(1)
        losses = -F.logsigmoid(chosen - rejected - batch.answers.margins)
        if self.centering:
            losses = losses + self.centering * (chosen + rejected).square()
        won = (chosen > rejected).float() + 0.5 * (chosen == rejected)
        return {
            "loss": losses.sum(),
            "accuracy": won.sum(),
            "margin": (chosen - rejected).sum(),
            "chosen_score": chosen.sum(),
            "rejected_score": rejected.sum(),
        }


def run(config: RewardConfig, console: Console) -> Run:
    """From a checked config to a finished run.

    Raises:
        UserError: for what is wrong with config, model or data, before weights are loaded.
    """
    with joined(find_device(config.device)) as world:  # what cannot be had is said before anything is fetched
        return _run(config, console if world.first else Console(quiet=True), world)


def _run(config: RewardConfig, console: Console, world: World) -> Run:
    base = open_base(config, console, world=world)
    config, tuning, world = base.tuning.config, base.tuning, base.world
    data, evaluation = prepare_rows(config, base)
    check_rows(config, data, evaluation, vocabulary=tuning.vocabulary)
    plan = plan_rows(base, data)
    job = base.job("reward", data, evaluation, plan)
    with job.announce():
        engine = tuning.load(base.placement, tokens=plan.tokens, world=world)
        with job.begin(engine) as log:
            fit(
                engine,
                data,
                RewardLoss(engine.model.score, config.center_rewards_coefficient),  # type: ignore[arg-type]
                knobs=config,
                plan=plan,
                log=log,
                pad_id=job.pad_id,
                evaluation=evaluation,
                keeper=job.keeper(engine),
                world=world,
            )
        if evaluation is not None:
            found = calibration(engine, evaluation, plan, pad_id=job.pad_id, world=world)
            if world.first:
                write_whole(job.folder / CALIBRATION, found)
            console.print(*_about(found), sep="\n", markup=False, highlight=False, soft_wrap=True)
        return job.end(engine)


def calibration(
    engine: Engine, data: Pairs, plan: StepPlan, *, pad_id: int, world: World = ALONE
) -> dict[str, Any]:
    """How far sigmoid(chosen - rejected) is what it says: a probability that this answer is the chosen one.

    Every pair counts in both directions, so that the probabilities lie on both sides of one half. Each rank
    scores its share of the pairs.

    Returns:
        `pairs`, `accuracy`, `error` (expected calibration error over BINS equal bins, Guo et al. 2017,
        https://arxiv.org/abs/1706.04599), and `bins` with the mean probability and the share that was chosen.
    """

    def ahead(_: Head, hidden: Tensor, batch: Batch) -> Tensor:
        scores = scores_of(engine.model.score, hidden, batch)  # type: ignore[arg-type]
        chosen, rejected = scores.double().view(-1, 2).unbind(1)
        return chosen - rejected

    packed = evaluation_batches(data, plan, pad_id=pad_id, world=world)
    found = engine.results((Batch.of(one, device=engine.device) for one in packed), ahead)
    own = [margin for margins in found for margin in margins.tolist()]
    margins = torch.tensor(collected(own, world), dtype=torch.float64)
    accuracy = ((margins > 0).double() + 0.5 * (margins == 0)).mean().item()
    return {"pairs": len(margins), "accuracy": accuracy, **binned(margins.sigmoid().tolist())}


def binned(probabilities: Sequence[float]) -> dict[str, Any]:
    """Expected calibration error, and the bins, of the probabilities of what did happen and its opposite."""
    said = torch.tensor([*probabilities, *(1 - p for p in probabilities)], dtype=torch.float64)
    true = torch.cat([torch.ones(len(probabilities)), torch.zeros(len(probabilities))]).double()
    bins, error = [], 0.0
    place = (said * BINS).long().clamp_max(BINS - 1)
    for number in range(BINS):
        own = place == number
        if not own.any():
            continue
        mean, share = said[own].mean().item(), true[own].mean().item()
        error += own.double().mean().item() * abs(mean - share)
        bins.append({"count": int(own.sum()), "probability": mean, "chosen": share})
    return {"error": error, "bins": bins}


def _about(found: dict[str, Any]) -> list[str]:
    return [
        "",
        f"held out  {found['pairs']:,} pairs, {found['accuracy']:.1%} the right way round, calibration error "
        f"{found['error']:.3f}",
    ]
