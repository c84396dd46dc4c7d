"""One Gram matrix for each distinct input, whatever the order in which layers run; and shapes (case 21)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from swiftkit.errors import UserError
from swiftkit.quantize.gram import Watch, owners, starved
from swiftkit.quantize.layout import Layout, choose
from swiftkit.quantize.shapes import cards_for, check_shapes, linears_of, splits
from tests.cases import toy

LAYERS = json.loads(Path(toy.case("21-group-size.layers.json")).read_text(encoding="utf-8"))
EXPECTED = toy.expected("21-group-size")
SHAPES = {name: tuple(shape) for name, shape in LAYERS["layers"].items()}


class Experts(nn.Module):
    """A layer with a router, two experts of which one is never chosen, and two readers of one input."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 2)
        self.q_proj, self.k_proj = nn.Linear(8, 4), nn.Linear(8, 4)
        self.chosen, self.never = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        self.gate(x)
        return self.chosen(x[..., :3, :] * 2).sum() + self.q_proj(x).sum() + self.k_proj(x).sum()


def test_distinct_inputs_have_one_matrix_each_and_starved_experts_are_named(seed: int) -> None:
    block = Experts()
    linears = linears_of(block)
    assert "gate" not in linears  # it chooses experts
    batches = [torch.randn(1, 5, 8), torch.randn(1, 7, 8)]
    with Watch(linears) as watch:
        for x in batches:
            block(x)
    block(torch.randn(1, 5, 8))  # no longer watched
    assert [one.names for one in watch.inputs] == [["chosen"], ["q_proj", "k_proj"]]
    assert starved(watch.inputs, watch.linears) == ["never"]
    grams = owners(watch.inputs)
    rows = torch.cat([x[0] for x in batches])
    torch.testing.assert_close(grams["k_proj"].products, rows.T @ rows)
    torch.testing.assert_close(grams["q_proj"].magnitudes, rows.abs().sum(0))
    assert grams["q_proj"].rows == 12 and grams["chosen"].rows == 6
    difference = torch.randn(4, 8)
    exact = float((rows @ difference.T).square().mean())
    assert grams["q_proj"].error(difference) == pytest.approx(exact, rel=1e-4)


def layout(group: int, form: str = "compressed-tensors") -> Layout:
    return choose(
        method="gptq", form=form, bits=4, group_size=group, symmetric="auto", damping=0.05, act_order=True,
        dtype=torch.float16,
    )  # fmt: skip


def test_case_21_a_group_size_that_does_not_divide_is_said_with_the_layer() -> None:
    with pytest.raises(UserError) as refusal:
        check_shapes(SHAPES, layout(LAYERS["group_size"]))
    assert all(word in str(refusal.value) for word in EXPECTED["message_has"])
    assert not any(name in str(refusal.value) for name in SHAPES if name not in EXPECTED["not_divisible"])
    check_shapes(SHAPES, layout(-1))
    check_shapes({name: shape for name, shape in SHAPES.items() if name != "down_proj"}, layout(32))


def test_case_21_where_row_parallel_layers_split() -> None:
    for name, table in EXPECTED["row_parallel_split_ok"].items():
        for cards, right in table.items():
            assert splits(SHAPES[name][1], LAYERS["group_size"], int(cards)) is right, (name, cards)
    assert splits(80, -1, 4) and not splits(80, -1, 3)
    assert cards_for({"a.o_proj": (96, 64)}, group_size=32, heads=4) == [1, 2]


def test_the_mend_names_group_sizes_that_fit() -> None:
    with pytest.raises(UserError, match="--group_size 64 or 32 divides all"):
        check_shapes({"q_proj": (576, 576), "down_proj": (576, 1536)}, layout(128))
    with pytest.raises(UserError, match="80 columns are no multiple of 32; take another --format"):
        check_shapes({"q_proj": (96, 80)}, layout(16, "gptq"))


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (dict(method="fp8", bits=4), "8 bits"),
        (dict(method="rtn", bits=3, form="gptq"), "3 is for --method gptq"),
        (dict(method="awq", bits=8), "--format awq holds 4 bits"),
        (dict(method="rtn", symmetric=False), "no zero points"),
    ],
)
def test_what_a_format_cannot_hold_is_refused(asked: dict[str, object], words: str) -> None:
    knobs: dict[str, Any] = dict(
        method="gptq", form="auto", bits="auto", group_size=32, symmetric="auto", damping=0.05,
        act_order=True, dtype=torch.float16,
    )  # fmt: skip
    with pytest.raises(UserError, match=words):
        choose(**{**knobs, **asked})
