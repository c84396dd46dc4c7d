"""Tensor parallelism: one rank's part of a model, of its parameters and of their gradients.

Every rank holds plain local tensors and sees the same tokens. Column layers have a part of B and the whole
A, row layers a part of A and the whole B; collectives stand at the borders of attention and MLP. What is
replicated inside a sub-block gets a part of its gradient on each rank, so those are summed once a step.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from swiftkit.engine.vocabulary import shard_embedding
from swiftkit.errors import UserError
from swiftkit.formats.full import FullSpec
from swiftkit.formats.packing import packing_of
from swiftkit.formats.peft import LoraSpec
from swiftkit.parallel import rules
from swiftkit.parallel.collectives import Ranks, Sharding, sum_in_one
from swiftkit.parallel.shards import Shard

HEAD_COUNTS = ("num_heads", "num_attention_heads", "num_key_value_heads", "num_key_value_groups")
SUB_BLOCKS = ("self_attn", "mlp")
LAYER = re.compile(r"(?:^|\.)layers\.\d+\.(.+)$")


def check_tensor_parallel(
    config: Any, size: int, *, spec: LoraSpec | FullSpec | None, quantized: bool
) -> None:
    """Refuse what tensor parallelism cannot do, while nothing is loaded.

    Args:
        config: the model's transformers config.
        size: ranks.
        spec: what is trained.
        quantized: whether the base is stored in 8 or 4 bits.

    Raises:
        UserError: naming what does not fit, and the sizes that would do.
    """
    if size == 1:
        return
    packing = packing_of(config)
    if packing is not None:
        raise UserError(
            f"--tensor_parallel_size {size}: the model is quantized ({packing}), and such weights are not "
            "cut over ranks; take 1, or give the model in bf16"
        )
    rules.check(config, size=size, quantized=quantized)
    for name, why in (
        ("dora", "--use_dora needs the lengths of whole rows"),
        ("pissa", "--init_lora_weights pissa takes apart whole weights"),
    ):
        if spec is not None and name in spec.features:
            raise UserError(
                f"--tensor_parallel_size {size}: {why}, and each rank has a part; leave one of them out"
            )


class TensorParallel:
    """How a model is cut, by the names of its parameters.

    Args:
        ranks: that the model is cut over.

    Attributes:
        shards: of the parameters that are cut.
        partial: names of whole parameters of which each rank sees a part of the gradient.
        shardings: of linear layers, by module name.
    """

    def __init__(self, ranks: Ranks):
        self.ranks = ranks
        self.shards: dict[str, Shard] = {}
        self.partial: set[str] = set()
        self.shardings: dict[str, Sharding] = {}

    def cut(self, model: nn.Module) -> None:
        """Make a described model, on the meta device, this rank's part; `check_tensor_parallel` first."""
        config: Any = model.config
        self.cuts = cuts = rules.cuts(
            config, size=self.ranks.size, rank=self.ranks.rank, rows=config.vocab_size
        )
        table = rules.RULES[config.model_type]
        for name, module in list(model.named_modules()):
            match = LAYER.search(name)
            place = match[1] if match else ""
            if place in SUB_BLOCKS:
                module.register_forward_pre_hook(self._enter, with_kwargs=True)
            if place == "self_attn":
                _count_heads(module, cuts)
            rule = table.get(place)
            if rule is not None and rule.style == "partial":
                self.partial.add(f"{name}.weight")
            elif rule is not None and rule.style == "norm":
                self._cut_norm(model, name, cuts.shard(rule))
            elif rule is not None:
                self._cut_linear(name, module, rule.style == "row", cuts.shard(rule))
        self._cut_ends(model, cuts.vocabulary)

    def whole(self, name: str, own: Tensor) -> Tensor:
        """A parameter, or what has its shape (a gradient, a moment), put together from all ranks.

        Every rank must call it for the same names in the same order.
        """
        shard = self.shards.get(name)
        return own.detach() if shard is None else self.ranks.gather(own.detach(), shard)

    def own(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a parameter, or of what has its shape."""
        shard = self.shards.get(name)
        return whole if shard is None else shard.take(whole)

    def whole_shape(self, name: str, own: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the parameter that this rank has a part of."""
        shard = self.shards.get(name)
        return own if shard is None else shard.whole_shape(own)

    def reduce_gradients(self, parameters: Mapping[str, Tensor]) -> None:
        """Make partial gradients whole, in one bucket; once a step, before anything reads them."""
        gradients = []
        for name, parameter in parameters.items():
            shard = self.shards.get(name)
            shared = shard is not None and shard.shared  # by ranks with the same key-value heads
            if parameter.grad is not None and (shared or name in self.partial):
                gradients.append((parameter.grad, shard))
        sum_in_one(gradients, self.ranks)

    def gradient_norm(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """The norm of the whole model's gradient, [] float32, the same on every rank."""
        first = self.ranks.rank == 0
        counted = []
        for name, parameter in parameters.items():
            shard = self.shards.get(name)
            if parameter.grad is not None and (shard is not None or first):
                counted.append(parameter.grad if shard is None else shard.counted(parameter.grad))
        device = next(iter(parameters.values())).device
        norms = torch._foreach_norm(counted, 2, dtype=torch.float32)
        own = torch.stack([torch.zeros((), device=device), *norms])
        return self.ranks.sum(torch.linalg.vector_norm(own).square()).sqrt()

    def _enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (self.ranks.enter(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": self.ranks.enter(kwargs["hidden_states"])}

    def _cut_linear(self, name: str, module: nn.Module, row: bool, shard: Shard) -> None:
        assert isinstance(module, nn.Linear)
        self.shardings[name] = Sharding(row, shard, self.ranks)
        self.shards[f"{name}.weight"] = shard
        module.weight = _empty(shard.shape(module.weight.shape))
        if row:
            self.shards[f"{name}.lora_A"] = shard
            self.partial.add(f"{name}.lora_B")
            return
        self.shards[f"{name}.lora_B"] = self.shards[f"{name}.bias"] = shard
        self.partial.add(f"{name}.lora_A")
        if module.bias is not None:
            module.bias = _empty(shard.shape(module.bias.shape))

    def _cut_norm(self, model: nn.Module, name: str, shard: Shard) -> None:
        norm: Any = model.get_submodule(name)
        self.shards[f"{name}.weight"] = shard
        parent, _, leaf = name.rpartition(".")
        cut = ShardedRmsNorm(shard, self.ranks, eps=norm.variance_epsilon)
        setattr(model.get_submodule(parent), leaf, cut)

    def _cut_ends(self, model: nn.Module, shard: Shard) -> None:
        embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
        head: Any = model.get_output_embeddings()  # type: ignore[operator]
        tied = head.weight is embedding.weight
        shape = shard.shape(embedding.weight.shape)
        shard_embedding(embedding, _empty(shape), shard, self.ranks)
        head.weight = embedding.weight if tied else _empty(shape)
        for name, module in model.named_modules():
            if module is embedding or module is head:
                self.shards[f"{name}.weight"] = shard


class ShardedRmsNorm(nn.Module):
    """A root mean square norm over a width that lies on several ranks.

    Args:
        shard: of its weight.
        ranks: that have the rest.
        eps: added to the mean of squares.
    """

    def __init__(self, shard: Shard, ranks: Ranks, *, eps: float):
        super().__init__()
        self.shard, self.ranks, self.eps = shard, ranks, eps
        self.weight = _empty((shard.size,))
        # Heads that a rank before this one has as well are counted there.
        self.share = 0.0 if any(shard.again) else 1.0

    def forward(self, x: Tensor) -> Tensor:
        """[..., own width] to the same."""
        wide = x.float()
        squares = self.ranks.share(wide.square().sum(-1, keepdim=True) * self.share)
        return (self.weight * (wide * torch.rsqrt(squares / self.shard.whole + self.eps))).to(x.dtype)


def _count_heads(attention: nn.Module, cuts: rules.Cuts) -> None:
    """Tell an attention module, and the config that some families' forward reads, how many heads are here."""
    counts = {
        "num_key_value_heads": cuts.key_heads,
        "num_key_value_groups": cuts.heads // cuts.key_heads,
    }
    own: Any = attention
    own.config = copy.copy(own.config)
    own.config.num_attention_heads, own.config.num_key_value_heads = cuts.heads, cuts.key_heads
    for name in HEAD_COUNTS:
        if isinstance(getattr(own, name, None), int):
            setattr(own, name, counts.get(name, cuts.heads))


def _empty(shape: tuple[int, ...]) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False)
