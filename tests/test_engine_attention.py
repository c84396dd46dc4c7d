"""Attention of one document and of a row of documents, against a plain reference in float64."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from swiftkit.engine.attention import AttentionPlan, Rules, _varlen, attend, by_segment, segment_attention

CPU = torch.device("cpu")


def reference(q: Tensor, k: Tensor, v: Tensor, rules: Rules) -> Tensor:
    """One query after another, as the definition says."""
    heads, queries, _ = q.shape
    keys = k.shape[1]
    output = torch.zeros(heads, queries, v.shape[-1], dtype=torch.float64)
    for head, row in itertools.product(range(heads), range(queries)):
        shared = head // (heads // k.shape[0])
        here = keys - queries + row
        first = 0 if rules.window is None else max(0, here - rules.window + 1)
        seen = range(first, here + 1)
        scores = [float(q[head, row].double() @ k[shared, j].double()) * rules.scaling for j in seen]
        if rules.softcap is not None:
            scores = [rules.softcap * float(torch.tanh(torch.tensor(s / rules.softcap))) for s in scores]
        sink = [] if rules.sinks is None else [float(rules.sinks[head])]
        weights = torch.tensor([*scores, *sink], dtype=torch.float64).softmax(0)
        for weight, j in zip(weights, seen, strict=False):
            output[head, row] += weight * v[shared, j].double()
    return output


def draw(heads: int, kv_heads: int, queries: int, keys: int, size: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.randn(heads, queries, size),
        torch.randn(kv_heads, keys, size),
        torch.randn(kv_heads, keys, size),
    )


@pytest.mark.parametrize("window", [None, 1, 3, 50])
@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("sinks", [False, True])
def test_a_document_equals_the_plain_reference(
    seed: int, window: int | None, softcap: float | None, sinks: bool
) -> None:
    for (heads, kv_heads), (queries, keys) in itertools.product(
        [(2, 2), (4, 2), (6, 1)], [(7, 7), (1, 1), (1, 9), (4, 9)]
    ):
        rules = Rules(0.4, window, softcap, torch.randn(heads) if sinks else None)
        q, k, v = draw(heads, kv_heads, queries, keys)
        ours = segment_attention(q, k, v, rules)
        torch.testing.assert_close(ours.double(), reference(q, k, v, rules), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("rules", [Rules(0.4), Rules(0.4, 3), Rules(0.4, 4, 0.7, torch.tensor([0.3, -1.0]))])
def test_the_gradient_equals_that_of_the_masked_softmax(seed: int, rules: Rules) -> None:
    q, k, v = (t.requires_grad_() for t in draw(2, 1, 9, 9))
    weights = torch.randn(2, 9, 8)
    ours = torch.autograd.grad((segment_attention(q, k, v, rules) * weights).sum(), (q, k, v))
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    theirs = torch.autograd.grad((masked(*wide, rules) * weights).sum(), wide)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.double(), other, rtol=1e-5, atol=5e-6)


def masked(q: Tensor, k: Tensor, v: Tensor, rules: Rules) -> Tensor:
    scores = q @ k.expand(q.shape[0], -1, -1).transpose(1, 2) * rules.scaling
    if rules.softcap is not None:
        scores = rules.softcap * torch.tanh(scores / rules.softcap)
    away = torch.arange(q.shape[1])[:, None] - torch.arange(k.shape[1])[None]
    hidden = (away < 0) | (away >= (rules.window or 10**9))
    scores = scores.masked_fill(hidden, float("-inf"))
    if rules.sinks is not None:
        scores = torch.cat([scores, rules.sinks.double()[:, None, None].expand(-1, q.shape[1], 1)], -1)
    return scores.softmax(-1)[..., : k.shape[1]] @ v


def test_a_row_is_its_documents_apart(seed: int) -> None:
    lengths = [5, 1, 8, 3]
    q, k, v = draw(4, 2, sum(lengths), sum(lengths))
    plan = AttentionPlan.of(lengths, device=CPU)
    assert plan.cu_seqlens.tolist() == [0, 5, 6, 14, 17] and plan.cu_seqlens.dtype == torch.int32
    layer = torch.nn.Module()
    layer.layer_idx = 0
    together, weights = attend(layer, q[None], k[None], v[None], scaling=0.4, attention_plan=plan)
    assert weights is None and together.shape == (1, 17, 4, 8)
    start = 0
    for length in lengths:
        own = slice(start, start + length)
        alone = segment_attention(q[:, own], k[:, own], v[:, own], Rules(0.4))
        torch.testing.assert_close(together[0, own].transpose(0, 1), alone, rtol=0, atol=0)
        start += length


@pytest.mark.gpu
@pytest.mark.parametrize("prefixes", [(), (-1, -1, 0, 0)], ids=["apart", "shared"])
@pytest.mark.parametrize("window", [None, 1, 33])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (9, 3)])
def test_the_fused_row_equals_its_documents_on_a_gpu(
    seed: int, window: int | None, heads: tuple[int, int], prefixes: tuple[int, ...]
) -> None:
    lengths = [5, 1, 130, 64]
    device = torch.device("cuda")
    plan = AttentionPlan.of(lengths, device=device, prefixes=prefixes)
    tensors = [t.to(device, torch.bfloat16).requires_grad_() for t in draw(*heads, 200, 200, size=64)]
    rules = Rules(64**-0.5, window)
    fused = _varlen(*tensors, plan, rules).transpose(0, 1)
    wide = [t.detach().float().requires_grad_() for t in tensors]
    plain = by_segment(*wide, plan, rules, 0)
    torch.testing.assert_close(fused.float(), plain, rtol=2e-2, atol=2e-2)
    upstream = torch.randn_like(plain)
    ours = torch.autograd.grad(fused, tensors, upstream.to(fused.dtype))
    theirs = torch.autograd.grad(plain, wide, upstream)
    largest = max(other.norm() for other in theirs)  # a window of 1 leaves q and k without a gradient
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine.float() - other).norm() < 2e-2 * max(other.norm(), 0.1 * largest)
