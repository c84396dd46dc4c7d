"""One decoder layer, quantized: from its weights and what reached them to packed tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from swiftkit.formats.codes import Codes
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
        changed = awq.fold_scales(block, grams, family=family, scheme=layout.scheme, stored=stored)
        made.tensors |= {name: block.get_parameter(name).to(stored).cpu() for name in changed}
    for names in _together(linears, inputs, layout):
        _quantize_linears(names, linears, grams, layout, prefix, made)
    return made


def _together(linears: Mapping[str, nn.Linear], inputs: list[Inputs], layout: Layout) -> list[list[str]]:
    """Layers that are solved at once: those of one input, with GPTQ."""
    if layout.method != "gptq":
        return [[name] for name in linears]
    known = {name for one in inputs for name in one.names}
    return [*(one.names for one in inputs), *([name] for name in linears if name not in known)]


def _quantize_linears(
    names: list[str],
    linears: Mapping[str, nn.Linear],
    grams: Mapping[str, Gram],
    layout: Layout,
    prefix: str,
    made: Quantized,
) -> None:
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
    for name, own, rounded in pieces:
        linear = linears[name]
        final = own.dequantize()
        error = _error(prefix + name, linear.weight, final, gram, method, rounded.dequantize(), damping)
        made.errors.append(error)
        made.tensors |= {f"{name}.{leaf}": tensor.cpu() for leaf, tensor in layout.pack(own).items()}
        linear.weight.copy_(final)


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
