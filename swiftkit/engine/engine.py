"""The engine: forward and backward over micro-batches. Everything above it sees only this."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from swiftkit.engine.batch import Batch
from swiftkit.engine.build import NewRows, build_model, is_tied, trained_parameters
from swiftkit.engine.families import logit_rule
from swiftkit.engine.fused.adopt import FusedDecoderLayer
from swiftkit.engine.fused.base import BaseKind
from swiftkit.engine.fused.projection import FrozenLinear
from swiftkit.engine.head import Head
from swiftkit.engine.linear import Linear, LoraLinear
from swiftkit.errors import UserError
from swiftkit.formats.full import FullSpec
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
        # A copy in FP8 would not follow a head that is trained.
        self.head = Head(weight, logit_rule(model.config), fp8="fp8" in base and not weight.requires_grad)
        self.device = self.head.weight.device
        fused = any(isinstance(module, FusedDecoderLayer) for module in model.modules())
        self.layers = "fused" if fused else "plain"  # for people
        self.parameters = trained_parameters(model)
        self.tied = is_tied(model)  # whether the output head is the embedding
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
        full: FullSpec | None = None,
        seed: int = 42,
        base: BaseKind = "plain",
        fused: bool | None = None,
        tokens: int = 0,
        new_rows: NewRows | None = None,
    ) -> Engine:
        """Build from a model folder; see `build_model`."""
        model = build_model(
            folder,
            dtype=dtype,
            device=device,
            lora=lora,
            full=full,
            seed=seed,
            base=base,
            fused=fused,
            tokens=tokens,
            new_rows=new_rows,
        )
        return cls(model, base)

    @property
    def starts(self) -> dict[str, Tensor]:
        """What PiSSA took out of the base, by the names of the factors, on the host."""
        return {
            f"{name}.{factor}": tensor
            for name, module in self.model.named_modules()
            if isinstance(module, LoraLinear) and module.start is not None
            for factor, tensor in zip(("lora_A", "lora_B"), module.start, strict=True)
        }

    @torch.no_grad()
    def load_adapter(self, tensors: Mapping[str, Tensor]) -> None:
        """Set the values of what is trained; names and shapes are those of `parameters`."""
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
            whole = all(parameter.requires_grad for parameter in self.model.parameters())
            raise UserError(_memory_is_full(self.device, whole=whole)) from full
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


def _memory_is_full(device: torch.device, *, whole: bool) -> str:
    free, total = torch.cuda.mem_get_info(device)
    less = "--optim adamw_8bit or --tuner_type lora" if whole else "--base_precision fp8 or nf4"
    return (
        f"the GPU's memory is full ({(total - free) / 2**30:.1f} of {total / 2**30:.1f} GiB in use); make "
        f"--per_device_train_batch_size or --max_length smaller, or take {less}"
    )


def _add(totals: Sums, sums: Sums) -> None:
    for name, value in sums.items():
        value = value.detach().double()
        totals[name] = totals[name] + value if name in totals else value
