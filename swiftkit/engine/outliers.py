"""Once, after loading: FP8 products choose the input channels that they carry (see `kernels.outliers`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from swiftkit.engine.attention import AttentionPlan
from swiftkit.engine.fused.base import Fp8Base, Nf4Base
from swiftkit.engine.fused.layer import FusedLlamaLayer
from swiftkit.engine.linear import Linear

TOKENS = 256


def choose_carried(model: nn.Module, *, vocabulary: int, device: torch.device) -> None:
    """Send random tokens through the model and let every FP8 product choose.

    The channels that stand out are the model's own and hardly depend on the text: those of random tokens
    serve GSM8K almost as well as its own. The tokens are always the same, so a model always chooses alike.

    Args:
        model: with its weights; adapters still give zero.
        vocabulary: tokens are drawn below this.
        device: of the model.
    """
    modules = list(model.modules())
    observe(modules)
    send_random_tokens(model, vocabulary=vocabulary, device=device)
    carry_largest(modules)
    for module in modules:
        if isinstance(module, FusedLlamaLayer | Linear):
            module.name_weights()


def observe(modules: Iterable[nn.Module]) -> None:
    """Let their FP8 products look at the rows that go through from now on."""
    for base in _bases(modules):
        base.carried.observe()


@torch.no_grad()
def send_random_tokens(model: nn.Module, *, vocabulary: int, device: torch.device) -> None:
    """A forward over tokens below `vocabulary`, always the same."""
    tokens = torch.randint(0, vocabulary, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    model.base_model(  # type: ignore[operator]
        input_ids=tokens.to(device),
        position_ids=torch.arange(TOKENS, device=device)[None],
        use_cache=False,
        attention_plan=AttentionPlan.of((TOKENS,), device=device),
    )


@torch.no_grad()
def carry_largest(modules: Iterable[nn.Module]) -> None:
    """Let their FP8 products choose, by what they saw."""
    for base in _bases(modules):
        base.carry()


def _bases(modules: Iterable[nn.Module]) -> list[Fp8Base | Nf4Base]:
    found: list[Any] = []
    for module in modules:
        if isinstance(module, FusedLlamaLayer):
            found += [projection.base for projection in module.projections]
        elif isinstance(module, Linear):
            found.append(module.base)
    return [base for base in found if isinstance(base, Fp8Base | Nf4Base) and base.fp8]
