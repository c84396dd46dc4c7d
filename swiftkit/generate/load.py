"""From what a user names to a model that answers: everything is known before weights are loaded."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from swiftkit.config import ReadyModelKnobs
from swiftkit.data.tokenizer import load_tokenizer, stop_ids
from swiftkit.engine import Engine, LoraSpec
from swiftkit.engine.build import describe, is_judge
from swiftkit.engine.fused.adopt import why_not
from swiftkit.engine.placement import Placement, find_device, place
from swiftkit.errors import UserError
from swiftkit.formats.full import FullSpec
from swiftkit.formats.named import open_model
from swiftkit.formats.peft import load_adapter
from swiftkit.formats.source import LocalModel
from swiftkit.generate.find import Place
from swiftkit.hub import Source

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast

Say = Callable[[str], None]


@dataclass(frozen=True, eq=False)
class ReadyModel:
    """A model on disk, and how it will be loaded.

    Args:
        where: what the user named.
        model: the base, or the whole model.
        description: its transformers config.
        spec, tensors: the adapter's.
        placement: device and precision.
        tokenizer: with the template of the training.
        stops: tokens that end an answer.
    """

    where: Place
    model: LocalModel
    description: Any
    spec: LoraSpec | None
    tensors: Mapping[str, Tensor]
    placement: Placement
    tokenizer: PreTrainedTokenizerFast
    stops: set[int]

    @property
    def vocabulary(self) -> int:
        """Rows of its embedding, with those of tokens that an adapter adds."""
        added = None if self.spec is None else self.spec.vocabulary
        return max(int(self.description.vocab_size), added or 0)

    def load(self) -> Engine:
        """The model, with its adapter."""
        engine = Engine.load(
            self.model.path,
            dtype=self.placement.dtype,
            device=self.placement.device,
            base=self.placement.base,
            fused=self.placement.fused,
            lora=None if self.spec is None else replace(self.spec, dropout=0.0),  # nothing is trained
            full=FullSpec(scores=True) if is_judge(self.description) else None,  # the one way to its head
        )
        if self.spec is not None:
            engine.load_adapter(self.tensors)
        return engine


def prepare_model(where: Place, knobs: ReadyModelKnobs, *, say: Say, scores: bool = False) -> ReadyModel:
    """Find and check all that a model needs to answer.

    An adapter's `args.json` brings back model and precision; the tokenizer beside it has the template.

    Args:
        where: from `find`.
        knobs: what the user asks for; it wins.
        say: takes a warning.
        scores: whether a reward model is wanted, which writes no answers.

    Raises:
        UserError: for a model or an adapter that is not there, or two that do not fit.
    """
    find_device(knobs.device)  # what cannot be had is said before anything is fetched
    folder = where.adapter
    spec, tensors = (None, {}) if folder is None else load_adapter(folder)
    if spec is not None:  # before a base is fetched
        _check_kind(spec.scores, scores, folder)
    model = _open_base(where, knobs, say)
    description = describe(model.path)
    judges = spec is None and is_judge(description)
    if spec is None:
        _check_kind(judges, scores, where.model)
    # `auto` means for a model of ours what it means in training on this machine.
    fuses = bool(where.args) and why_not(description, spec) is None and not judges
    placement = place(
        knobs.device,
        _precision(knobs, where.args),
        where.trained.get("nf4_compute", "bf16"),
        fuses=fuses,
        description=description,
    )
    own = folder is not None and (folder / "tokenizer.json").is_file()
    tokenizer = load_tokenizer(folder if own and folder else model.path, knobs.chat_template)
    return ReadyModel(
        where=where,
        model=model,
        description=description,
        spec=spec,
        tensors=tensors,
        placement=placement,
        tokenizer=tokenizer,
        stops=stop_ids(tokenizer, model.path),
    )


def _check_kind(judges: bool, wanted: bool, name: object) -> None:
    """Refuse a model that writes where one that scores is wanted, and the other way round."""
    if judges and not wanted:
        raise UserError(
            f"{name} is a reward model, which writes no answers; swiftkit.reward_model(...).score() scores "
            "them"
        )
    if wanted and not judges:
        raise UserError(f"{name} is no reward model; `swiftkit reward` makes one")


def _precision(knobs: ReadyModelKnobs, args: Mapping[str, Any]) -> str:
    """What the user asks for now, else what was asked for in training.

    Not what `auto` became then: that was for the machine of the training.
    """
    if knobs.base_precision != "auto":
        return knobs.base_precision
    asked = args.get("asked") or args.get("config", {})
    return str(asked.get("base_precision", "auto"))


def _open_base(where: Place, knobs: ReadyModelKnobs, say: Say) -> LocalModel:
    """The user's model, else the very one that the adapter was trained on.

    Raises:
        UserError: no base is known, or what is found under its name now has other weights.
    """
    if where.adapter is None:
        assert where.model is not None, "the schema asks for a model or an adapter"
        return open_model(where.model, source=knobs.model_source, revision=knobs.revision, say=say)
    trained, base = where.trained, where.args.get("base", {})
    source, revision, name = knobs.model_source, knobs.revision, where.model
    if name is None:
        name = trained.get("model") or _base_of_peft(where.adapter)
        if source == "auto":
            recorded_source = base.get("source")
            source = recorded_source if recorded_source in get_args(Source) else source
        on_hub = source in ("hf", "modelscope")
        revision = revision or (base.get("revision") if on_hub else None) or trained.get("revision")
    if not name:
        raise UserError(f"{where.adapter} does not say which base it was trained on; give --model")
    model = open_model(name, source=source, revision=revision, say=say)
    before, now = base.get("fingerprint"), model.fingerprint
    if before is None or before == now:
        return model
    differs = (
        f"{where.adapter} was trained on {trained.get('model')} (from {base.get('source')}, fingerprint "
        f"{before[:12]}), and {name} (from {model.source}, fingerprint {now[:12]}) is not the same"
    )
    if where.model is None:
        raise UserError(f"{differs}; give the --revision of then, or --model {name} to use it all the same")
    say(f"{differs}; answers may suffer")
    return model


def _base_of_peft(adapter: Path) -> str | None:
    """The base that PEFT's config names."""
    config = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    name: str | None = config.get("base_model_name_or_path")
    return name
