"""AWQ: folding changes no output, in any family; the search finds what it is meant to find."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from swiftkit.engine.families import FAMILIES
from swiftkit.quantize.awq import clipped_grid, search_scales
from swiftkit.quantize.folds import FOLDS, applies, apply
from swiftkit.quantize.gram import Gram
from swiftkit.quantize.grid import Scheme, find_grid
from tests import tiny
from tests.adapters import ids, logits


def test_every_family_has_a_table() -> None:
    assert FOLDS.keys() == FAMILIES.keys()


@pytest.mark.compat
@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_folding_changes_no_output(family: str, kv_heads: int, tmp_path: Path, seed: int) -> None:
    model = tiny.make(family, tmp_path, seed=seed % 1000, num_key_value_heads=kv_heads)
    before = logits(model, ids(seed))
    generator = torch.Generator().manual_seed(seed)
    done = 0
    for block in model.base_model.layers:
        for fold in FOLDS[model.config.model_type]:
            if not applies(block, fold):
                continue
            width = block.get_submodule(fold.after[0]).in_features
            scales = torch.exp(torch.randn(width, generator=generator) * 0.5)
            found, _ = apply(block, fold, scales, stored=torch.bfloat16)
            off = float((found / scales).log().abs().max())
            assert off < 0.05, f"{fold}: a norm in bf16 takes the scale nearly as it is"
            done += 1
    after = logits(model, ids(seed))
    off = float((after - before).norm() / before.norm())
    print(f"{done} folds, {off:.1e}")
    assert done >= len(model.base_model.layers)
    has_bias = any(name.endswith("_proj.bias") for name, _ in model.named_parameters())
    assert off < (2e-3 if has_bias else 1e-4)  # a bias is rounded to bf16 as it is written


def channels_with_outliers() -> tuple[torch.Tensor, Gram]:
    x = torch.randn(500, 64)
    x[:, [3, 40]] *= 30
    gram = Gram.empty(64, x.device)
    gram.add(x)
    return x, gram


def test_scales_lessen_the_error_where_some_channels_are_large(seed: int) -> None:
    x, gram = channels_with_outliers()
    weight = torch.randn(32, 64)
    scheme = Scheme(4, 32, False)
    scales = search_scales(weight, gram, scheme)
    assert scales is not None
    plain = find_grid(weight, scheme).round(weight).dequantize()
    scaled = find_grid(weight * scales, scheme).round(weight * scales).dequantize() / scales
    errors = [float((x @ (weight - one).T).square().mean()) for one in (plain, scaled)]
    print(errors)
    assert errors[1] < 0.6 * errors[0]


def test_a_clip_lessens_the_error_and_spares_queries_and_keys(seed: int) -> None:
    _, gram = channels_with_outliers()
    weight = torch.randn(32, 64)
    weight[:, ::32] *= 4  # far out
    weight[:, 3] = 0.1
    scheme = Scheme(4, 32, False)
    plain = find_grid(weight, scheme)
    clipped = clipped_grid("mlp.up_proj", weight, gram, scheme)
    errors = [gram.error(weight - grid.round(weight).dequantize()) for grid in (plain, clipped)]
    assert errors[1] < errors[0]
    for name in ("self_attn.q_proj", "self_attn.k_proj"):
        assert torch.equal(clipped_grid(name, weight, gram, scheme).scales, plain.scales)
