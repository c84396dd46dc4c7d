"""Weights that lie in parts on several ranks, and are gathered layer by layer while they compute (FSDP).

torch's `fully_shard` (Zhao et al. 2023, https://arxiv.org/abs/2304.11277) moves the parts; what it is given,
when, and what comes out of it is decided here. Ranks take rows of their own. Frozen weights are gathered as
they are stored. An adapter stays whole on every rank; trained weights are parts, with their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from swiftkit.engine.attention import AttentionPlan
from swiftkit.engine.batch import Batch
from swiftkit.engine.fused.layer import FusedLlamaLayer
from swiftkit.engine.linear import Linear
from swiftkit.engine.outliers import TOKENS, carry_largest, observe, send_random_tokens
from swiftkit.parallel.collectives import Ranks
from swiftkit.parallel.shards import Shard

Fill = Callable[[Callable[[str], bool]], None]
"""Gives the modules whose names it is asked for their weights and first adapters."""


class Sharded:
    """A model in parts, of which this rank has one.

    Args:
        mesh: its last axis are the ranks that have the parts; an axis before it counts copies of all parts
            (HSDP), between which trained gradients are summed once a step.

    Attributes:
        ranks: that have the parts.
        shards: this rank's part of each trained tensor that is cut; empty where an adapter is trained.
        parameters: what is trained, by name, as plain tensors: of a cut one this rank's part.
    """

    def __init__(self, mesh: DeviceMesh):
        self.mesh = mesh
        self.groups = [mesh.get_group(axis) for axis in range(mesh.ndim)]
        self.ranks = Ranks.of(self.groups[-1])
        self.shards: dict[str, Shard] = {}
        self.parameters: dict[str, Tensor] = {}
        self._held: dict[str, DTensor] = {}  # the cut ones, as torch has them
        self._root: Any = None
        self._filler: Batch | None = None

    # ---- building ----------------------------------------------------------------------------------------

    def build(
        self, model: nn.Module, fill: Fill, *, device: torch.device, adapter: bool, observes: bool
    ) -> None:
        """Fill a described model one layer after the other, and keep this rank's part of each.

        Args:
            model: on the meta device, its modules exchanged.
            fill: see `Fill`.
            device: of this rank.
            adapter: whether what is trained stays whole on every rank.
            observes: whether FP8 products are to choose what they carry (see `kernels.outliers`): then layers
                are filled while random tokens come by.
        """
        layers = _layers(model)
        fill(lambda name: not any(_inside(name, layer) for layer in layers))

        def enter(name: str, layer: nn.Module) -> None:
            if isinstance(layer, FusedLlamaLayer):
                layer.make_room(device)
            fill(lambda other: _inside(other, name))

        def leave(layer: nn.Module) -> None:
            for part in layer.modules():
                if isinstance(part, Linear | FusedLlamaLayer):
                    part.show_store()
            self._shard(layer, adapter)

        if not observes:
            for name, layer in layers.items():
                enter(name, layer)
                leave(layer)
            return
        hooks = []
        for name, layer in layers.items():
            hooks.append(layer.register_forward_pre_hook(lambda own, _, name=name: _arrive(enter, name, own)))
            hooks.append(layer.register_forward_hook(lambda own, *_: _depart(leave, own)))
        send_random_tokens(model, vocabulary=model.config.vocab_size, device=device)  # type: ignore[union-attr, arg-type]
        for hook in hooks:
            hook.remove()

    def close(self, model: nn.Module, *, adapter: bool) -> None:
        """Cut what lies outside of the layers, once everything is there."""
        self._root = root = _Root(model)
        self._shard(root, adapter)
        for module in root.modules():
            if isinstance(module, FSDPModule):
                # A loss is divided by what the whole step counts: gradients add up.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            if not isinstance(parameter, DTensor):
                self.parameters[name] = parameter
                continue
            self._held[name] = parameter
            self.parameters[name] = parameter.to_local().detach().requires_grad_()
            self.shards[name] = _own_part(parameter.shape[0], self.ranks)

    def _shard(self, module: nn.Module, adapter: bool) -> None:
        trained = {p for p in module.parameters() if p.requires_grad} if adapter else None
        # Nothing is cast on its way but gradients, which are summed in float32.
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        fully_shard(module, mesh=self.mesh, mp_policy=policy, ignored_params=trained)

    # ---- computing ---------------------------------------------------------------------------------------

    def __call__(self, work: Callable[[], Any]) -> Any:
        """What `work` returns, which may use the embedding, the layers and the head."""
        return self._root(work)

    def release(self) -> None:
        """Give up the gathered embedding and head, which a forward without a backward leaves standing."""
        self._root.reshard()

    def passes(self, batches: Sequence[Batch]) -> Iterator[Batch | None]:
        """A step's batches; ranks with fewer than another one get None at the end, and compute nothing.

        Every pass gathers weights, so ranks make equally many.
        """
        self.release()
        for name, held in self._held.items():
            held.grad = None if self.parameters[name].grad is None else held.grad
        most = self._most(len(batches))
        for number in range(most):
            last = number == most - 1
            self._root.set_is_last_backward(last)
            self._root.set_requires_all_reduce(last)
            yield batches[number] if number < len(batches) else None
        for name, held in self._held.items():
            gradient = cast("DTensor | None", held.grad)
            self.parameters[name].grad = None if gradient is None else gradient.to_local()

    def rounds(self, batches: Iterable[Batch]) -> Iterator[Batch | None]:
        """Batches without gradients, of which it is not known how many there are; as `passes`."""
        self.release()
        own = iter(batches)
        while True:
            batch = next(own, None)
            if not self._most(int(batch is not None)):
                break
            yield batch
        self.release()

    def filler(self, device: torch.device) -> Batch:
        """What a rank computes that has no rows left."""
        if self._filler is None:
            ids = torch.zeros(TOKENS, dtype=torch.int64, device=device)
            places = torch.arange(TOKENS, device=device)
            plan = AttentionPlan.of((TOKENS,), device=device)
            self._filler = Batch(ids, places, places[:1], ids[:1], plan)
        return self._filler

    def _most(self, number: int) -> int:
        """The largest of all ranks' numbers. Hosts ask each other, where they can without their devices."""
        for group in self.groups:
            by_host = "cpu:" in dist.get_backend_config(group)
            value = torch.tensor(number, device="cpu" if by_host else self.mesh.device_type)
            dist.all_reduce(value, dist.ReduceOp.MAX, group=group)
            number = int(value)
        return number

    # ---- whole tensors -----------------------------------------------------------------------------------

    def whole(self, name: str, own: Tensor) -> Tensor:
        """A trained tensor, or what has its shape, put together; every rank calls it in the same order."""
        shard = self.shards.get(name)
        return own.detach() if shard is None else self.ranks.gather(own.detach(), shard)

    def own(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of it."""
        shard = self.shards.get(name)
        return whole if shard is None else shard.take(whole)

    def whole_shape(self, name: str, own: tuple[int, ...]) -> tuple[int, ...]:
        """Its whole shape, from that of this rank's part."""
        shard = self.shards.get(name)
        return own if shard is None else shard.whole_shape(own)

    def gradient_norm(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """The norm of the whole gradient, [] float32, the same on every rank."""
        counted = [
            p.grad
            for name, p in parameters.items()
            if p.grad is not None and (name in self.shards or self.ranks.rank == 0)
        ]
        device = next(iter(parameters.values())).device
        norms = torch._foreach_norm(counted, 2, dtype=torch.float32)
        own = torch.stack([torch.zeros((), device=device), *norms])
        return self.ranks.sum(torch.linalg.vector_norm(own).square()).sqrt()


class _Root(nn.Module):
    """Everything of a step that reads weights happens inside its forward: they are there then."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, work: Callable[[], Any]) -> Any:
        return work()


def _layers(model: nn.Module) -> dict[str, nn.Module]:
    """The decoder layers by name."""
    layers = set(model.base_model.layers.children())  # type: ignore[union-attr]
    return {name: module for name, module in model.named_modules() if module in layers}


def _inside(name: str, layer: str) -> bool:
    return name == layer or name.startswith(f"{layer}.")


def _arrive(enter: Callable[[str, nn.Module], None], name: str, layer: nn.Module) -> None:
    enter(name, layer)
    observe(layer.modules())


def _depart(leave: Callable[[nn.Module], None], layer: nn.Module) -> None:
    carry_largest(layer.modules())
    leave(layer)


def _own_part(rows: int, ranks: Ranks) -> Shard:
    """The rows that `fully_shard` leaves here: those of `torch.chunk`, of which the last may be missing."""
    most = -(-rows // ranks.size)
    start = min(ranks.rank * most, rows)
    return Shard(0, ((start, min(start + most, rows)),), rows)
