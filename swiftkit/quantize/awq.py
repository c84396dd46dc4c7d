"""AWQ: channels with large inputs are scaled up before rounding, and groups are clipped where that helps.

Lin et al. 2023, https://arxiv.org/abs/2306.00978, sections 3.2 and 3.3. The error of a linear layer on its
inputs follows from their Gram matrix, all of them: no subsample is run. Each layer's own output counts, where
the authors' code takes that of the attention or the MLP as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from swiftkit.parallel.world import ALONE, World, dealt
from swiftkit.quantize.folds import FOLDS, applies, apply
from swiftkit.quantize.gram import Gram
from swiftkit.quantize.grid import Grid, Scheme, find_grid

STEPS = 20  # of the exponent, from 0 to 1
CLIPS = 10  # down to half of the largest value
LEAST_CHANNEL = 1e-4  # of the mean: a channel that is never used is not scaled without bound
UNCLIPPED = ("q_proj", "k_proj", "qkv_proj")  # their products meet in the softmax: clipping does harm there


@torch.no_grad()
def fold_scales(
    block: nn.Module,
    grams: dict[str, Gram],
    *,
    family: str,
    scheme: Scheme,
    stored: torch.dtype,
    world: World = ALONE,
) -> list[str]:
    """Find and fold the scales of a decoder layer; its Gram matrices become those of the scaled inputs.

    Args:
        block: with its weights.
        grams: of the inputs of its linear layers, by name.
        family: of `FOLDS`.
        scheme: of the rounding to come.
        stored: type in which norms and biases are written.
        world: the processes; each tries some of the candidates.

    Returns:
        Names of the norms and biases that changed.
    """
    changed: list[str] = []
    for fold in FOLDS[family]:
        known = [grams.get(name) for name in fold.after]
        if not applies(block, fold) or any(gram is None or not gram.rows for gram in known):
            continue
        gram = grams[fold.after[0]]
        weights = [block.get_parameter(f"{name}.weight").float() for name in fold.after]
        scales = search_scales(torch.cat(weights), gram, scheme, world)
        if scales is None:
            continue
        scales, touched = apply(block, fold, scales, stored=stored)
        changed += touched
        for one in {id(grams[name]): grams[name] for name in fold.after}.values():
            divide(one, scales)
    return changed


def divide(gram: Gram, scales: Tensor) -> None:
    """What the Gram matrix is when the input is divided by the scales, [in]."""
    gram.products /= scales[:, None] * scales
    gram.magnitudes /= scales


def search_scales(weight: Tensor, gram: Gram, scheme: Scheme, world: World = ALONE) -> Tensor | None:
    """The scales [in] that lose least; None where not scaling does.

    Args:
        weight: float32 [out, in], all matrices that read the input.
        gram: of the input.
        scheme: of the rounding to come.
        world: the processes, which hold the same matrices.
    """
    candidates = [None, *_candidates(weight, gram, scheme)]
    own = []
    for number in dealt(range(len(candidates)), world):
        scales = candidates[number]
        scaled = weight if scales is None else weight * scales
        own.append((_loss(scaled, weight, gram, scheme, scales), number))
    scales = candidates[min(tried for ranks in world.gathered(own) for tried in ranks)[1]]
    if scales is not None:
        world.take_from(0, scales)
    return scales


def _loss(scaled: Tensor, weight: Tensor, gram: Gram, scheme: Scheme, scales: Tensor | None) -> float:
    rounded = find_grid(scaled, scheme).round(scaled).dequantize()
    return gram.error(weight - (rounded if scales is None else rounded / scales))


def _candidates(weight: Tensor, gram: Gram, scheme: Scheme) -> Iterable[Tensor]:
    """x^r, and x^r / w^(1-r), for a channel's mean input x and its weights' mean share w of a group."""
    inputs = gram.magnitudes / gram.rows
    inputs = inputs.clamp(min=float(inputs.mean()) * LEAST_CHANNEL)
    grouped = weight.abs().view(weight.shape[0], -1, scheme.group(weight.shape[1]))
    shares = (grouped / grouped.amax(-1, keepdim=True).clamp(min=1e-12)).view(weight.shape).mean(0)
    shares = shares.clamp(min=LEAST_CHANNEL)
    for step in range(1, STEPS + 1):
        ratio = step / STEPS
        for scales in (inputs**ratio, inputs**ratio / shares ** (1 - ratio)):
            yield scales / (scales.max() * scales.min()).sqrt()


def clipped_grid(name: str, weight: Tensor, gram: Gram | None, scheme: Scheme) -> Grid:
    """The grid of a matrix, each group clipped to the share of its largest value that loses least.

    Between groups the error's products are left out, as in the paper.

    Args:
        name: of the layer.
        weight: [out, in].
        gram: of its input; without one nothing is clipped.
        scheme: of the rounding.
    """
    whole = find_grid(weight, scheme)
    if gram is None or not gram.rows or name.rpartition(".")[2] in UNCLIPPED:
        return whole
    weight = weight.float()
    rows, width = weight.shape
    size = scheme.group(width)
    count = width // size
    blocks = gram.products.view(count, size, count, size).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    largest = weight.abs().view(rows, count, size).amax(-1)
    best, least = largest, torch.full_like(largest, float("inf"))
    for step in range(CLIPS):
        limit = largest * (1 - step / (2 * CLIPS))
        rounded = find_grid(weight, scheme, limit=limit).round(weight).dequantize()
        difference = (weight - rounded).view(rows, count, size).transpose(0, 1)  # [groups, out, size]
        loss = ((difference @ blocks) * difference).sum(-1).T
        better = loss < least
        best, least = torch.where(better, limit, best), torch.where(better, loss, least)
    return find_grid(weight, scheme, limit=best)
