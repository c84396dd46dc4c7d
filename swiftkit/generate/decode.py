"""Prompts in, tokens out, one step for all sequences that run; a slot that is done takes the next prompt."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Literal

import torch

from swiftkit.engine import AttentionPlan, Batch, Engine
from swiftkit.generate.cache import SlotCache
from swiftkit.generate.sampling import Sampler

TOKENS_AT_ONCE = {"cuda": 16_384, "cpu": 4_096}  # of prompts that one step reads

Ends = Callable[[int, list[int]], bool]
"""(prompt's index, tokens so far) to whether the answer is over, its last token included."""


@dataclass(frozen=True, slots=True)
class Step:
    """What one step brought.

    Attributes:
        told: (prompt's index, new token); stop tokens are not told.
        ended: (prompt's index, why its answer is over: it stopped, or it is as long as it may be).
    """

    told: list[tuple[int, int]]
    ended: list[tuple[int, Literal["stop", "length"]]]


@dataclass(slots=True)
class _Running:
    """A prompt with its answer, in a slot: what the next step reads, and what was read before."""

    index: int
    slot: int
    feed: list[int]
    longest: int  # tokens that the answer may have
    read: int = 0
    answer: list[int] = field(default_factory=list)
    stopped: bool = False

    @property
    def over(self) -> bool:
        return self.stopped or len(self.answer) == self.longest


def stream(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_ids: Collection[int],
    sampler: Sampler,
) -> Iterator[list[tuple[int, int]]]:
    """Yield, step by step, (prompt's index, new token) of each sequence that still runs; see `decode`."""
    steps = decode(
        engine,
        prompts,
        max_new_tokens=[max_new_tokens] * len(prompts),
        stop_ids=stop_ids,
        sampler=sampler,
        slots=len(prompts),
    )
    with closing(steps):
        for step in steps:
            if step.told:
                yield step.told


@torch.no_grad()
def decode(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: Sequence[int],
    stop_ids: Collection[int],
    sampler: Sampler,
    slots: int,
    ends: Ends | None = None,
) -> Generator[Step, None, None]:
    """Continuous batching (Yu et al. 2022, "Orca"): a sequence that ends makes room for the next prompt.

    Args:
        engine: answers in the mode without dropout.
        prompts: token ids, each at least one.
        max_new_tokens: longest answer of each prompt, at least 1.
        stop_ids: a sequence ends before one of these.
        sampler: chooses tokens.
        slots: sequences that run at once; the others wait, in order.
        ends: a further way for an answer to end.
    """
    capacity = max((len(p) + most for p, most in zip(prompts, max_new_tokens, strict=True)), default=0)
    cache = SlotCache(slots=slots, capacity=capacity)
    waiting, free = deque(range(len(prompts))), list(range(slots))
    running: list[_Running] = []
    was_training = engine.model.training
    engine.model.eval()
    try:
        while waiting or running:
            budget = TOKENS_AT_ONCE[engine.device.type] - len(running)
            # A prompt that is longer than all that a step reads is read alone.
            while waiting and free and (len(prompts[waiting[0]]) <= budget or not running):
                index = waiting.popleft()
                budget -= len(prompts[index])
                running.append(_Running(index, free.pop(), list(prompts[index]), max_new_tokens[index]))
            told = _advance(running, _next(engine, running, cache, sampler), stop_ids, ends)
            over = [sequence for sequence in running if sequence.over]
            for sequence in over:
                running.remove(sequence)
                cache.clear(sequence.slot)
                free.append(sequence.slot)
            yield Step(told, [(one.index, "stop" if one.stopped else "length") for one in over])
    finally:
        engine.model.train(was_training)


def _advance(
    running: Sequence[_Running], tokens: Sequence[int], stop_ids: Collection[int], ends: Ends | None
) -> list[tuple[int, int]]:
    """Give each sequence its new token, and tell those that are no stop tokens."""
    told = []
    for sequence, token in zip(running, tokens, strict=True):
        sequence.read += len(sequence.feed)
        sequence.feed = [token]
        if token in stop_ids:
            sequence.stopped = True
            continue
        sequence.answer.append(token)
        sequence.stopped = ends is not None and ends(sequence.index, sequence.answer)
        told.append((sequence.index, token))
    return told


def _next(engine: Engine, running: Sequence[_Running], cache: SlotCache, sampler: Sampler) -> list[int]:
    """Read the new tokens of each sequence as one packed row and choose what follows."""
    device = engine.device
    ids = [token for sequence in running for token in sequence.feed]
    positions = [sequence.read + i for sequence in running for i in range(len(sequence.feed))]
    store = cache.select([sequence.slot for sequence in running])
    plan = AttentionPlan.of([len(sequence.feed) for sequence in running], device=device, store=store)
    last = plan.cu_seqlens[1:].long() - 1
    batch = Batch(
        input_ids=torch.tensor(ids, device=device),
        position_ids=torch.tensor(positions, device=device),
        positions=last,
        targets=last.new_empty(0),
        plan=plan,
    )
    with torch.compiler.set_stance("force_eager"):  # every row has another length
        hidden = engine.hidden(batch)
    chosen: list[int] = sampler(engine.head.logits(hidden[last])).tolist()
    return chosen
