"""Talk to a model: from a checkpoint or a name to streamed answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from swiftkit.config import ChatConfig
from swiftkit.data import Message
from swiftkit.data.tokenizer import prompt_ids
from swiftkit.engine import Engine
from swiftkit.errors import UserError
from swiftkit.generate.batch import generate
from swiftkit.generate.decode import stream
from swiftkit.generate.find import find
from swiftkit.generate.load import prepare_model
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
        where = find(adapters=config.adapters, model=config.model)
        ready = prepare_model(where, config, say=say)
        if config.system is None:
            config = config.with_changes(system=where.trained.get("system"))
        return cls(ready.load(), ready.tokenizer, stops=ready.stops, config=config)

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
    prompts = [prompt_ids(tokenizer, messages) for messages in conversations]
    answers = generate(engine, prompts, max_new_tokens=max_new_tokens, stop_ids=stops)
    return [_decode(tokenizer, answer.ids) for answer in answers]


def _decode(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True))
