"""Decoder layers through torch.compile, for families that have no fused ones."""

from __future__ import annotations

import torch
from torch import nn


def compile_layers(model: nn.Module, *, backend: str = "inductor") -> None:
    """Compile every decoder layer of a transformers model; all layers of a kind share their graphs.

    Rows of one length reuse what the first step compiled, whatever documents they hold: the attention is left
    out (see `attention.register`).

    Args:
        model: not fused, weights loaded.
        backend: of torch.compile.
    """
    for layer in model.base_model.layers.children():  # type: ignore[union-attr]
        layer.forward = torch.compile(layer.forward, backend=backend, dynamic=False)
