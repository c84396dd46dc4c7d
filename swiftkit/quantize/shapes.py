"""What shapes say before anything is computed: which layers cannot be packed, and how a model will split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from swiftkit.engine.exchange import ROUTERS
from swiftkit.errors import UserError
from swiftkit.quantize.layout import Layout

GROUPS = (128, 64, 32)  # that readers have kernels for
CARDS = (1, 2, 4, 8)
ROW_PARALLEL = ("o_proj", "down_proj")  # split along their inputs, as tensor-parallel servers do
SHOWN = 3


def linears_of(block: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers of a decoder layer that are quantized, by name: all but those that choose experts."""
    return {
        name: module
        for name, module in block.named_modules()
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] not in ROUTERS
    }


def check_shapes(shapes: Mapping[str, tuple[int, int]], layout: Layout) -> None:
    """Refuse, before calibration, matrices that the format cannot hold.

    Args:
        shapes: [out, in] of each linear layer by name.
        layout: the format.

    Raises:
        UserError: naming the layers, the rule, and group sizes that fit all.
    """
    faults = {name: layout.faults(*shape) for name, shape in shapes.items()}
    bad = {name: reasons for name, reasons in faults.items() if reasons}
    if not bad:
        return
    kinds: dict[str, str] = {}
    for name, reasons in bad.items():
        kinds.setdefault(name.rpartition(".")[2], f"{name} {list(shapes[name])}: {' and '.join(reasons)}")
    told = "; ".join(list(kinds.values())[:SHOWN])
    fitting = [size for size in GROUPS if all(width % size == 0 for _, width in shapes.values())]
    mend = f"--group_size {' or '.join(map(str, fitting))} divides all" if fitting else "take --group_size -1"
    if all("group_size" not in reason for reasons in bad.values() for reason in reasons):
        mend = "take another --format"
    raise UserError(f"{len(bad)} of {len(shapes)} layers cannot be packed: {told}; {mend}")


def splits(width: int, group_size: int, cards: int) -> bool:
    """Whether a layer that is split along its inputs splits at the edges of groups.

    Layers that are split along their outputs are never limited by groups.

    Args:
        width: its inputs.
        group_size: columns that share a scale; -1 is all of them, whose scale every card can have.
        cards: how many.
    """
    return width % cards == 0 and (group_size == -1 or width // cards % group_size == 0)


def cards_for(
    shapes: Mapping[str, tuple[int, int]], *, group_size: int, heads: int, numbers: Sequence[int] = CARDS
) -> list[int]:
    """On how many cards a tensor-parallel server can split the model.

    Args:
        shapes: [out, in] of each linear layer by name.
        group_size: columns that share a scale.
        heads: of the queries.
        numbers: of cards, to try.
    """
    widths = {shape[1] for name, shape in shapes.items() if name.rpartition(".")[2] in ROW_PARALLEL}
    return [
        cards
        for cards in numbers
        if heads % cards == 0 and all(splits(width, group_size, cards) for width in widths)
    ]
