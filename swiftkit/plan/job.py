"""What is trained, on what: the part of a plan that does not depend on the layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from swiftkit.plan.shape import ModelShape

Base = Literal["bf16", "fp8", "nf4", "nf4-fp8"]
STORED = {"bf16": 2.0, "fp8": 1.0, "nf4": 0.5 + 4 / 64, "nf4-fp8": 0.5 + 4 / 64}
"""Bytes of a stored weight, NF4 with its float32 scale of 64; the second copies of FP8 come on top."""
ACTIVATION = 2.0
"""Bytes of a number in an activation."""
ADAM = 12.0
"""Bytes of AdamW's float32 value and two moments of a trained number (an adapter's value is its weight)."""
REDUCED = 4.0
"""Bytes of a gradient on its way: sums over GPUs are made in float32."""


@dataclass(frozen=True)
class Job:
    """One kind of training.

    Args:
        tuner: an adapter on every linear layer of the blocks, or every weight.
        base: storage of the weights of the blocks; a whole model is trained in bf16.
        rank: of the adapter.
        sequence: tokens of a window.
        tokens_per_gpu: of an optimizer step, for each GPU: the global batch grows with the GPUs, and is the
            same for every layout of them.
    """

    tuner: Literal["lora", "full"] = "lora"
    base: Base = "fp8"
    rank: int = 16
    sequence: int = 4096
    tokens_per_gpu: int = 16_384

    def __post_init__(self) -> None:
        assert self.tuner == "lora" or self.base == "bf16", "what is trained is not stored in 8 or 4 bits"
        assert self.tokens_per_gpu % self.sequence == 0, "a GPU's tokens are whole windows"

    @property
    def products_in_fp8(self) -> bool:
        """Whether matrix products of the blocks are in FP8."""
        return self.base in ("fp8", "nf4-fp8")

    def trained(self, shape: ModelShape) -> int:
        """Numbers that the optimizer moves."""
        return shape.weights if self.tuner == "full" else sum(shape.adapter_weights(self.rank))


@dataclass(frozen=True)
class Saving:
    """What is given up for memory.

    Args:
        two_copies: of an FP8 weight, one for each direction; without, the backward pass transposes.
        keep_mlp: of gate and up, what they put out; without, they are multiplied again.
        keep_layer: of a block, what its backward needs; without, only its input, and the block runs twice.
    """

    name: str
    two_copies: bool = True
    keep_mlp: bool = True
    keep_layer: bool = True


NO_SAVING = Saving("none")
SAVINGS = (
    NO_SAVING,
    Saving("one copy", two_copies=False),
    Saving("gate/up again", two_copies=False, keep_mlp=False),
    Saving("checkpointing", two_copies=False, keep_mlp=False, keep_layer=False),
)
"""From the fastest to the smallest, as the fused layers choose them."""


@dataclass(frozen=True)
class Cut:
    """How a step of one data-parallel group is cut.

    Args:
        micro_tokens: that go through the model at once.
        saving: of memory, while they do.
    """

    micro_tokens: int
    saving: Saving
