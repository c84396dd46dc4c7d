"""Many answers: as many sequences at once as memory has room for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from swiftkit.engine import Engine
from swiftkit.generate.cache import bytes_per_token
from swiftkit.generate.decode import Ends, decode
from swiftkit.generate.sampling import Sampler

FinishReason = Literal["stop", "length", "window"]
# Attention goes from row to row, so a step takes longer with each of them.
MOST_ROWS = {"cuda": 64, "cpu": 16}
CPU_CACHE_BYTES = 1 << 30
GPU_SHARE = 0.5  # of the free memory; the rest is for activations and logits


@dataclass(slots=True)
class Answer:
    """What followed a prompt.

    Attributes:
        ids: without the stop token.
        finish_reason: `stop` (a stop token, or a text that ends it), `length` (max_new_tokens), or `window`
            (the model reads no more; with a prompt that fills the window there are no ids).
    """

    ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason = "stop"


def generate(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int | Sequence[int],
    stop_ids: Collection[int],
    window: int | None = None,
    slots: int | Literal["auto"] = "auto",
    sampler: Sampler | None = None,
    ends: Ends | None = None,
    on_step: Callable[[int, int], None] | None = None,
) -> list[Answer]:
    """The answer to each prompt, in order.

    Args:
        engine: the model.
        prompts: token ids, each at least one.
        max_new_tokens: longest answer, of all or of each prompt.
        stop_ids: an answer ends before one of these.
        window: tokens that the model can read, prompt and answer together; None is no limit.
        slots: sequences at once; auto is `rows_at_once`.
        sampler: greedy when left out.
        ends: see `decode`.
        on_step: told after each step how many answers ended, and how many tokens came.
    """
    asked = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else list(max_new_tokens)
    room = [
        most if window is None else max(0, min(most, window - len(prompt)))
        for prompt, most in zip(prompts, asked, strict=True)
    ]
    answers = [Answer(finish_reason="window") for _ in prompts]
    fitting = [index for index, tokens in enumerate(room) if tokens]
    if slots == "auto":
        slots = rows_at_once(engine, max((len(prompts[i]) + room[i] for i in fitting), default=1))
    steps = decode(
        engine,
        [prompts[index] for index in fitting],
        max_new_tokens=[room[index] for index in fitting],
        stop_ids=stop_ids,
        sampler=sampler or Sampler(),
        slots=min(slots, len(fitting)),
        ends=None if ends is None else lambda place, ids: ends(fitting[place], ids),
    )
    for step in steps:
        for place, token in step.told:
            answers[fitting[place]].ids.append(token)
        for place, reason in step.ended:
            index = fitting[place]
            cut = reason == "length" and room[index] < asked[index]
            answers[index].finish_reason = "window" if cut else reason
        if on_step is not None:
            on_step(len(step.ended), len(step.told))
    return answers


def rows_at_once(engine: Engine, tokens: int) -> int:
    """How many sequences of this many tokens the memory holds, at most MOST_ROWS and at least one."""
    size = tokens * bytes_per_token(engine.config, engine.head.weight.dtype)
    room = CPU_CACHE_BYTES
    if engine.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(engine.device)
        unused = torch.cuda.memory_reserved(engine.device) - torch.cuda.memory_allocated(engine.device)
        room = int(GPU_SHARE * (free + unused))
    return max(1, min(MOST_ROWS[engine.device.type], room // size))
