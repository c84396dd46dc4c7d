"""Talk to a model: from a checkpoint or a name to streamed answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swiftkit.config import ChatConfig
from swiftkit.data import Message
from swiftkit.data.tokenizer import load_tokenizer, prompt_ids, stop_ids
from swiftkit.engine import Engine
from swiftkit.engine.placement import place
from swiftkit.errors import UserError
from swiftkit.formats.named import open_model
from swiftkit.formats.peft import load_adapter
from swiftkit.generate.decode import stream
from swiftkit.generate.sampling import Sampler

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
        known: dict[str, Any] = {} if checkpoint is None else _settings(checkpoint)
        name = config.model or known.get("model")
        if name is None:
            raise UserError(f"{config.adapters} does not say which base it was trained on; give --model")
        wanted = (
            config.base_precision if config.base_precision != "auto" else known.get("base_precision", "auto")
        )
        placement = place(config.device, wanted, known.get("nf4_compute", "bf16"))
        model = open_model(
            name,
            source=known.get("model_source", "auto") if config.model is None else config.model_source,
            revision=config.revision or known.get("revision"),
            say=say,
        )
        spec, tensors = (None, {}) if checkpoint is None else load_adapter(checkpoint)
        engine = Engine.load(
            model.path, dtype=placement.dtype, device=placement.device, base=placement.base, lora=spec
        )
        engine.load_adapter(tensors)
        config = config.with_changes(system=known.get("system") if config.system is None else config.system)
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
    inside = [p for p in path.glob("checkpoint-*") if p.name.removeprefix("checkpoint-").isdigit()]
    if not inside:
        raise UserError(f"--adapters {path}: no adapter and no checkpoint there")
    return max(inside, key=lambda p: int(p.name.removeprefix("checkpoint-")))


def _settings(checkpoint: Path) -> dict[str, Any]:
    """The training config beside an adapter of ours; of another tool's, the base that PEFT's config names."""
    ours = checkpoint / "args.json"
    if ours.is_file():
        config: dict[str, Any] = json.loads(ours.read_text(encoding="utf-8"))["config"]
        return config
    peft = json.loads((checkpoint / "adapter_config.json").read_text(encoding="utf-8"))
    return {"model": peft.get("base_model_name_or_path")}


def _decode(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True))
