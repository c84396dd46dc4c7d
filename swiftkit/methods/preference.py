"""The losses of preferences, over log-probabilities of whole answers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from swiftkit.config import DpoConfig
from swiftkit.engine import Batch, Head, Sums

PER_TOKEN = ("sigmoid_norm", "ipo", "orpo", "simpo")  # these divide an answer's log-probability by its tokens


@dataclass(frozen=True)
class PairLoss:
    """DPO and its kin on chosen and rejected answers: a sum over pairs.

    Args:
        kind: the loss.
        beta: scale of the rewards.
        smoothing: share of the pairs thought to be the wrong way round.
        chosen_weight: of the chosen answer's mean cross-entropy.
        gamma: margin that simpo asks for.
    """

    kind: str
    beta: float
    smoothing: float = 0.0
    chosen_weight: float = 0.0
    gamma: float = 0.0

    def __call__(self, head: Head, hidden: Tensor, batch: Batch) -> Sums:
        """`hidden` is [tokens, hidden] of chosen and rejected answers by turns."""
        answers = batch.answers
        assert answers is not None, "a batch of pairs"
        logprobs = answers.sums(head.logprobs(hidden[batch.positions], batch.targets))  # [answers]
        scores = logprobs - answers.reference  # the reference is 0 for losses without one
        if self.kind in PER_TOKEN:
            scores = scores / answers.sizes
        chosen, rejected = scores.view(-1, 2).unbind(1)
        losses = self.per_pair(chosen, rejected)
        likely = (logprobs / answers.sizes).view(-1, 2)[:, 0]  # mean log p of the chosen answer's tokens
        if self.chosen_weight:
            losses = losses - self.chosen_weight * likely
        won = (chosen > rejected).float() + 0.5 * (chosen == rejected)
        return {
            "loss": losses.sum(),
            "accuracy": won.sum(),
            "margin": self.beta * (chosen - rejected).sum(),
            "chosen_reward": self.beta * chosen.sum(),
            "rejected_reward": self.beta * rejected.sum(),
            "chosen_nll": -likely.sum(),
        }

    def per_pair(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """The loss of each pair without its cross-entropy.

        Args:
            chosen, rejected: [pairs], log-probabilities over those of the reference, or alone; per token for
                PER_TOKEN.

        Sources: DPO https://arxiv.org/abs/2305.18290 (7), IPO 2310.12036 (17), hinge 2305.10425, robust DPO
        2403.00409 (10), ORPO 2403.07691 (6), SimPO 2405.14734 (6), CPO 2401.08417 (5); smoothing is that of
        cDPO (https://ericmitchell.ai/cdpo.pdf).
        """
        difference = chosen - rejected
        scaled = self.beta * difference
        match self.kind:
            case "ipo":
                return (difference - 1 / (2 * self.beta)) ** 2
            case "hinge":
                return torch.relu(1 - scaled)
            case "orpo":
                odds = difference - (_log1mexp(chosen) - _log1mexp(rejected))
                return -self.beta * F.logsigmoid(odds)
            case "robust":
                kept = (1 - self.smoothing) * F.logsigmoid(scaled) - self.smoothing * F.logsigmoid(-scaled)
                return -kept / (1 - 2 * self.smoothing)
            case _:
                scaled = scaled - self.gamma
                kept = (1 - self.smoothing) * F.logsigmoid(scaled) + self.smoothing * F.logsigmoid(-scaled)
                return -kept


def _log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) for x < 0, without cancellation at either end."""
    x = x.clamp_max(-torch.finfo(x.dtype).tiny)
    near = x > -0.6931472
    # The branch that is not taken gets a harmless argument: its gradient would be nan otherwise.
    close = torch.log(-torch.expm1(torch.where(near, x, torch.full_like(x, -0.5))))
    far = torch.log1p(-torch.exp(torch.where(near, torch.full_like(x, -1.0), x)))
    return torch.where(near, close, far)


@dataclass(frozen=True)
class LabelledLoss:
    """KTO (https://arxiv.org/abs/2402.01306, equation 8) on single answers with a label: a sum over rows.

    The reference point, an estimate of the divergence from the reference, is a mean over the rows of a
    micro-batch, each prompt before the next row's answer; no gradient flows through it.

    Args:
        beta: scale of the rewards.
        good_weight, bad_weight: of answers by their label.
    """

    beta: float
    good_weight: float = 1.0
    bad_weight: float = 1.0

    def __call__(self, head: Head, hidden: Tensor, batch: Batch) -> Sums:
        """`hidden` is [tokens, hidden] of a row's own answer and the mismatched one by turns."""
        answers = batch.answers
        assert answers is not None, "a batch of labelled rows"
        logprobs = answers.sums(head.logprobs(hidden[batch.positions], batch.targets))
        own, mismatched = (logprobs - answers.reference).view(-1, 2).unbind(1)
        point = mismatched.detach().mean().clamp_min(0)
        losses = self.per_row(own, answers.good, point)
        good, reward = answers.good, self.beta * own.detach()
        right = (reward > 0) == good
        return {
            "loss": losses.sum(),
            "accuracy": (right.float() * (reward != 0) + 0.5 * (reward == 0)).sum(),
            "kl": point * len(own),
            "good_reward": (reward * good).sum(),
            "bad_reward": (reward * ~good).sum(),
        }

    def per_row(self, ratios: Tensor, good: Tensor, point: Tensor) -> Tensor:
        """The loss of each row, [rows], from its log-probability over the reference's, and the point."""
        sign = torch.where(good, 1.0, -1.0)
        weight = torch.where(good, self.good_weight, self.bad_weight)
        return weight * (1 - torch.sigmoid(self.beta * sign * (ratios - point)))


def loss_of(config: DpoConfig) -> PairLoss | LabelledLoss:
    """The loss that a config asks for."""
    if config.loss_type == "kto":
        return LabelledLoss(config.reward_scale, config.desirable_weight, config.undesirable_weight)
    gamma = config.simpo_gamma if config.loss_type == "simpo" else 0.0
    return PairLoss(
        config.loss_type, config.reward_scale, config.label_smoothing, config.chosen_weight, gamma
    )


def answer_logprobs(head: Head, hidden: Tensor, batch: Batch) -> Tensor:
    """The log-probability of each answer of a batch, [answers]."""
    assert batch.answers is not None, "a batch of answers"
    return batch.answers.sums(head.logprobs(hidden[batch.positions], batch.targets))
