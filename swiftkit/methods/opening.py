"""What every method does before it sees a row, and what it says of a run once it has seen them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Literal

from rich.console import Console

from swiftkit.config import RunConfigT
from swiftkit.data import Trainable
from swiftkit.data.tokenizer import load_tokenizer
from swiftkit.engine.build import check_model
from swiftkit.engine.placement import Placement, place
from swiftkit.errors import UserError
from swiftkit.formats.named import open_model
from swiftkit.formats.source import LocalModel
from swiftkit.parallel.world import ALONE, World
from swiftkit.train.job import Job
from swiftkit.train.layout import room_for_tokens, settle_layout
from swiftkit.train.steps import StepPlan, check_batch_sizes, plan_steps
from swiftkit.train.tuning import Tuning, plan_tuning

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True, eq=False)
class Opening(Generic[RunConfigT]):
    """The model of a run on disk, what of it is trained, and where; nothing heavy is loaded.

    Args:
        asked: the config as it was given.
        tuning: what is trained; it has the config to go on with.
        model: the base on disk.
        tokenizer: with the template of this run.
        placement: device and precision.
        longest: tokens of a window that the model can read; None where it sets no limit.
        tokens_at_once: for which the device has room in a micro-batch.
        console: where people look.
        world: the processes of the run, as they stand for it.
    """

    asked: RunConfigT
    tuning: Tuning[RunConfigT]
    model: LocalModel
    tokenizer: PreTrainedTokenizerFast
    placement: Placement
    longest: int | None
    tokens_at_once: int
    console: Console
    world: World = ALONE

    def plan(self, data: Trainable, *, max_length: int) -> StepPlan:
        """Steps and batch sizes.

        Args:
            data: of the training.
            max_length: tokens of a window at most.
        """
        on_gpu, placement = self.placement.device.type == "cuda", self.placement
        return plan_steps(
            self.tuning.config,
            num_windows=data.num_windows,
            max_length=max_length,
            device_type=placement.device.type,
            fixed_length=on_gpu and not placement.fused and placement.base == "plain",
            lengths=data.window_lengths.tolist(),
            ranks=self.world.data_size,
            tokens_at_once=self.tokens_at_once,
        )

    def job(
        self,
        method: str,
        data: Trainable,
        evaluation: Trainable | None,
        plan: StepPlan,
        *,
        config: RunConfigT | None = None,
        warnings: Sequence[str] = (),
        notes: Sequence[str] = (),
    ) -> Job:
        """The run, as soon as everything about it is known.

        Args:
            method: its verb.
            data, evaluation: what it is trained and judged on.
            plan: of `plan`.
            config: where the method has settled more of it than `tuning`.
            warnings, notes: sentences and lines for the header, behind those of the tuning.
        """
        return Job(
            method=method,
            asked=self.asked,
            config=resolved(config or self.tuning.config, self, plan, data.max_length),
            model=self.model,
            tokenizer=self.tokenizer,
            data=data,
            evaluation=evaluation,
            plan=plan,
            placement=self.placement,
            tuning=self.tuning,
            layers="fused" if self.placement.fused else "plain",
            console=self.console,
            warnings=[*self.tuning.warnings(), *warnings],
            notes=notes,
            world=self.world,
        )


def open_base(config: RunConfigT, console: Console, *, world: World = ALONE) -> Opening[RunConfigT]:
    """Find the model, fetch it where it has to be, and settle what is trained, where, in which precision.

    Raises:
        UserError: for what is wrong with config or model.
    """
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    fetch = partial(open_model, config.model, source=config.model_source, revision=config.revision, say=say)
    model = world.once_a_node(fetch)
    tokenizer = load_tokenizer(model.path, config.chat_template)
    tuning = plan_tuning(config, model, tokenizer)
    description = check_model(model.path, tuning.spec)
    settled = tuning.config
    placement = place(
        settled.device, settled.base_precision, settled.nf4_compute, fuses=tuning.fuses,
        description=description,
    )  # fmt: skip
    placement = placement if world.device is None else replace(placement, device=world.device)
    world = world.arranged(settle_layout(settled, description, tuning.spec, placement, world))
    check_batch_sizes(settled, world.data_size)
    tuning.check_room(placement, parts=world.layout.tp * world.layout.shard)
    longest = longest_window(description, settled.max_length)
    room = room_for_tokens(settled, description, tuning.spec, placement, world.layout)
    return Opening(config, tuning, model, tokenizer, placement, longest, room, console, world)


def resolved(config: RunConfigT, opening: Opening[RunConfigT], plan: StepPlan, max_length: int) -> RunConfigT:
    """The config with what `auto` has become on this machine.

    Where the processes of a step have unlike shares, no two sizes make up the third: those of a micro-batch
    stay as they were asked for, and are found again.
    """
    sizes: dict[str, Any] = {}
    micro, times = plan.micro_batch_size, plan.gradient_accumulation_steps
    if plan.global_batch_size == micro * times * plan.ranks:
        sizes = {"per_device_train_batch_size": micro, "gradient_accumulation_steps": times}
    return config.with_changes(
        base_precision=opening.placement.base_precision,
        tensor_parallel_size=opening.world.layout.tp,
        layout=opening.world.layout.storage,
        max_length=max_length,
        global_batch_size=plan.global_batch_size,
        **sizes,
    )


def longest_window(description: Any, max_length: int | Literal["auto"]) -> int | None:
    """Tokens of the longest window that a model can be trained on; None where its config sets no limit.

    Args:
        description: the model's transformers config.
        max_length: as asked for.

    Raises:
        UserError: when `max_length` is more.
    """
    limit: int | None = getattr(description, "max_position_embeddings", None)
    reason = f"more than the model's context of {limit} tokens"
    original = _switching_length(description)
    if original is not None and (limit is None or original < limit):
        # transformers takes one set of frequencies for a whole row, by its longest document.
        limit = original
        reason = (
            f"more than {limit} tokens, beyond which this model (rope_type longrope or dynamic) turns "
            "positions otherwise: one long document would change the short ones of its row"
        )
    if limit is not None and max_length != "auto" and max_length > limit:
        raise UserError(f"--max_length {max_length} is {reason}; give at most {limit}, or leave it on auto")
    return limit


def _switching_length(description: Any) -> int | None:
    """Tokens from which rotary frequencies depend on the length of the row; None where they never do."""
    found = getattr(description, "rope_parameters", None) or {}
    kinds = [found] if "rope_type" in found else [kind for kind in found.values() if isinstance(kind, dict)]
    lengths = [
        kind.get("original_max_position_embeddings") or description.max_position_embeddings
        for kind in kinds
        if kind.get("rope_type") in ("longrope", "dynamic")
    ]
    return min(lengths, default=None)


def check_vocabulary(data: Trainable, size: int) -> None:
    """Refuse tokens that the model has no embedding for.

    Raises:
        UserError: naming the first row with one.
    """
    if data.largest_id < size:  # known without reading a window
        return
    for document in data.documents:
        largest = int(document.ids.max())
        if largest >= size:
            raise document.origin.error(
                f"the tokenizer makes token {largest} of it, the model has {size} (from 0); "
                "take the tokenizer that belongs to the model"
            )
