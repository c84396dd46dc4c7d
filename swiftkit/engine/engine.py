"""The engine: forward and backward over micro-batches. Everything above it sees only this."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from swiftkit.engine.batch import Batch
from swiftkit.engine.build import NewRows, build_model, is_tied, trained_parameters
from swiftkit.engine.families import logit_rule
from swiftkit.engine.fused.adopt import FusedDecoderLayer
from swiftkit.engine.fused.base import BaseKind
from swiftkit.engine.fused.projection import FrozenLinear
from swiftkit.engine.head import Head
from swiftkit.engine.linear import Linear, LoraLinear
from swiftkit.engine.sharded import Sharded
from swiftkit.engine.tensor_parallel import TensorParallel
from swiftkit.engine.vocabulary import Vocabulary
from swiftkit.errors import UserError
from swiftkit.formats.full import FullSpec
from swiftkit.formats.peft import LoraSpec
from swiftkit.parallel.collectives import Ranks
from swiftkit.parallel.shards import Shard

T = TypeVar("T")
Sums = dict[str, Tensor]
Loss = Callable[[Head, Tensor, Batch], Sums]
"""A method's loss: (head, hidden [tokens, hidden], batch) to sums over the batch, `loss` among them."""


class Engine:
    """A model that trains and answers.

    Args:
        model: what `build_model` makes.
        base: storage of its frozen weights; with FP8 products the head's gradient is one as well.
        tp: how the model is cut over ranks; None where it is whole.
        sharded: how its weights lie in parts on ranks while they do not compute; None where they stay.
    """

    def __init__(
        self,
        model: nn.Module,
        base: BaseKind = "plain",
        tp: TensorParallel | None = None,
        sharded: Sharded | None = None,
    ):
        self.model = model
        self.tp, self.sharded = tp, sharded
        self.config = model.config
        head: nn.Module = model.get_output_embeddings()  # type: ignore[operator]
        # A copy in FP8 would not follow a head that is trained.
        self.head = Head(
            head.weight if sharded is None else head,
            logit_rule(model.config),
            fp8="fp8" in base and not head.weight.requires_grad,
            vocabulary=None if tp is None else Vocabulary(tp.cuts.vocabulary, tp.ranks),
        )
        self.device = self.head.weight.device
        fused = any(isinstance(module, FusedDecoderLayer) for module in model.modules())
        self.layers = "fused" if fused else "plain"  # for people
        self.parameters = trained_parameters(model) if sharded is None else sharded.parameters
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
        tp: dist.ProcessGroup | None = None,
        shard: DeviceMesh | None = None,
    ) -> Engine:
        """Build from a model folder; see `build_model`.

        With `tp`, a group of several ranks, each of them calls this, and everything after it, alike: same
        arguments, same batches. Batches, loss, hidden states and logits are whole on each; `parameters` are
        this rank's parts.

        With `shard`, see `Sharded`, each rank calls everything alike too, but with rows of its own; `hidden`
        equally often. Where all weights are trained, `parameters` are this rank's parts.
        """
        cut = None if tp is None or tp.size() == 1 else TensorParallel(Ranks.of(tp))
        sharded = None if shard is None or shard.size() == 1 else Sharded(shard)
        assert cut is None or sharded is None or full is None, "parts of parts of trained weights"
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
            tp=cut,
            sharded=sharded,
        )
        return cls(model, base, cut, sharded)

    @property
    def cut(self) -> TensorParallel | Sharded | None:
        """How what is trained is cut over ranks; None where each has all of it."""
        return self.sharded if self.parts else self.tp

    @property
    def parts(self) -> dict[str, Shard]:
        """This rank's part of each trained tensor that lies in parts, with its gradient and its moments."""
        return {} if self.sharded is None else self.sharded.shards

    @property
    def unsummed(self) -> list[Tensor]:
        """What is trained and has, after `forward_backward`, the gradient of this rank's rows alone."""
        return [parameter for name, parameter in self.parameters.items() if name not in self.parts]

    @property
    def starts(self) -> dict[str, Tensor]:
        """What PiSSA took out of the base, by the names of the factors, on the host."""
        return {
            f"{name}.{factor}": tensor
            for name, module in self.model.named_modules()
            if isinstance(module, LoraLinear) and module.start is not None
            for factor, tensor in zip(("lora_A", "lora_B"), module.start, strict=True)
        }

    def whole_parameters(self) -> dict[str, Tensor]:
        """The trained tensors as one process would have them; every rank of `cut` must call it."""
        cut = self.cut
        return {
            name: p.detach() if cut is None else cut.whole(name, p) for name, p in self.parameters.items()
        }

    def gradient_norm(self) -> Tensor:
        """The norm of the whole gradient, [] float32, on the device; every rank of `cut` must call it."""
        if self.cut is not None:
            return self.cut.gradient_norm(self.parameters)
        return gradient_norm(self.parameters.values())

    @torch.no_grad()
    def load_adapter(self, tensors: Mapping[str, Tensor]) -> None:
        """Set the values of what is trained; names and shapes are those of `whole_parameters`."""
        if tensors.keys() != self.parameters.keys():
            odd = sorted(tensors.keys() ^ self.parameters.keys())
            raise UserError(f"the adapter does not fit this model: {odd[0]} is only in one of the two")
        for name, tensor in tensors.items():
            parameter = self.parameters[name]
            shape = tuple(parameter.shape)
            shape = shape if self.cut is None else self.cut.whole_shape(name, shape)
            if tensor.shape != shape:
                raise UserError(
                    f"the adapter does not fit this model: {name} is {list(tensor.shape)}, "
                    f"the model asks for {list(shape)}"
                )
            parameter.copy_(tensor if self.cut is None else self.cut.own(name, tensor))

    def hidden(self, batch: Batch) -> Tensor:
        """Last hidden states after the final norm, [tokens, hidden]."""
        return self._hidden(batch) if self.sharded is None else self.sharded(lambda: self._hidden(batch))

    def _hidden(self, batch: Batch) -> Tensor:
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
                how it is cut into micro-batches. Ranks of `tp` have the same batches; their partial gradients
                are summed here, once, so call it once a step. Ranks of `shard` have batches of their own, any
                number of them; gradients of parts are summed over them here as well.

        Raises:
            UserError: when the device's memory is full.

        Returns:
            The method's sums over all micro-batches, still on the device.
        """
        totals: Sums = {}
        try:
            for batch in microbatches if self.sharded is None else self.sharded.passes(list(microbatches)):
                sums = self._pass(batch, loss)
                (sums["loss"] / denominator).backward()
                if batch is not None:
                    _add(totals, sums)
            if self.tp is not None:
                self.tp.reduce_gradients(self.parameters)
        except torch.OutOfMemoryError as full:
            whole = all(parameter.requires_grad for parameter in self.model.parameters())
            raise UserError(_memory_is_full(self.device, whole=whole)) from full
        return totals

    def evaluate(self, microbatches: Iterable[Batch], loss: Loss) -> Sums:
        """The method's sums without gradients, dropout off."""
        totals: Sums = {}
        for sums in self.results(microbatches, loss):
            _add(totals, sums)
        return totals

    @torch.no_grad()
    def results(self, microbatches: Iterable[Batch], work: Callable[[Head, Tensor, Batch], T]) -> list[T]:
        """What `work` makes of each batch's hidden states, without gradients, dropout off.

        Ranks of `shard` have batches of their own here too, any number of them.
        """
        training = self.model.training
        self.model.eval()
        found = []
        try:
            for batch in microbatches if self.sharded is None else self.sharded.rounds(microbatches):
                result = self._pass(batch, work)
                if batch is not None:
                    found.append(result)
        finally:
            self.model.train(training)
        return found

    def _pass(self, batch: Batch | None, work: Callable[[Head, Tensor, Batch], T]) -> T:
        """The result of a batch; without one a loss that is zero, with zero gradients of what is trained."""
        if self.sharded is None:
            assert batch is not None
            return work(self.head, self._hidden(batch), batch)
        if batch is None:
            batch, work = self.sharded.filler(self.device), cast("Any", _nothing)
        found: T = self.sharded(lambda: work(self.head, self._hidden(batch), batch))
        return found


def _nothing(head: Head, hidden: Tensor, batch: Batch) -> Sums:
    return {"loss": 0.0 * head.cross_entropy(hidden[batch.positions], batch.targets)}


def gradient_norm(parameters: Iterable[Tensor]) -> Tensor:
    """The common norm of the gradients that are there, [] float32, on the device."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float32)))


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
