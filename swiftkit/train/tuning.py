"""What a run trains: from the knobs, the base and the tokenizer to a spec, before weights are loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from swiftkit import support
from swiftkit.config import RewardConfig, RunConfig, RunConfigT
from swiftkit.data.tokenizer import load_tokenizer
from swiftkit.engine import Engine, FullSpec, LoraSpec
from swiftkit.engine.build import NewRows, describe, is_judge, is_tied, skeleton, trained_whole, writes
from swiftkit.engine.exchange import fused_experts, linear_names, select_targets
from swiftkit.engine.fused.adopt import why_not
from swiftkit.engine.placement import Placement, settle_precision
from swiftkit.errors import UserError
from swiftkit.formats.checkpoints import recorded
from swiftkit.formats.packing import packing_of
from swiftkit.formats.peft import HEAD, SCORE, load_adapter, shortest_names
from swiftkit.formats.source import LocalModel
from swiftkit.generate.find import ADAPTER, find_checkpoint
from swiftkit.parallel.world import ALONE, World
from swiftkit.train.artifact import Artifact
from swiftkit.train.optim import peak_rate

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast

Spec = LoraSpec | FullSpec
Tuned = TypeVar("Tuned", bound=RunConfig)
BROUGHT = ("lora_rank", "lora_alpha", "target_modules", "modules_to_save", "use_rslora", "use_dora")


@dataclass(frozen=True, eq=False)
class Tuning(Generic[Tuned]):
    """What is trained, and from where it starts.

    Args:
        spec: shape of the adapter, or that all weights are trained.
        config: with the learning rate, and what `--init_adapter` brought.
        base: the model on disk.
        description: its transformers config.
        new_rows: tokens that the base does not know.
        start: values of the adapter to go on from.
    """

    spec: Spec
    config: Tuned
    base: LocalModel
    description: Any
    new_rows: NewRows = field(default_factory=dict)
    start: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def lora(self) -> LoraSpec | None:
        """The adapter, where there is one."""
        return self.spec if isinstance(self.spec, LoraSpec) else None

    @property
    def fuses(self) -> bool:
        """Whether fused layers can serve the model and what is trained of it."""
        return self.lora is not None and why_not(self.description, self.lora) is None

    @property
    def vocabulary(self) -> int:
        """Tokens that the model has embeddings for."""
        return max(int(self.description.vocab_size), self.spec.vocabulary or 0)

    @property
    def trains_embedding(self) -> bool:
        """Whether rows that the base never learnt are learnt now."""
        if self.lora is None:
            return True
        embedding, *apart = _ends(self.description)
        names = {name.rpartition(".")[2] for name in self.lora.modules_to_save}
        return embedding in names or (not apart and HEAD in names)

    def check_room(self, placement: Placement, *, parts: int = 1) -> None:
        """Refuse to train a whole model on GPUs that cannot hold it, before anything is loaded.

        Args:
            placement: device and precision.
            parts: of each weight, on a GPU each.

        Raises:
            UserError: saying what is needed and what there is.
        """
        if self.lora is not None or placement.device.type != "cuda":
            return
        _, total = torch.cuda.mem_get_info(placement.device)
        numbers = trained_numbers(self.description, self.spec)
        needed = numbers * bytes_a_number(placement.dtype, self.config.optim) / parts
        if needed > total:
            less = numbers * bytes_a_number(placement.dtype, "adamw_8bit") < total
            mend = "take --optim adamw_8bit, or train an adapter" if less else "train an adapter"
            over = f" on each of {parts} GPUs" if parts > 1 else ""
            raise UserError(
                f"--tuner_type full: {numbers:,} weights with gradients and optimizer take "
                f"{needed / 2**30:.0f} GiB{over}, and this GPU has {total / 2**30:.0f}; {mend} "
                "(--tuner_type lora)"
            )

    def load(self, placement: Placement, *, tokens: int, world: World = ALONE) -> Engine:
        """Build the model with what is trained, or this rank's part of it; see `build_model`."""
        engine = Engine.load(
            self.base.path,
            dtype=placement.dtype,
            device=placement.device,
            base=placement.base,
            fused=placement.fused,
            lora=self.lora,
            full=self.spec if isinstance(self.spec, FullSpec) else None,
            seed=self.config.seed,
            tokens=tokens,
            new_rows=self.new_rows,
            tp=world.tp,
            shard=world.shards,
        )
        if self.start:
            # An adapter that begins to score has no head yet.
            fresh = {name: engine.parameters[name] for name in {SCORE} & engine.parameters.keys()}
            engine.load_adapter({**fresh, **self.start})
        return engine

    def artifact(self, engine: Engine, base_model: str) -> Artifact:
        """Writes what is trained; `base_model` is the base's hub id or folder."""
        return Artifact(
            self.spec,
            base_model,
            tuple(engine.linear_names),
            base=self.base.path,
            starts=engine.starts,
            tied=engine.tied,
        )

    def lines(self) -> list[str]:
        """What the header of a run says of it."""
        size = f"{trained_numbers(self.description, self.spec):,} parameters"
        added = [f"          {len(self.new_rows)} new tokens"] if self.new_rows else []
        optimizer = ["          AdamW with moments in 8 bits"] if self.config.optim == "adamw_8bit" else []
        scored = ["          and a head that scores the last token of an answer"] if self.spec.scores else []
        if self.lora is None:
            return [f"trained   all weights, {size}", *scored, *added, *optimizer]
        lora = self.lora
        kind = "DoRA" if lora.dora else "LoRA"
        scaling = " over sqrt(rank)" if lora.rslora else ""
        start = ", starts as the principal part of each weight (PiSSA)" if lora.pissa else ""
        lines = [f"adapter   {kind} rank {lora.rank}, alpha {lora.alpha:g}{scaling}, {size}{start}"]
        if self.config.loraplus_lr_ratio is not None:
            lines.append(f"          B learns at {self.config.loraplus_lr_ratio:g} times the rate (LoRA+)")
        lines += scored
        if lora.modules_to_save:
            lines.append(f"          trained whole: {', '.join(lora.modules_to_save)}")
        if self.config.init_adapter is not None:
            lines.append(f"          goes on from {self.config.init_adapter}")
        return [*lines, *added, *optimizer]

    def warnings(self) -> list[str]:
        """What is not trained, though one may think so."""
        experts = [] if self.lora is None else fused_experts(skeleton(self.description))
        if not experts:
            return []
        return [
            f"not reached by the adapter: the experts of {experts[0]} and {len(experts) - 1} more layers, "
            "whose weights are one tensor"
        ]


def plan_tuning(
    config: RunConfigT, base: LocalModel, tokenizer: PreTrainedTokenizerFast
) -> Tuning[RunConfigT]:
    """Decide what is trained; `tokenizer` gets the new tokens.

    Raises:
        UserError: for what cannot be combined, a package that is not there, an adapter of another base.
    """
    support.check_optimizer(config.optim)
    description = describe(base.path)
    if is_judge(description) and not (isinstance(config, RewardConfig) and config.tuner_type == "full"):
        raise UserError(
            f"--model {config.model} is a reward model, which writes no answers; `swiftkit reward "
            "--tuner_type full` goes on from it"
        )
    support.check(support.asked(config), _precision(config, description))
    if config.init_adapter is not None:
        return _from_adapter(config, base, description, tokenizer)
    config = config.with_changes(learning_rate=peak_rate(config))
    new_rows: NewRows = add_tokens(tokenizer, config.new_tokens)
    size = max([int(description.vocab_size), *(token + 1 for token in new_rows)])
    vocabulary = size if size > description.vocab_size else None
    if config.tuner_type == "full":
        scores = isinstance(config, RewardConfig)
        return Tuning(FullSpec(vocabulary, scores), config, base, description, new_rows)
    ends: tuple[str, ...] = _ends(description) if new_rows else ()
    rounds = config.init_lora_weights.partition("_niter_")[2]
    spec = LoraSpec(
        rank=config.lora_rank,
        alpha=config.lora_alpha,
        dropout=config.lora_dropout,
        target_modules=tuple(config.target_modules),
        rslora=config.use_rslora,
        dora=config.use_dora,
        pissa=config.init_lora_weights.startswith("pissa"),
        pissa_rounds=int(rounds) if rounds else None,
        modules_to_save=tuple(dict.fromkeys([*config.modules_to_save, *ends])),
        vocabulary=vocabulary,
        scores=isinstance(config, RewardConfig),
    )
    return Tuning(spec, config, base, description, new_rows)


def _precision(config: RunConfig, description: Any) -> str:
    """Of the base, as far as it is known before there is a device.

    Raises:
        UserError: the base's folder is quantized, and what is asked for cannot be had over it.
    """
    packing = packing_of(description)
    if packing is not None and config.tuner_type == "full":
        raise UserError(
            f"--tuner_type full: --model {config.model} is quantized ({packing}), and whole numbers cannot "
            "be trained; train an adapter (--tuner_type lora), or give the model in bf16"
        )
    return settle_precision(config.base_precision, packing)


def add_tokens(tokenizer: PreTrainedTokenizerFast, words: Sequence[str]) -> dict[int, tuple[int, ...]]:
    """Teach a tokenizer new tokens.

    Args:
        tokenizer: changes.
        words: the tokens, or one .txt file with a token on each line.

    Raises:
        UserError: for a file that is not there, or a word that is a token already or stands twice.

    Returns:
        The ids of the new tokens, each with the tokens that its text was before.
    """
    from tokenizers import AddedToken

    words = _words(words)
    known = tokenizer.get_vocab()
    odd = next((word for n, word in enumerate(words) if word in known or word in words[:n]), None)
    if odd is not None:
        raise UserError(f"--new_tokens {odd}: that is a token already, or stands twice; leave it out")
    pieces = [tuple(tokenizer(word, add_special_tokens=False)["input_ids"]) for word in words]
    tokenizer.add_tokens([AddedToken(word, normalized=False, special=False) for word in words])
    known = tokenizer.get_vocab()
    return {known[word]: own for word, own in zip(words, pieces, strict=True)}


def _words(words: Sequence[str]) -> list[str]:
    if len(words) != 1 or not words[0].endswith(".txt"):
        return list(words)
    try:
        lines = Path(words[0]).expanduser().read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as failure:
        raise UserError(f"--new_tokens {words[0]} cannot be read as UTF-8 text: {failure}") from None
    return [line for line in lines if line.strip()]


def _ends(description: Any) -> tuple[str, ...]:
    """Names of embedding and head, one where they are tied."""
    model = skeleton(description)
    ends = [model.get_input_embeddings()] if is_tied(model) else [  # type: ignore[operator]
        model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    ]  # fmt: skip
    names = [name for name, module in model.named_modules() if any(module is end for end in ends)]
    return tuple(name.rpartition(".")[2] for name in names)


def _from_adapter(
    config: RunConfigT, base: LocalModel, description: Any, tokenizer: PreTrainedTokenizerFast
) -> Tuning[RunConfigT]:
    """Go on from an adapter: what it is, it brings, new tokens too; only dropout is the new run's."""
    folder = find_checkpoint(Path(config.init_adapter or "").expanduser())
    if not (folder / ADAPTER).is_file():
        raise UserError(f"--init_adapter {folder} is a whole model: give it as --model, and leave this out")
    spec, tensors = load_adapter(folder)
    scores = isinstance(config, RewardConfig)
    if spec.scores and not scores:
        raise UserError(
            f"--init_adapter {folder} is a reward model, which writes no answers; give another one"
        )
    spec = replace(spec, dropout=config.lora_dropout, scores=scores)
    fingerprint = recorded(folder).get("base", {}).get("fingerprint")
    if fingerprint is not None and fingerprint != base.fingerprint:
        raise UserError(
            f"--init_adapter {config.init_adapter} was trained on a base with fingerprint "
            f"{fingerprint[:12]}, --model {config.model} is {base.fingerprint[:12]}; give the base that it "
            "was trained on"
        )
    _learn_tokens(tokenizer, folder)
    names = linear_names(skeleton(description))
    targets = set(spec.target_modules)
    odd = min(targets - names, default=None)
    if odd is not None:
        raise UserError(
            f"--init_adapter {config.init_adapter} adapts {odd}, which --model {config.model} lacks"
        )
    brought: dict[str, Any] = {
        "lora_rank": spec.rank,
        "lora_alpha": spec.alpha,
        "target_modules": shortest_names(targets, names),
        "modules_to_save": list(spec.modules_to_save),
        "use_rslora": spec.rslora,
        "use_dora": spec.dora,
    }
    for name in BROUGHT:
        if name in config.model_fields_set and not _same(name, config, brought, description):
            raise UserError(
                f"--{name} {_word(getattr(config, name))}: --init_adapter {config.init_adapter} has "
                f"{_word(brought[name])}, which stays; leave --{name} out"
            )
    support.check(spec.features | support.asked(config), _precision(config, description))
    config = config.with_changes(**brought, learning_rate=peak_rate(config))
    return Tuning(spec, config, base, description, start=tensors)


def _learn_tokens(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Add the tokens that an adapter's own tokenizer has besides.

    Raises:
        UserError: when they would have other ids here.
    """
    if not (folder / "tokenizer.json").is_file():
        return
    theirs = load_tokenizer(folder).added_tokens_decoder
    known = tokenizer.get_vocab()
    tokenizer.add_tokens([token for _, token in sorted(theirs.items()) if token.content not in known])
    known = tokenizer.get_vocab()
    odd = next((token.content for number, token in theirs.items() if known[token.content] != number), None)
    if odd is not None:
        raise UserError(
            f"--init_adapter {folder}: {odd} is another token in its tokenizer than in the base's; give the "
            "base that it was trained on"
        )


def _same(name: str, config: RunConfig, brought: Mapping[str, Any], description: Any) -> bool:
    """Whether a knob says what the adapter has; targets and modules may be written in several ways."""
    asked = getattr(config, name)
    if name == "target_modules":
        model = skeleton(description)
        return select_targets(model, tuple(asked)) == select_targets(model, tuple(brought[name]))
    if name == "modules_to_save":
        model = skeleton(description)
        specs = [LoraSpec(modules_to_save=tuple(names)) for names in (asked, brought[name])]
        one, other = (trained_whole(model, spec) for spec in specs)
        return one == other
    return bool(asked == brought[name])


def _word(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def bytes_a_number(dtype: torch.dtype, optim: str) -> int:
    """Bytes of a trained number with its gradient and the optimizer's state."""
    value = 0 if dtype == torch.float32 else 4
    return 2 * dtype.itemsize + value + (2 if optim == "adamw_8bit" else 8)


def trained_numbers(description: Any, spec: Spec) -> int:
    """How many numbers are trained, counted before there are weights.

    Args:
        description: the model's transformers config.
        spec: what is trained.
    """
    head = int(description.hidden_size) if spec.scores else 0
    if isinstance(spec, FullSpec):
        model = skeleton(description, spec.vocabulary, writes=writes(spec))
        return head + sum(parameter.numel() for parameter in model.parameters())
    model = skeleton(description, spec.vocabulary)
    layers: list[Any] = [model.get_submodule(name) for name in select_targets(model, spec.target_modules)]
    factors = spec.rank * sum(layer.in_features + layer.out_features for layer in layers)
    lengths = sum(layer.out_features for layer in layers) if spec.dora else 0
    whole = {p for name in trained_whole(model, spec) for p in model.get_submodule(name)._parameters.values()}
    return factors + lengths + head + sum(p.numel() for p in whole if p is not None)
