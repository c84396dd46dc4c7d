"""The memory policy: the fastest that fits, and a clear word where none does."""

from __future__ import annotations

import pytest

from swiftkit.engine.fused.layer import LayerShape
from swiftkit.engine.fused.memory import MemoryPolicy, choose, kept_bytes, weight_bytes
from swiftkit.engine.kernels.rope import Heads
from swiftkit.errors import UserError

GIB = 2**30
LLAMA_8B = LayerShape(4096, 14336, Heads(32, 8, 128))


def chosen(free_gib: float) -> MemoryPolicy:
    return choose(LLAMA_8B, "fp8", layers=32, tokens=16_384, free=free_gib * GIB, other=3 * GIB)


def test_savings_are_taken_one_by_one() -> None:
    assert chosen(139) == MemoryPolicy(two_copies=True, recompute_mlp=False)
    assert chosen(79) == MemoryPolicy(two_copies=False, recompute_mlp=False)
    assert chosen(44) == MemoryPolicy(two_copies=False, recompute_mlp=True)


def test_what_cannot_fit_is_said_in_numbers() -> None:
    with pytest.raises(
        UserError, match=r"does not fit on the GPU: 7 GiB of frozen weights, .* 24 GiB are free"
    ):
        chosen(24)


def test_bytes_of_a_layer() -> None:
    """By hand: 218 M weights, and 128 columns of carried channels beside each of four products."""
    weights = 4096 * (6144 + 4096 + 3 * 14336)
    carried = 128 * (6144 + 4096 + 2 * 14336 + 4096)
    assert weight_bytes(LLAMA_8B, "plain", two_copies=True) == 2 * weights
    assert weight_bytes(LLAMA_8B, "fp8", two_copies=False) == weights + carried
    assert weight_bytes(LLAMA_8B, "fp8", two_copies=True) == 2 * weights + carried
    assert weight_bytes(LLAMA_8B, "fp8-backward", two_copies=True) == 3 * weights
    kept, less = (kept_bytes(LLAMA_8B, "fp8", tokens=1, recompute_mlp=again) for again in (False, True))
    assert kept - less == 5 * 14336 + 128
