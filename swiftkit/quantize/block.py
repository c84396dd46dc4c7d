"""One decoder layer, quantized: from its weights and what reached them to packed tensors."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from swiftkit.formats.codes import Codes
from swiftkit.parallel.world import ALONE, World
from swiftkit.quantize import awq, fp8, gptq
from swiftkit.quantize.gram import Gram, Inputs, owners
from swiftkit.quantize.grid import find_grid
from swiftkit.quantize.layout import Layout
from swiftkit.quantize.report import LinearError


@dataclass(eq=False)
class Quantized:
    """What is written of a decoder layer.

    Args:
        tensors: by their names in the layer: packed matrices, and norms and biases that changed.
        errors: of each linear layer.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    errors: list[LinearError] = field(default_factory=list)


@torch.no_grad()
def quantize_block(
    block: nn.Module,
    linears: Mapping[str, nn.Linear],
    inputs: list[Inputs],
    *,
    layout: Layout,
    prefix: str,
    family: str,
    stored: torch.dtype,
    world: World = ALONE,
) -> Quantized:
    """Quantize a decoder layer; it goes on with the weights that a reader of the files will have.

    Args:
        block: with its weights.
        linears: its linear layers.
        inputs: what reached them; empty without a calibration.
        layout: method, grid and format.
        prefix: of the layer's names in the model.
        family: of the model.
        stored: type of norms and biases on disk.
        world: the processes, which all have the same weights and Gram matrices; each quantizes some layers.
    """
    made = Quantized()
    grams = owners(inputs)
    if layout.method == "fp8":
        for name, linear in linears.items():
            matrix = fp8.quantize(linear.weight, scale_dtype=stored)
            made.tensors |= {f"{name}.weight": matrix.data.cpu(), f"{name}.weight_scale": matrix.scale.cpu()}
            made.errors.append(_error(prefix + name, linear.weight, matrix.dequantize(), None, "fp8"))
            linear.weight.copy_(matrix.dequantize())
        return made
    assert layout.scheme is not None
    if layout.method == "awq":
        changed = awq.fold_scales(
            block, grams, family=family, scheme=layout.scheme, stored=stored, world=world
        )
        made.tensors |= {name: block.get_parameter(name).to(stored).cpu() for name in changed}
    units = _together(linears, inputs, layout)
    who = _shares([sum(linears[name].weight.numel() for name in names) for names in units], world.size)
    solved = {
        names[0]: _solve(names, linears, grams, layout, prefix)
        for names, rank in zip(units, who, strict=True)
        if rank == world.rank
    }
    errors = {first: own for ranks in world.gathered({first: found[1] for first, found in solved.items()})
              for first, own in ranks.items()}  # fmt: skip
    for names, rank in zip(units, who, strict=True):
        own = solved[names[0]][0] if names[0] in solved else _room([linears[name] for name in names], layout)
        world.take_from(rank, own.values, own.scales, own.zeros)
        made.errors += errors[names[0]]
        _store(names, linears, own, layout, made if world.first else None)
    return made


def checksum(block: nn.Module) -> str:
    """Of every bit of a layer's weights and of where it stands."""
    digest = hashlib.sha256()
    for name, parameter in block.named_parameters():
        bits = parameter.detach().view(torch.int16).view(parameter.shape[0], -1)
        digest.update(name.encode())
        for dim in (0, 1):
            digest.update(bits.sum(dim, dtype=torch.int64).cpu().numpy().tobytes())
    return digest.hexdigest()


def _together(linears: Mapping[str, nn.Linear], inputs: list[Inputs], layout: Layout) -> list[list[str]]:
    """Layers that are solved at once: those of one input, with GPTQ."""
    if layout.method != "gptq":
        return [[name] for name in linears]
    known = {name for one in inputs for name in one.names}
    return [*(one.names for one in inputs), *([name] for name in linears if name not in known)]


def _shares(sizes: list[int], ranks: int) -> list[int]:
    """The rank of each unit: the largest first, each to the one with the least to do."""
    load, found = [0] * ranks, [0] * len(sizes)
    for unit in sorted(range(len(sizes)), key=lambda unit: -sizes[unit]):
        found[unit] = min(range(ranks), key=load.__getitem__)
        load[found[unit]] += sizes[unit]
    return found


def _room(linears: list[nn.Linear], layout: Layout) -> Codes:
    """Room for the codes of matrices above one another that another rank has."""
    scheme = layout.scheme
    assert scheme is not None
    rows, width = sum(linear.out_features for linear in linears), linears[0].in_features
    device, size = linears[0].weight.device, scheme.group(width)
    values = torch.empty(rows, width, dtype=torch.uint8, device=device)
    scales = torch.empty(rows, width // size, dtype=scheme.scale_dtype, device=device)
    return Codes(values, scales, torch.empty_like(scales, dtype=torch.uint8), scheme.bits, size)


def _solve(
    names: list[str],
    linears: Mapping[str, nn.Linear],
    grams: Mapping[str, Gram],
    layout: Layout,
    prefix: str,
) -> tuple[Codes, list[LinearError]]:
    """The codes of layers that are solved at once, one above the other, and the error of each."""
    scheme = layout.scheme
    assert scheme is not None
    weight = torch.cat([linears[name].weight for name in names]).float()
    gram = grams.get(names[0])
    plain = find_grid(weight, scheme)
    damping, method = None, layout.method
    if method == "gptq" and gram is not None:
        solved = gptq.solve(weight, gram, plain, damping=layout.damping, act_order=layout.act_order)
        codes, damping = solved.codes, solved.damping
    elif method == "awq":
        codes = awq.clipped_grid(names[0], weight, gram, scheme).round(weight)
    else:
        codes = plain.round(weight)
    if (method == "gptq" and damping is None) or (method == "awq" and gram is None):
        method = "rounding"
    heights = [linears[name].out_features for name in names]
    pieces = zip(names, _split(codes, heights), _split(plain.round(weight), heights), strict=True)
    errors = [
        _error(
            prefix + name, linears[name].weight, own.dequantize(), gram, method, rounded.dequantize(), damping
        )
        for name, own, rounded in pieces
    ]
    return codes, errors


def _store(
    names: list[str],
    linears: Mapping[str, nn.Linear],
    codes: Codes,
    layout: Layout,
    made: Quantized | None,
) -> None:
    """Go on with what the codes stand for; the rank that writes them packs them into `made`."""
    heights = [linears[name].out_features for name in names]
    for name, own in zip(names, _split(codes, heights), strict=True):
        linears[name].weight.copy_(own.dequantize())
        if made is not None:
            made.tensors |= {f"{name}.{leaf}": tensor.cpu() for leaf, tensor in layout.pack(own).items()}


def _split(codes: Codes, heights: list[int]) -> list[Codes]:
    """The codes of matrices that were one above the other."""
    values, scales, zeros = (t.split(heights) for t in (codes.values, codes.scales, codes.zeros))
    return [
        Codes(*part, bits=codes.bits, group_size=codes.group_size)
        for part in zip(values, scales, zeros, strict=True)
    ]


def _error(
    name: str,
    weight: Tensor,
    final: Tensor,
    gram: Gram | None,
    method: str,
    rounded: Tensor | None = None,
    damping: float | None = None,
) -> LinearError:
    """Relative error on the calibration's inputs; of the weights where there is none."""

    def size(matrix: Tensor) -> float:
        squares = matrix.square().sum(1) if gram is None or not gram.rows else gram.squares(matrix)
        return math.sqrt(float(squares.sum(dtype=torch.float64)))

    weight = weight.float()
    whole = size(weight) or 1.0
    own = size(weight - final) / whole
    rounding = own if rounded is None else size(weight - rounded) / whole
    dead, rows = (0, 0) if gram is None else (int(gram.dead.sum()), gram.rows)
    return LinearError(name, own, rounding, damping, dead, rows, method)
