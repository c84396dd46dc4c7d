"""Keys and values of what was already read, by slots: one slot holds one conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class SlotCache:
    """Room for `capacity` tokens in each slot; memory for a layer is taken when its first keys arrive.

    Args:
        slots: conversations held at once.
        capacity: tokens a slot can hold.
    """

    def __init__(self, *, slots: int, capacity: int):
        self.slots = slots
        self.capacity = capacity
        self._active: Sequence[int] = range(slots)
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._lengths: dict[int, list[int]] = {}

    def select(self, slots: Sequence[int]) -> SlotCache:
        """Which slot each segment of the next plan means."""
        self._active = slots
        return self

    def clear(self, slot: int) -> None:
        """Forget a conversation, so that another one can have its slot."""
        for lengths in self._lengths.values():
            lengths[slot] = 0

    def extend(self, layer: int, segment: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append [kv_heads, new, head_dim] and return all keys and values of that segment's slot."""
        if layer not in self._keys:
            heads, _, width = key.shape
            shape = (self.slots, heads, self.capacity)
            self._keys[layer] = torch.empty(*shape, width, dtype=key.dtype, device=key.device)
            self._values[layer] = torch.empty(*shape, value.shape[2], dtype=value.dtype, device=value.device)
            self._lengths[layer] = [0] * self.slots
        slot = self._active[segment]
        start = self._lengths[layer][slot]
        stop = start + key.shape[1]
        self._keys[layer][slot, :, start:stop] = key
        self._values[layer][slot, :, start:stop] = value
        self._lengths[layer][slot] = stop
        return self._keys[layer][slot, :, :stop], self._values[layer][slot, :, :stop]


def bytes_per_token(config: Any, dtype: torch.dtype) -> int:
    """What one token takes in a cache, over all layers.

    Args:
        config: the model's transformers config.
        dtype: of keys and values.
    """
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * width * dtype.itemsize
