"""The configuration of the verbs that learn from preferences."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias, TypeVar

from pydantic import Field, model_validator

from swiftkit.config.data import PreparationKnobs, RowLossKnobs, SourceKnobs, TruncationStrategy
from swiftkit.config.schema import Auto, Many, knob
from swiftkit.config.training import LoraKnobs, ModelKnobs, SampleKnobs, TrainKnobs
from swiftkit.config.verbs import SftConfig

LossType = Literal["sigmoid", "sigmoid_norm", "ipo", "hinge", "robust", "orpo", "simpo", "cpo", "kto"]
REFERENCE_FREE = ("orpo", "simpo", "cpo")
SMOOTHED = ("sigmoid", "sigmoid_norm", "robust", "simpo", "cpo")


class PairKnobs(PreparationKnobs, RowLossKnobs, SourceKnobs):
    """From files to pairs of answers."""

    val_dataset: Many = knob([], "rows to evaluate on, written like --dataset", group="data")
    split_dataset_ratio: float = knob(
        0.0, "share of the rows kept for evaluation when there is no --val_dataset", group="data", ge=0, lt=1
    )
    max_length: int | Auto = knob(
        "auto",
        "of a prompt with one of its answers; auto is the longest, at most 4,096",
        group="data",
        unit="tokens",
    )
    truncation_strategy: TruncationStrategy = knob(
        "drop",
        "what happens to a pair with a longer side: dropped and counted, or both sides cut; left takes the "
        "same tokens off both, so that they keep one prompt",
        group="data",
    )
    share_prompt: bool = knob(
        True,
        "what two answers begin with is computed once; fused layers on a GPU compute it twice all the same",
        group="data",
    )


class PreferenceConfig(TrainKnobs, LoraKnobs, PairKnobs, ModelKnobs):
    """What `dpo` and `reward` share. A window of the batch sizes is one pair."""

    metric_for_best_model: Literal["eval_loss"] | None = knob(
        None,
        "keep the checkpoint that is best by this; the next two take eval_loss where none is given",
        group="run",
    )


class DpoConfig(SampleKnobs, PreferenceConfig):
    """`swiftkit dpo`: learn from chosen and rejected answers, by DPO or one of its kin."""

    learning_rate: float | Auto = knob(
        "auto", "at its peak; auto is 2e-5 for an adapter, 1e-6 for --tuner_type full", group="training"
    )
    num_train_epochs: float = knob(1.0, "passes over the data", group="training", gt=0)
    loss_type: LossType = knob(
        "sigmoid",
        "sigmoid is DPO, sigmoid_norm the same per token; orpo, simpo and cpo need no reference; kto learns "
        "from single answers with a label",
        group="preference",
    )
    beta: Annotated[float, Field(gt=0)] | Auto = knob(
        "auto", "how much a reward weighs; auto is 0.1, for simpo 2", group="preference"
    )
    label_smoothing: float = knob(
        0.0, "share of the pairs that are thought to be the wrong way round", group="preference", ge=0, lt=0.5
    )
    rpo_alpha: Annotated[float, Field(ge=0)] | Auto = knob(
        "auto",
        "weight of the chosen answer's mean cross-entropy in the loss; auto is 1 for orpo and cpo, else 0",
        group="preference",
    )
    simpo_gamma: Annotated[float, Field(ge=0)] = knob(0.5, "margin that simpo asks for", group="preference")
    desirable_weight: float = knob(1.0, "of good answers in kto", group="preference", gt=0)
    undesirable_weight: float = knob(1.0, "of bad answers in kto", group="preference", gt=0)
    ref_model: str | None = knob(
        None,
        "the reference policy: a name, hub id, folder or checkpoint; without it what training starts from",
        group="preference",
    )

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares with a reference policy."""
        return self.loss_type not in REFERENCE_FREE

    @property
    def reward_scale(self) -> float:
        """`beta`, with `auto` resolved."""
        return self.beta if self.beta != "auto" else 2.0 if self.loss_type == "simpo" else 0.1

    @property
    def chosen_weight(self) -> float:
        """`rpo_alpha`, with `auto` resolved."""
        return self.rpo_alpha if self.rpo_alpha != "auto" else float(self.loss_type in ("orpo", "cpo"))

    @model_validator(mode="after")
    def _knobs_of_the_loss(self) -> DpoConfig:
        kind = self.loss_type
        if self.label_smoothing and kind not in SMOOTHED:
            raise ValueError(f"--label_smoothing is for {', '.join(SMOOTHED)}, not for --loss_type {kind}")
        if self.ref_model is not None and not self.needs_reference:
            raise ValueError(f"--loss_type {kind} needs no reference; leave --ref_model out")
        if kind == "kto" and self.rpo_alpha not in ("auto", 0):
            raise ValueError("--rpo_alpha is for pairs, and --loss_type kto has single answers")
        for name, owner in (
            ("simpo_gamma", "simpo"), ("desirable_weight", "kto"), ("undesirable_weight", "kto"),
        ):  # fmt: skip
            if kind != owner and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"--{name} is for --loss_type {owner}, not for {kind}")
        return self


class RewardConfig(PreferenceConfig):
    """`swiftkit reward`: a model that scores answers, from chosen and rejected ones (Bradley-Terry)."""

    num_train_epochs: float = knob(1.0, "passes over the data", group="training", gt=0)
    center_rewards_coefficient: float = knob(
        0.0, "weight of (chosen + rejected)^2 in the loss, which keeps scores around 0", group="preference",
        ge=0,
    )  # fmt: skip


RunConfig: TypeAlias = SftConfig | DpoConfig | RewardConfig
"""The configuration of a run, whatever its method."""
RunConfigT = TypeVar("RunConfigT", SftConfig, DpoConfig, RewardConfig)
