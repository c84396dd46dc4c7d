"""What the calibration knows of a linear layer's input: its Gram matrix, one for each distinct input."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from swiftkit.parallel.world import World

TOGETHER = 1 << 14  # rows that one product takes on a GPU


@dataclass(eq=False)
class Gram:
    """Sums over the rows x of an input.

    Attributes:
        products: of x^T x, float32 [in, in]; of all rows once they are settled.
        magnitudes: of |x|, float32 [in].
        rows: how many.
    """

    products: Tensor
    magnitudes: Tensor
    rows: int = 0
    _waiting: list[Tensor] = field(default_factory=list)

    @classmethod
    def empty(cls, width: int, device: torch.device) -> Gram:
        """Of nothing yet."""
        return cls(torch.zeros(width, width, device=device), torch.zeros(width, device=device))

    def add(self, x: Tensor) -> None:
        """Add the rows of [..., in].

        On a GPU the product runs in bf16, with sums in float32: one in float32 would take minutes. Rows wait
        there until there are many, since each product is added to the whole matrix. They must not be changed
        in place meanwhile.
        """
        flat = x.reshape(-1, x.shape[-1])
        self.rows += flat.shape[0]
        self._waiting.append(flat)
        if not flat.is_cuda or sum(map(len, self._waiting)) >= TOGETHER:
            self.settle()

    def settle(self) -> None:
        """Take in the rows that wait."""
        if not self._waiting:
            return
        flat = torch.cat(self._waiting) if len(self._waiting) > 1 else self._waiting[0]
        self._waiting = []
        if flat.is_cuda and flat.dtype == torch.bfloat16:
            self.products += torch.mm(flat.T, flat, out_dtype=torch.float32)
        else:
            flat = flat.float()
            self.products.addmm_(flat.T, flat)
        self.magnitudes += flat.abs().sum(0, dtype=torch.float32)

    @property
    def dead(self) -> Tensor:
        """Channels that were zero in every row, bool [in]."""
        return self.products.diagonal() == 0

    def error(self, difference: Tensor) -> float:
        """Mean square of x D^T over rows and outputs, for a difference of weights D [out, in].

        On a GPU in TF32, as AWQ asks for dozens of these: such a sum errs by less than a thousandth.
        """
        with _tf32(difference.device):
            return float(self.squares(difference).sum()) / max(self.rows * difference.shape[0], 1)

    def squares(self, difference: Tensor) -> Tensor:
        """Sum of squares of x D^T over all rows, [out]."""
        return ((difference.float() @ self.products) * difference).sum(1).clamp(min=0)


@contextmanager
def _tf32(device: torch.device) -> Iterator[None]:
    if device.type != "cuda":
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@dataclass(eq=False)
class Inputs:
    """Linear layers of one block that read the same tensor, and its Gram matrix.

    Args:
        names: of the layers, within the block.
        gram: of their input.
    """

    names: list[str]
    gram: Gram


@dataclass(eq=False)
class Watch:
    """Collects the Gram matrices of a block's linear layers while it runs.

    Layers that were given the very same tensor share one matrix. Whether they do is seen in the first run,
    and checked in every other.
    """

    linears: Mapping[str, nn.Linear]
    inputs: list[Inputs] = field(default_factory=list)
    _owner: dict[str, Inputs] = field(default_factory=dict)
    _last: tuple[Tensor, Inputs] | None = None

    def __enter__(self) -> Watch:
        self._stack = ExitStack()
        for name, module in self.linears.items():
            handle = module.register_forward_pre_hook(self._hook(name))
            self._stack.callback(handle.remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._last = None
        for one in self.inputs:
            one.gram.settle()
        self._stack.close()

    def _hook(self, name: str) -> Any:
        def seen(_: nn.Module, arguments: tuple[Any, ...]) -> None:
            self._see(name, arguments[0])

        return seen

    def _see(self, name: str, x: Tensor) -> None:
        shares = self._last is not None and self._last[0] is x
        if name not in self._owner:
            if shares and self._last is not None:
                self._last[1].names.append(name)
                self._owner[name] = self._last[1]
                return
            own = Inputs([name], Gram.empty(x.shape[-1], x.device))
            self.inputs.append(own)
            self._owner[name] = own
        own = self._owner[name]
        if shares and self._last is not None and self._last[1] is own:
            return
        own.gram.add(x)
        self._last = x, own


def summed(
    inputs: Sequence[Inputs], linears: Mapping[str, nn.Linear], world: World, device: torch.device
) -> list[Inputs]:
    """What all ranks have seen, on each of them: the sums of their Gram matrices, in the order of the layers.

    Args:
        inputs: of this rank's share of the calibration; nothing may have reached a layer here.
        linears: of the block.
        world: the processes.
        device: of the matrices.
    """
    if world.size == 1:
        return list(inputs)
    known = {names for ranks in world.gathered([tuple(one.names) for one in inputs]) for names in ranks}
    place = {name: number for number, name in enumerate(linears)}
    own = {tuple(one.names): one.gram for one in inputs}
    found = []
    for names in sorted(known, key=lambda names: place[names[0]]):
        gram = own.get(names) or Gram.empty(linears[names[0]].in_features, device)
        world.sum_up(gram.products, gram.magnitudes)
        (gram.rows,) = world.totals(gram.rows)
        found.append(Inputs(list(names), gram))
    return found


def owners(inputs: Sequence[Inputs]) -> dict[str, Gram]:
    """The Gram matrix of each layer by name."""
    return {name: one.gram for one in inputs for name in one.names}


def starved(inputs: Sequence[Inputs], linears: Mapping[str, nn.Linear]) -> list[str]:
    """Layers that no row reached: experts that were never chosen, say."""
    reached = owners(inputs)
    return [name for name in linears if name not in reached]
