"""Prompts in, tokens out, one step for all sequences that still run."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch

from swiftkit.engine import AttentionPlan, Batch, Engine
from swiftkit.generate.cache import SlotCache
from swiftkit.generate.sampling import Sampler


@torch.no_grad()
def stream(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_ids: Collection[int],
    sampler: Sampler,
) -> Iterator[list[tuple[int, int]]]:
    """Yield, step by step, (prompt's index, new token) of each running sequence; stop tokens are not told.

    Args:
        engine: answers in the mode without dropout.
        prompts: token ids, each at least one.
        max_new_tokens: longest answer.
        stop_ids: a sequence ends before one of these.
        sampler: chooses tokens.
    """
    cache = SlotCache(slots=len(prompts), capacity=max(map(len, prompts)) + max_new_tokens)
    running = list(range(len(prompts)))
    feed = [list(prompt) for prompt in prompts]
    read = [0] * len(prompts)
    was_training = engine.model.training
    engine.model.eval()
    try:
        for _ in range(max_new_tokens):
            tokens = _next(
                engine, [feed[i] for i in running], [read[i] for i in running], running, cache, sampler
            )
            told = []
            for index, token in zip(list(running), tokens, strict=True):
                read[index] += len(feed[index])
                feed[index] = [token]
                if token in stop_ids:
                    running.remove(index)
                else:
                    told.append((index, token))
            if told:
                yield told
            if not running:
                return
    finally:
        engine.model.train(was_training)


def _next(
    engine: Engine,
    feed: list[list[int]],
    read: list[int],
    slots: list[int],
    cache: SlotCache,
    sampler: Sampler,
) -> list[int]:
    """Read the new tokens of each sequence as one packed row and choose what follows."""
    device = engine.device
    ids = [token for tokens in feed for token in tokens]
    positions = [start + i for start, tokens in zip(read, feed, strict=True) for i in range(len(tokens))]
    plan = AttentionPlan.of([len(t) for t in feed], device=device, store=cache.select(slots))
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
