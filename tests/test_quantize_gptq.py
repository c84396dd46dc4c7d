"""GPTQ against the paper's algorithm in float64, and on matrices that break a factorisation (case 22)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from swiftkit.quantize.gptq import Solved, solve
from swiftkit.quantize.gram import Gram
from swiftkit.quantize.grid import Grid, Scheme, find_grid
from tests.cases import toy

CASE = json.loads(Path(toy.case("22-dead-channels.data.json")).read_text(encoding="utf-8"))
EXPECTED = toy.expected("22-dead-channels")


def gram_of(x: Tensor) -> Gram:
    gram = Gram.empty(x.shape[1], x.device)
    gram.add(x)
    return gram


def reference(weight: Tensor, x: Tensor, grid: Grid, *, damping: float, act_order: bool) -> Tensor:
    """Equations 2 and 3 of the paper in float64, with an inverse of what is left at every column."""
    hessian = (x.T @ x / len(x)).double()
    hessian += torch.eye(len(hessian)) * damping * hessian.diagonal().mean()
    order = torch.arange(len(hessian))
    if act_order:
        order = torch.argsort((x.T @ x).diagonal(), descending=True, stable=True)
    weight, values = weight.double().clone(), torch.empty(weight.shape, dtype=torch.float64)
    for place, column in enumerate(order.tolist()):
        left = order[place:]
        inverse = torch.linalg.inv(hessian[left][:, left])
        scale, zero = (part.double() for part in grid.columns(column))
        values[:, column] = (torch.round(weight[:, column] / scale) + zero).clamp(0, (1 << grid.bits) - 1)
        error = weight[:, column] - (values[:, column] - zero) * scale
        weight[:, left] -= (error / inverse[0, 0])[:, None] * inverse[0]
    return values


@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize("scheme", [Scheme(4, 16, True), Scheme(3, -1, False), Scheme(8, 32, True)], ids=str)
def test_it_equals_the_paper_s_algorithm_in_float64(scheme: Scheme, act_order: bool, seed: int) -> None:
    x = torch.randn(400, 160) @ (torch.randn(160, 160) * 0.1 + torch.eye(160))
    weight = torch.randn(24, 160)
    grid = find_grid(weight, scheme)
    made = solve(weight, gram_of(x), grid, damping=0.05, act_order=act_order)
    values = reference(weight, x, grid, damping=0.05, act_order=act_order)
    ours, theirs = made.codes.values.double(), values
    same = (ours == theirs).double().mean()
    codes = grid.codes(values)
    errors = [float(gram_of(x).error(weight - one.dequantize())) for one in (made.codes, codes)]
    print(f"{same:.2%} of the codes are the same, errors {errors}")
    assert same > 0.98  # a tie that rounds the other way moves what comes after it
    assert errors[0] == pytest.approx(errors[1], rel=0.02)
    assert made.damping == 0.05 and made.dead == 0


def test_it_beats_rounding_by_far_on_correlated_inputs(seed: int) -> None:
    x = torch.randn(300, 8) @ torch.randn(8, 64) + 0.1 * torch.randn(300, 64)
    weight = torch.randn(32, 64)
    grid = find_grid(weight, Scheme(4, 32, True))
    gram = gram_of(x)
    made = solve(weight, gram, grid, damping=0.01, act_order=True).codes.dequantize()
    assert gram.error(weight - made) < 0.5 * gram.error(weight - grid.round(weight).dequantize())


def case_22(setting: dict[str, Any]) -> tuple[Solved, Gram, Tensor, Grid]:
    weight, x = (torch.tensor(CASE[name]) for name in ("W_out_by_in", "X_samples_by_in"))
    grid = find_grid(weight, Scheme(setting["bits"], setting["group_size"], True))
    gram = gram_of(x)
    order = setting.get("act_order", False)
    return solve(weight, gram, grid, damping=0.05, act_order=order), gram, weight, grid


@pytest.mark.parametrize("setting", EXPECTED["settings"], ids=str)
def test_case_22_dead_and_dependent_channels(setting: dict[str, Any]) -> None:
    made, gram, weight, grid = case_22(setting)
    assert made.dead == len(EXPECTED["dead_columns"])
    assert torch.nonzero(gram.dead)[:, 0].tolist() == EXPECTED["dead_columns"]
    assert made.damping is not None
    assert torch.isfinite(grid.scales).all() and (grid.scales > 0).all()
    final = made.codes.dequantize()
    assert not final[EXPECTED["zero_row"]].any()
    ours, plain = gram.error(weight - final), gram.error(weight - grid.round(weight).dequantize())
    print(f"{ours:.4f} against {plain:.4f} by rounding")
    assert ours <= plain * (1 + 1e-6)


def test_damping_rises_until_the_factorisation_passes(seed: int) -> None:
    gram = Gram(torch.eye(8) * 10 - 1.5, torch.ones(8), rows=10)  # an eigenvalue below zero
    assert torch.linalg.eigvalsh(gram.products)[0] < 0
    weight = torch.randn(4, 8)
    made = solve(weight, gram, find_grid(weight, Scheme(4, 8, True)), damping=0.05, act_order=True)
    assert made.damping is not None and made.damping > 0.05


@pytest.mark.parametrize("broken", ["starved", "zero", "infinite"])
def test_what_cannot_be_solved_is_rounded(broken: str, seed: int) -> None:
    gram = Gram(torch.zeros(8, 8), torch.zeros(8), rows=0 if broken == "starved" else 5)
    if broken == "infinite":
        gram.products[0, 0] = float("inf")
    weight = torch.randn(4, 8)
    grid = find_grid(weight, Scheme(4, 8, True))
    made = solve(weight, gram, grid, damping=0.05, act_order=True)
    assert made.damping is None and torch.equal(made.codes.values, grid.round(weight).values)


def test_version_1_has_no_zero_point_of_0(seed: int) -> None:
    weight = torch.rand(16, 32) + 0.5  # all positive: the zero point would be 0
    plain = find_grid(weight, Scheme(4, 16, False))
    shifted = find_grid(weight, Scheme(4, 16, False, least_zero=1))
    assert int(plain.zeros.max()) == 0 and int(shifted.zeros.min()) == 1
    off = (shifted.round(weight).dequantize() - weight).abs()
    assert float(off.max()) <= float(shifted.scales.max()) * 0.51
