"""The tile of each Triton kernel, as measured on an H200 at the 8B shape; no run pays for a search.

In the kernels with two products in a row (B, then A) a warp owns 16 whole rows: then row sums stay within
four lanes, and the first product's result is the second's operand without a trip through shared memory. So
their rows are 16 times their warps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from swiftkit.engine.kernels.rows import block_width

if TYPE_CHECKING:
    from triton.tools.tensor_descriptor import TensorDescriptor


class Tile(NamedTuple):
    """Shape of one program.

    Attributes:
        rows, columns: of one step.
        warps: of the program.
        stages: loads in flight.
        registers: most that a thread may use, so that more programs share a multiprocessor.
    """

    rows: int
    columns: int
    warps: int
    stages: int
    registers: int | None = None


TILES: dict[str, Tile] = {
    "norm_cast": Tile(64, 128, 4, 2),
    "norm_backward_cast": Tile(64, 128, 4, 2),
    "rope": Tile(32, 128, 2, 1),
    "rope_backward_cast": Tile(64, 128, 4, 3),
    "swiglu_cast": Tile(64, 128, 4, 3),
    "swiglu_backward_cast": Tile(64, 64, 4, 3),
    "cast_project": Tile(128, 64, 8, 4),
    "add_low_rank": Tile(32, 128, 4, 1),
    "adapter_gradient": Tile(64, 128, 4, 4),
}


def tile_of(kernel: str, width: int) -> Tile:
    """The tile of a kernel for a width that may be too narrow or uneven for the measured one."""
    tile = TILES[kernel]
    return tile._replace(columns=tile.columns if width % tile.columns == 0 else block_width(width))


def tiled(x: Tensor | None, tile: Tile) -> TensorDescriptor | None:
    """A matrix as Hopper's copy engine reads it, in blocks of the tile, with bounds checked."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return None if x is None else TensorDescriptor.from_tensor(x, [tile.rows, tile.columns])
