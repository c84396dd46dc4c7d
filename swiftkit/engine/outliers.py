"""Once, after loading: FP8 products choose the input channels that they carry (see `kernels.outliers`)."""

from __future__ import annotations

import torch
from torch import nn

from swiftkit.engine.attention import AttentionPlan
from swiftkit.engine.fused.base import Fp8Base, Nf4Base
from swiftkit.engine.fused.layer import FusedLlamaLayer
from swiftkit.engine.linear import Linear

TOKENS = 256


@torch.no_grad()
def choose_carried(model: nn.Module, *, vocabulary: int, device: torch.device) -> None:
    """Send random tokens through the model and let every FP8 product choose.

    The channels that stand out are the model's own and hardly depend on the text: those of random tokens
    serve GSM8K almost as well as its own. The tokens are always the same, so a model always chooses alike.

    Args:
        model: with its weights; adapters still give zero.
        vocabulary: tokens are drawn below this.
        device: of the model.
    """
    owners = [module for module in model.modules() if isinstance(module, FusedLlamaLayer | Linear)]
    bases = [base for owner in owners for base in _bases(owner)]
    for base in bases:
        base.carried.observe()
    tokens = torch.randint(0, vocabulary, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    model.base_model(  # type: ignore[operator]
        input_ids=tokens.to(device),
        position_ids=torch.arange(TOKENS, device=device)[None],
        use_cache=False,
        attention_plan=AttentionPlan.of((TOKENS,), device=device),
    )
    for base in bases:
        base.carry()
    for owner in owners:
        owner.name_weights()


def _bases(owner: FusedLlamaLayer | Linear) -> list[Fp8Base | Nf4Base]:
    all_of_it = [p.base for p in owner.projections] if isinstance(owner, FusedLlamaLayer) else [owner.base]
    return [base for base in all_of_it if isinstance(base, Fp8Base | Nf4Base) and base.fp8]
