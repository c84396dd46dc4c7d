"""Our linear layers: a frozen base weight, and the same with a LoRA adapter beside it."""

from __future__ import annotations

import hashlib
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swiftkit.formats.peft import LoraSpec


class Linear(nn.Module):
    """A frozen linear layer: y = x W^T + b."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.out_features, self.in_features = linear.weight.shape
        self.weight = linear.weight.requires_grad_(False)
        self.bias = linear.bias if linear.bias is None else linear.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features]."""
        return F.linear(x, self.weight, self.bias)


class LoraLinear(Linear):
    """y = x W^T + b + (alpha / rank) dropout(x) A^T B^T, with W and b frozen.

    A [rank, in] and B [out, rank] stay in float32, whatever the base's precision is: they are what the
    optimizer updates. They are cast to the input's type for the product.
    """

    def __init__(self, linear: nn.Linear, spec: LoraSpec):
        super().__init__(linear)
        self.scaling = spec.alpha / spec.rank
        self.dropout = spec.dropout
        meta = torch.device("meta")
        self.lora_A = nn.Parameter(torch.empty(spec.rank, self.in_features, dtype=torch.float32, device=meta))
        self.lora_B = nn.Parameter(
            torch.empty(self.out_features, spec.rank, dtype=torch.float32, device=meta)
        )

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features]."""
        inner = F.linear(F.dropout(x, self.dropout, self.training), self.lora_A.to(x.dtype))  # [..., rank]
        return super().forward(x) + F.linear(inner, self.lora_B.to(x.dtype)) * self.scaling

    def reset_adapter(self, *, name: str, seed: int, device: torch.device) -> None:
        """Draw A as PEFT does (Kaiming uniform, a = sqrt 5) and set B to zero.

        The draw depends on the layer's name and the run's seed alone, so that every order of building and
        every number of processes starts from the same adapter.
        """
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        bound = 1 / math.sqrt(self.in_features)
        first = torch.empty(self.lora_A.shape).uniform_(-bound, bound, generator=generator)
        self.lora_A = nn.Parameter(first.to(device))
        self.lora_B = nn.Parameter(torch.zeros(self.lora_B.shape, device=device))
