"""Talk to a model: from a checkpoint or a name to streamed answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from swiftkit.config import ChatConfig
from swiftkit.data import Message
from swiftkit.data.tokenizer import load_tokenizer, prompt_ids, stop_ids
from swiftkit.engine import Engine
from swiftkit.engine.build import describe
from swiftkit.engine.fused.adopt import why_not
from swiftkit.engine.placement import find_device, place
from swiftkit.errors import UserError
from swiftkit.formats.checkpoints import checkpoints, recorded
from swiftkit.formats.named import open_model
from swiftkit.formats.peft import load_adapter
from swiftkit.formats.source import LocalModel
from swiftkit.generate.decode import stream
from swiftkit.generate.sampling import Sampler
from swiftkit.hub import Source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer decodes half a character to


class Session:
    """One conversation with a model.

    Args:
        engine, tokenizer: the model.
        stops: tokens that end an answer.
        config: lengths and sampling.
    """

    def __init__(
        self, engine: Engine, tokenizer: PreTrainedTokenizerFast, *, stops: set[int], config: ChatConfig
    ):
        self.engine = engine
        self.tokenizer = tokenizer
        self.config = config
        self.stops = stops
        self.messages: list[Message] = []
        self._sampler = Sampler(config.temperature, config.top_p, config.seed)
        self.forget()

    @classmethod
    def open(cls, config: ChatConfig, *, say: Callable[[str], None] = print) -> Session:
        """Load what the config names; an adapter's `args.json` brings back what it was trained with.

        That is model, precision and system message; the tokenizer beside the adapter has the template.

        Raises:
            UserError: for a model or an adapter that is not there, or two that do not fit.
        """
        checkpoint = None if config.adapters is None else find_checkpoint(Path(config.adapters))
        args = {} if checkpoint is None else recorded(checkpoint)
        trained: dict[str, Any] = args.get("config", {})
        find_device(config.device)  # what cannot be had is said before anything is fetched
        spec, tensors = (None, {}) if checkpoint is None else load_adapter(checkpoint)
        model = _open_base(config, checkpoint, args, say)
        # `auto` means for an adapter of ours what it means in training on this machine.
        fuses = bool(args) and why_not(describe(model.path), spec) is None
        precision = _precision(config, args)
        placement = place(config.device, precision, trained.get("nf4_compute", "bf16"), fuses=fuses)
        engine = Engine.load(
            model.path,
            dtype=placement.dtype,
            device=placement.device,
            base=placement.base,
            fused=placement.fused,
            lora=None if spec is None else replace(spec, dropout=0.0),  # nothing is trained
        )
        engine.load_adapter(tensors)
        config = config.with_changes(system=trained.get("system") if config.system is None else config.system)
        own = checkpoint is not None and (checkpoint / "tokenizer.json").is_file()
        tokenizer = load_tokenizer(checkpoint if own and checkpoint else model.path, config.chat_template)
        return cls(engine, tokenizer, stops=stop_ids(tokenizer, model.path), config=config)

    def ask(self, prompt: str) -> str:
        """The whole answer to the next message of the conversation."""
        return "".join(self.stream(prompt))

    def stream(self, prompt: str) -> Iterator[str]:
        """The answer, piece by piece as it comes.

        Both messages then belong to the conversation, also when the answer is cut off.

        Raises:
            UserError: when the conversation fills the model's context.
        """
        asked = [*self.messages, {"role": "user", "content": prompt}]
        read = prompt_ids(self.tokenizer, asked)
        ids: list[int] = []
        steps = stream(
            self.engine,
            [read],
            max_new_tokens=min(self.config.max_new_tokens, self._room_for_answer(len(read))),
            stop_ids=self.stops,
            sampler=self._sampler,
        )
        try:
            yield from self._pieces(steps, ids)
        finally:
            self.messages = [*asked, {"role": "assistant", "content": _decode(self.tokenizer, ids)}]

    def _pieces(self, steps: Iterator[list[tuple[int, int]]], ids: list[int]) -> Iterator[str]:
        """New text after each step, whole characters only; `ids` takes the tokens."""
        told = ""
        for step in steps:
            ids.append(step[0][1])
            text = _decode(self.tokenizer, ids)
            if not text.endswith(UNFINISHED) and text != told:
                yield text[len(told) :]
                told = text
        rest = _decode(self.tokenizer, ids)
        if rest != told:
            yield rest[len(told) :]

    def _room_for_answer(self, tokens: int) -> int:
        context = getattr(self.engine.config, "max_position_embeddings", None)
        if context is None:
            return self.config.max_new_tokens
        if tokens >= context:
            raise UserError(
                f"the conversation has {tokens:,} tokens and the model reads {context:,}; start a new one"
            )
        return int(context) - tokens

    def forget(self) -> None:
        """Start a new conversation."""
        system = self.config.system
        self.messages = [] if system is None else [{"role": "system", "content": system}]


def answer_all(
    engine: Engine,
    tokenizer: PreTrainedTokenizerFast,
    conversations: Sequence[list[Message]],
    *,
    max_new_tokens: int,
    stops: set[int],
) -> list[str]:
    """Greedy answers to several conversations at once."""
    ids: list[list[int]] = [[] for _ in conversations]
    prompts = [prompt_ids(tokenizer, messages) for messages in conversations]
    for step in stream(engine, prompts, max_new_tokens=max_new_tokens, stop_ids=stops, sampler=Sampler()):
        for index, token in step:
            ids[index].append(token)
    return [_decode(tokenizer, answer) for answer in ids]


def find_checkpoint(path: Path) -> Path:
    """A checkpoint folder, or the newest one of a run folder.

    Raises:
        UserError: if there is neither.
    """
    if (path / "adapter_config.json").is_file():
        return path
    inside = checkpoints(path)
    if not inside:
        raise UserError(f"--adapters {path}: no adapter and no checkpoint there")
    return inside[-1]


def _precision(config: ChatConfig, args: Mapping[str, Any]) -> str:
    """What the user asks for now, else what was asked for in training.

    Not what `auto` became then: that was for the machine of the training.
    """
    if config.base_precision != "auto":
        return config.base_precision
    asked = args.get("asked") or args.get("config", {})
    return str(asked.get("base_precision", "auto"))


def _open_base(
    config: ChatConfig, checkpoint: Path | None, args: Mapping[str, Any], say: Callable[[str], None]
) -> LocalModel:
    """The user's model, else the very one that the adapter was trained on.

    Raises:
        UserError: no base is known, or what is found under its name now has other weights.
    """
    trained, base = args.get("config", {}), args.get("base", {})
    source, revision, name = config.model_source, config.revision, config.model
    if name is None:
        assert checkpoint is not None, "the schema asks for a model or an adapter"
        name = trained.get("model") or _base_of_peft(checkpoint)
        if source == "auto":
            recorded_source = base.get("source")
            source = recorded_source if recorded_source in get_args(Source) else source
        on_hub = source in ("hf", "modelscope")
        revision = revision or (base.get("revision") if on_hub else None) or trained.get("revision")
    if not name:
        raise UserError(f"{config.adapters} does not say which base it was trained on; give --model")
    model = open_model(name, source=source, revision=revision, say=say)
    before, now = base.get("fingerprint"), model.fingerprint
    if before is None or before == now:
        return model
    differs = (
        f"{config.adapters} was trained on {trained.get('model')} (from {base.get('source')}, fingerprint "
        f"{before[:12]}), and {name} (from {model.source}, fingerprint {now[:12]}) is not the same"
    )
    if config.model is None:
        raise UserError(f"{differs}; give the --revision of then, or --model {name} to use it all the same")
    say(f"{differs}; answers may suffer")
    return model


def _base_of_peft(checkpoint: Path) -> str | None:
    """The base that PEFT's config names."""
    config = json.loads((checkpoint / "adapter_config.json").read_text(encoding="utf-8"))
    name: str | None = config.get("base_model_name_or_path")
    return name


def _decode(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True))
