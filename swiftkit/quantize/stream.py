"""A model of which one decoder layer at a time is in memory, and the activations that go through it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from swiftkit.data import PackedBatch
from swiftkit.engine.batch import Batch
from swiftkit.engine.build import make_buffers, skeleton
from swiftkit.engine.families import logit_rule
from swiftkit.engine.head import Head
from swiftkit.errors import UserError
from swiftkit.formats.shards import Stored

ON_DEVICE = 0.3  # of a GPU's free memory that activations may take; else they wait on the host


class Source(Protocol):
    """The tensors that are quantized: of a base, or of base plus adapter."""

    tensors: list[Stored]

    def pieces(self, tensor: Stored) -> Iterator[Tensor]:
        """A tensor's rows in order, in its type."""


@dataclass(eq=False)
class Sample:
    """One window on its way through the layers.

    Args:
        hidden: what goes into the next layer, [1, tokens, width].
        arguments, keywords: what else the model hands to each layer.
        batch: positions and targets of what is predicted.
    """

    hidden: Tensor
    arguments: list[tuple[Any, ...]]
    keywords: list[dict[str, Any]]
    batch: Batch

    def twin(self) -> Sample:
        """The same window, to go another way."""
        return Sample(self.hidden.clone(), self.arguments, self.keywords, self.batch)


class StreamedModel:
    """Embedding, final norm and head are there all the time, decoder layers as they are asked for.

    Args:
        source: the weights.
        description: the model's transformers config.
        device, dtype: where and in which type layers compute.
    """

    def __init__(self, source: Source, *, description: Any, device: torch.device, dtype: torch.dtype):
        self._source, self.device, self.dtype = source, device, dtype
        self._stored = {tensor.name: tensor for tensor in source.tensors}
        embedding = (t for t in source.tensors if t.name.endswith("embed_tokens.weight"))
        vocabulary = next((t.shape[0] for t in embedding), None)
        self.model = skeleton(description, vocabulary).eval()
        make_buffers(self.model, device)
        inner: Any = self.model.base_model
        self.inner = inner
        self.layers: nn.ModuleList = inner.layers
        names = {module: name for name, module in self.model.named_modules()}
        self.prefixes = [f"{names[layer]}." for layer in self.layers]
        self._load_ends()
        head: Any = self.model.get_output_embeddings()  # type: ignore[operator]
        self.head = Head(head.weight, logit_rule(description))

    def read(self, name: str) -> Tensor:
        """A whole tensor, as it is stored.

        Raises:
            UserError: there is none of this name.
        """
        if name not in self._stored:
            raise UserError(f"the model lacks the tensor {name}, which its config.json asks for")
        return torch.cat(list(self._source.pieces(self._stored[name])))

    def stored_type(self, name: str) -> torch.dtype:
        """In which a tensor is stored."""
        return self._stored[name].dtype

    def _load_ends(self) -> None:
        inside = tuple(self.prefixes)
        seen: dict[int, nn.Parameter] = {}
        for name, parameter in list(self.model.named_parameters(remove_duplicate=False)):
            if name.startswith(inside):
                continue
            if id(parameter) not in seen:
                twins = [n for n, p in self.model.named_parameters(remove_duplicate=False) if p is parameter]
                held = next((twin for twin in twins if twin in self._stored), name)
                seen[id(parameter)] = self._parameter(held)
        for name, parameter in list(self.model.named_parameters(remove_duplicate=False)):
            if id(parameter) in seen:
                owner, _, leaf = name.rpartition(".")
                own = seen[id(parameter)] if name not in self._stored else self._parameter(name)
                setattr(self.model.get_submodule(owner), leaf, own)

    def _parameter(self, name: str) -> nn.Parameter:
        value = self.read(name).to(device=self.device, dtype=self.dtype)
        return nn.Parameter(value, requires_grad=False)

    def load(self, index: int) -> nn.Module:
        """A decoder layer with its weights."""
        layer = self.layers[index]
        for name, _ in list(layer.named_parameters()):
            owner, _, leaf = name.rpartition(".")
            setattr(layer.get_submodule(owner), leaf, self._parameter(self.prefixes[index] + name))
        return layer

    def free(self, index: int) -> None:
        """Take a decoder layer out of memory."""
        self.layers[index].to("meta")

    @torch.no_grad()
    def begin(self, batches: Sequence[PackedBatch]) -> list[Sample]:
        """What goes into the first layer, and what each layer is handed beside it."""
        samples = [self._record(Batch.of(batch, device=self.device)) for batch in batches]
        if self.device.type == "cuda":
            free = torch.cuda.mem_get_info(self.device)[0]
            if sum(sample.hidden.nbytes for sample in samples) > ON_DEVICE * free:
                for sample in samples:
                    sample.hidden = sample.hidden.cpu()
        return samples

    def _record(self, batch: Batch) -> Sample:
        """Run the model with layers that only note what they are given."""
        first: list[Tensor] = []
        arguments: list[tuple[Any, ...]] = []
        keywords: list[dict[str, Any]] = []

        def note(hidden: Tensor, *rest: Any, **named: Any) -> Tensor:
            first.append(hidden)
            arguments.append(rest)
            keywords.append(named)
            return hidden

        for layer in self.layers:
            layer.forward = note
        try:
            self.inner(
                input_ids=batch.input_ids[None],
                position_ids=batch.position_ids[None],
                use_cache=False,
                attention_plan=batch.plan,
            )
        finally:
            for layer in self.layers:
                del layer.forward  # the class has its own
        return Sample(first[0], arguments, keywords, batch)

    @torch.no_grad()
    def run(self, index: int, samples: Iterable[Sample], *, keep: bool) -> None:
        """Send samples through a layer.

        Args:
            index: of the layer.
            samples: in order.
            keep: whether they are then in front of the next layer.
        """
        layer = self.layers[index]
        for sample in samples:
            hidden = sample.hidden.to(self.device)
            output = layer(hidden, *sample.arguments[index], **sample.keywords[index])
            output = output[0] if isinstance(output, tuple) else output
            if keep:
                sample.hidden = output.to(sample.hidden.device)

    @torch.no_grad()
    def final(self, sample: Sample) -> Tensor:
        """Hidden states behind the final norm, where something is predicted: [targets, width]."""
        hidden: Tensor = self.inner.norm(sample.hidden.to(self.device))[0]
        return hidden[sample.batch.positions]
