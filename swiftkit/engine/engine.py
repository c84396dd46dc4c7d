"""The engine: forward and backward over micro-batches. Everything above it sees only this."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from swiftkit.engine.batch import Batch
from swiftkit.engine.build import adapter_parameters, build_model
from swiftkit.engine.families import logit_rule
from swiftkit.engine.fused.adopt import FusedDecoderLayer
from swiftkit.engine.fused.base import BaseKind
from swiftkit.engine.fused.projection import FrozenLinear
from swiftkit.engine.head import Head
from swiftkit.engine.linear import Linear
from swiftkit.errors import UserError
from swiftkit.formats.peft import LoraSpec

Sums = dict[str, Tensor]
Loss = Callable[[Head, Tensor, Batch], Sums]
"""A method's loss: (head, hidden [tokens, hidden], batch) to sums over the batch, `loss` among them."""


class Engine:
    """A model that trains and answers.

    Args:
        model: what `build_model` makes.
        base: storage of its frozen weights; with FP8 products the head's gradient is one as well.
    """

    def __init__(self, model: nn.Module, base: BaseKind = "plain"):
        self.model = model
        self.config = model.config
        weight: Tensor = model.get_output_embeddings().weight  # type: ignore[operator]
        self.head = Head(weight, logit_rule(model.config), fp8="fp8" in base)
        self.device = self.head.weight.device
        fused = any(isinstance(module, FusedDecoderLayer) for module in model.modules())
        self.layers = "fused" if fused else "plain"  # for people
        self.parameters = adapter_parameters(model)  # the trained tensors by name
        self.linear_names = [
            name for name, module in model.named_modules() if isinstance(module, Linear | FrozenLinear)
        ]

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        dtype: torch.dtype,
        device: torch.device,
        lora: LoraSpec | None = None,
        seed: int = 42,
        base: BaseKind = "plain",
        fused: bool | None = None,
        tokens: int = 0,
    ) -> Engine:
        """Build from a model folder; see `build_model`."""
        model = build_model(
            folder, dtype=dtype, device=device, lora=lora, seed=seed, base=base, fused=fused, tokens=tokens
        )
        return cls(model, base)

    @torch.no_grad()
    def load_adapter(self, tensors: Mapping[str, Tensor]) -> None:
        """Set the adapter's values; names and shapes are those of `parameters`."""
        if tensors.keys() != self.parameters.keys():
            odd = sorted(tensors.keys() ^ self.parameters.keys())
            raise UserError(f"the adapter does not fit this model: {odd[0]} is only in one of the two")
        for name, tensor in tensors.items():
            if tensor.shape != self.parameters[name].shape:
                raise UserError(
                    f"the adapter does not fit this model: {name} is {list(tensor.shape)}, "
                    f"the model asks for {list(self.parameters[name].shape)}"
                )
            self.parameters[name].copy_(tensor)

    def hidden(self, batch: Batch) -> Tensor:
        """Last hidden states after the final norm, [tokens, hidden]."""
        inner = self.model.base_model
        output: Any = inner(  # type: ignore[operator]
            input_ids=batch.input_ids[None],
            position_ids=batch.position_ids[None],
            use_cache=False,
            attention_plan=batch.plan,
        )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def forward_backward(self, microbatches: Iterable[Batch], loss: Loss, *, denominator: float) -> Sums:
        """Add the gradients of sum(loss) / denominator to the parameters.

        Args:
            microbatches: the batches of one optimizer step.
            loss: the method's loss.
            denominator: of the whole step, for example its trained tokens, so that a step does not depend on
                how it is cut into micro-batches.

        Raises:
            UserError: when the device's memory is full.

        Returns:
            The method's sums over all micro-batches, still on the device.
        """
        totals: Sums = {}
        try:
            for batch in microbatches:
                sums = loss(self.head, self.hidden(batch), batch)
                (sums["loss"] / denominator).backward()
                _add(totals, sums)
        except torch.OutOfMemoryError as full:
            raise UserError(_memory_is_full(self.device)) from full
        return totals

    @torch.no_grad()
    def evaluate(self, microbatches: Iterable[Batch], loss: Loss) -> Sums:
        """The method's sums without gradients, dropout off."""
        training = self.model.training
        self.model.eval()
        totals: Sums = {}
        try:
            for batch in microbatches:
                _add(totals, loss(self.head, self.hidden(batch), batch))
        finally:
            self.model.train(training)
        return totals


def _memory_is_full(device: torch.device) -> str:
    free, total = torch.cuda.mem_get_info(device)
    return (
        f"the GPU's memory is full ({(total - free) / 2**30:.1f} of {total / 2**30:.1f} GiB in use); make "
        "--per_device_train_batch_size or --max_length smaller, or take --base_precision fp8 or nf4"
    )


def _add(totals: Sums, sums: Sums) -> None:
    for name, value in sums.items():
        value = value.detach().double()
        totals[name] = totals[name] + value if name in totals else value
