"""What the merged model's tensors are: their names, and their values piece by piece."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from swiftkit.engine.build import skeleton
from swiftkit.errors import UserError
from swiftkit.export.base import Held
from swiftkit.formats.peft import LoraSpec
from swiftkit.formats.shards import Stored, StoredWeights


@dataclass(frozen=True, eq=False)
class Factors:
    """The adapter of one linear layer.

    Args:
        a: [rank, in].
        b: [out, rank].
        scaling: of their product.
        magnitude: lengths of the merged rows, [out], with DoRA.
    """

    a: Tensor
    b: Tensor
    scaling: float
    magnitude: Tensor | None = None

    def merge(self, base: Tensor, start: int) -> Tensor:
        """W + s B A, with DoRA each row brought to its length.

        Args:
            base: rows of W from `start` on, [rows, in] in float32; they are used up.
        """
        stop = start + base.shape[0]
        base += (self.b[start:stop].float() @ self.a.float()) * self.scaling
        return base if self.magnitude is None else base * self._stretch(base, start)

    def change(self, base: Tensor, x: Tensor, start: int) -> Tensor:
        """What the adapter adds to W x in those rows, s B (A x) and not (s B A) x: [rows, vectors].

        Args:
            base: as for `merge`, left as it is.
            x: [in, vectors].
        """
        stop = start + base.shape[0]
        added = self.b[start:stop].float() @ (self.a.float() @ x) * self.scaling
        if self.magnitude is None:
            return added
        whole = base + (self.b[start:stop].float() @ self.a.float()) * self.scaling
        stretch = self._stretch(whole, start)
        return (stretch - 1) * (base @ x) + stretch * added

    def _stretch(self, whole: Tensor, start: int) -> Tensor:
        """Factor of each row, [rows, 1] (Liu et al. 2024, https://arxiv.org/abs/2402.09353, equation 5)."""
        assert self.magnitude is not None
        lengths = self.magnitude[start : start + whole.shape[0]].float()
        return (lengths / whole.norm(dim=1))[:, None]

    def to(self, device: torch.device) -> Factors:
        """The same on another device."""
        moved = None if self.magnitude is None else self.magnitude.to(device)
        return replace(self, a=self.a.to(device), b=self.b.to(device), magnitude=moved)


def factors_of(spec: LoraSpec, tensors: Mapping[str, Tensor]) -> dict[str, Factors]:
    """The factors of each adapted layer by the name of its weight."""
    modules = sorted(name.removesuffix(".lora_A") for name in tensors if name.endswith(".lora_A"))
    return {
        f"{module}.weight": Factors(
            tensors[f"{module}.lora_A"],
            tensors[f"{module}.lora_B"],
            spec.scaling,
            tensors.get(f"{module}.lora_magnitude_vector"),
        )
        for module in modules
    }


class Ends:
    """The names of the two ends of a model, its embedding and its output head.

    Args:
        description: the model's transformers config.
        model: its skeleton.
    """

    def __init__(self, description: Any, model: nn.Module):
        names = {module: name for name, module in model.named_modules(remove_duplicate=False)}
        self.embedding = f"{names[model.get_input_embeddings()]}.weight"  # type: ignore[operator]
        self.head = f"{names[model.get_output_embeddings()]}.weight"  # type: ignore[operator]
        self.tied = bool(description.tie_word_embeddings)


class MergedWeights:
    """The tensors of base plus adapter.

    A tied head stays tied, and is stored once, as long as nothing makes it differ from the embedding; else
    both are stored and `tied` is false, so that a reader that trusts the flag and one that trusts the file
    get the same model.

    Args:
        stored: the base's files.
        description: the base's transformers config.
        spec, tensors: the adapter, as `load_adapter` gives it.
        held: turns the base's rows into those of the training; None leaves them as they are.
        dtype: of the floating-point tensors; None is each one's own in the base.
        device: where products are computed.

    Raises:
        UserError: the adapter does not fit the base, or the base's own files are in two minds about its head.
    """

    def __init__(
        self,
        stored: StoredWeights,
        *,
        description: Any,
        spec: LoraSpec,
        tensors: Mapping[str, Tensor],
        held: Held | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device,
    ):
        self._stored, self._held, self._device = stored, held, device
        self.factors = factors_of(spec, tensors)
        self.whole = {name: t for name, t in tensors.items() if ".lora_" not in name}
        self.ends = Ends(description, skeleton(description))
        self._source = {name: name for name in stored.tensors}  # the base's tensor of each tensor
        self.tied = self._tie(spec.keeps_tie)
        self._check_fit()
        self.tensors = [self._described(name, dtype) for name in self._source]

    def _tie(self, keeps_tie: bool) -> bool:
        """Settle under which names embedding and head are stored, and whether they stay one."""
        embedding, head = self.ends.embedding, self.ends.head
        if not self.ends.tied:
            return False
        if head in self._source:
            if not self._same(embedding, head):
                raise UserError(
                    f"{self._stored.folder}: config.json ties the output head to the embedding, but {head} "
                    f"and {embedding} are different tensors; set tie_word_embeddings to false if both are "
                    f"meant, or remove {head}"
                )
            del self._source[head]
        pair = [self.whole.get(name) for name in (embedding, head)]
        if pair[0] is not None and pair[1] is not None and torch.equal(pair[0], pair[1]):
            del self.whole[head]
            keeps_tie = True
        apart = {head} if keeps_tie else {embedding, head}
        if apart & (self.whole.keys() | self.factors.keys()):
            self._source[head] = embedding
            if keeps_tie and embedding in self.whole:
                self.whole.setdefault(head, self.whole[embedding])
            return False
        return True

    def _same(self, one: str, other: str) -> bool:
        first, second = (self._stored.tensors[name] for name in (one, other))
        return first.shape == second.shape and all(
            torch.equal(self._stored.rows(one, *rows), self._stored.rows(other, *rows))
            for rows in first.ranges()
        )

    def _check_fit(self) -> None:
        for name, factors in self.factors.items():
            if name not in self._source:
                raise UserError(f"the adapter does not fit this base, which has no {name}")
            asked = (factors.b.shape[0], factors.a.shape[1])
            shape = self._stored.tensors[self._source[name]].shape
            if shape != asked:
                raise UserError(
                    f"the adapter does not fit this base: {name} is {list(shape)}, the adapter asks for "
                    f"{list(asked)}"
                )
        for name, tensor in self.whole.items():
            shape = self._stored.tensors[self._source[name]].shape if name in self._source else ()
            if not shape or shape[1:] != tensor.shape[1:]:
                found = f"{list(shape)}" if shape else "no tensor of this name"
                raise UserError(f"the adapter's {name} is {list(tensor.shape)}, the base has {found}")

    def _described(self, name: str, dtype: torch.dtype | None) -> Stored:
        stored = self._stored.tensors[self._source[name]]
        shape = tuple(self.whole[name].shape) if name in self.whole else stored.shape
        converts = dtype if stored.dtype.is_floating_point else None
        return Stored(name, converts or stored.dtype, shape)

    def base(self, name: str, start: int, stop: int) -> Tensor:
        """Rows of the chosen base in float32, on the device; whole numbers keep their type."""
        rows = self._stored.rows(self._source[name], start, stop).to(self._device)
        if not rows.dtype.is_floating_point:
            return rows
        return rows.float() if self._held is None else self._held(self._source[name], rows)

    def pieces(self, tensor: Stored) -> Iterator[Tensor]:
        """The merged tensor, some rows at a time, in the type in which it is written."""
        name = tensor.name
        factors = self.factors[name].to(self._device) if name in self.factors else None
        for start, stop in tensor.ranges():
            rows = self.whole[name][start:stop] if name in self.whole else self.base(name, start, stop)
            if factors is not None:
                rows = factors.merge(rows, start)
            yield rows.to(tensor.dtype).cpu()

    @property
    def vocabulary(self) -> int:
        """Rows of the embedding."""
        return next(tensor.shape[0] for tensor in self.tensors if tensor.name == self.ends.embedding)
