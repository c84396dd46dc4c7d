"""What can be cut and how, without processes: the shards of all ranks make the whole."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from swiftkit.engine import LoraSpec
from swiftkit.engine.build import check_model
from swiftkit.engine.families import FAMILIES
from swiftkit.errors import UserError
from swiftkit.formats.weights import Weights
from swiftkit.parallel import rules
from swiftkit.parallel.shards import Shard, evenly, fits
from tests import tiny

CASES = Path(__file__).parent / "cases"


def config_of(**changes: Any) -> Any:
    return AutoConfig.for_model("llama", **{**tiny.SIZES, **changes})


def test_case_21_a_group_that_a_cut_would_part() -> None:
    layers = json.loads((CASES / "21-group-size.layers.json").read_text())
    expected = json.loads((CASES / "21-group-size.expect.json").read_text())
    for name, table in expected["row_parallel_split_ok"].items():
        width = layers["layers"][name][1]
        for parts, allowed in table.items():
            assert fits(width, int(parts), layers["group_size"]) is allowed, (name, parts)
        assert fits(width, 2), "a scale a row is never parted"


def test_every_served_family_has_rules() -> None:
    assert rules.RULES.keys() == FAMILIES.keys()


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 8, 12])
def test_shards_of_all_ranks_make_the_whole(size: int) -> None:
    """Heads, keys, MLP and vocabulary, also inside of a fused projection; a copy counts once."""
    config = config_of(hidden_size=96, num_attention_heads=12, num_key_value_heads=3 if size in (3, 6) else 4)
    table = [
        rules.Rule("column", ("query", "key", "key")),
        rules.Rule("column", ("inter", "inter")),
        rules.Rule("row", ("query",)),
    ]
    cuts = [rules.cuts(config, size=size, rank=rank, rows=271) for rank in range(size)]
    for rule in table:
        shards = [cut.shard(rule) for cut in cuts]
        whole = torch.arange(1.0, shards[0].whole + 1)
        parts = [shard.along(0) for shard in shards]
        added = torch.stack([part.put(part.counted(part.take(whole))) for part in parts]).sum(0)
        assert torch.equal(added, whole)
        assert all(torch.equal(part.take(part.put(part.take(whole))), part.take(whole)) for part in parts)
        assert sum(cut.heads for cut in cuts) == 12
    ends = [cut.vocabulary.ranges[0] for cut in cuts]
    assert ends[0][0] == 0 and ends[-1][1] == 271
    assert all(one[1] == other[0] for one, other in pairwise(ends))


def test_uneven_parts_differ_by_a_unit() -> None:
    assert [evenly(272, 3, part, unit=16) for part in range(3)] == [(0, 96), (96, 192), (192, 272)]


@pytest.mark.parametrize(
    ("size", "quantized", "changes", "words"),
    [
        (3, False, {}, ("4 query heads in 2 groups", "3 ranks", "sizes that would do: 1, 2, 4")),
        (8, False, {}, ("4 query heads", "sizes that would do: 1, 2, 4")),
        (2, False, {"intermediate_size": 95}, ("down_proj is 95 wide", "sizes that would do: 1")),
        (2, True, {"head_dim": 64}, ("down_proj is 96 wide", "blocks of 64", "--base_precision bf16")),
        (
            4,
            True,
            {"intermediate_size": 256, "head_dim": 32},
            ("1 query heads, 32 wide", "64", "would do: 1"),
        ),
    ],
)
def test_what_cannot_be_cut_is_refused_with_the_sizes_that_would_do(
    size: int, quantized: bool, changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(UserError) as refused:
        rules.check(config_of(**changes), size=size, quantized=quantized)
    message = str(refused.value)
    assert message.startswith(f"--tensor_parallel_size {size}: ")
    assert all(word in message for word in words), message


def test_a_family_without_rules_is_refused_by_name() -> None:
    with pytest.raises(UserError, match="no rules to cut 'gpt2' models; leave it at 1"):
        rules.check(AutoConfig.for_model("gpt2"), size=2, quantized=False)


@pytest.mark.parametrize(("kind", "word"), [("dora", "--use_dora"), ("pissa", "--init_lora_weights")])
def test_adapters_that_need_whole_weights_are_refused(kind: str, word: str, tmp_path: Path) -> None:
    tiny.make("llama", tmp_path)
    with pytest.raises(UserError, match=f"--tensor_parallel_size 2: {word}"):
        check_model(tmp_path, LoraSpec(**{kind: True}), tensor_parallel_size=2)


@pytest.mark.parametrize("dim", [0, 1])
def test_a_part_is_read_alone(dim: int, tmp_path: Path) -> None:
    model = tiny.make("llama", tmp_path)
    name = "model.layers.0.mlp.down_proj.weight"
    whole = dict(model.named_parameters())[name].detach()
    shard = Shard(dim, ((1, 9), (40, 48)), whole.shape[dim])
    part = Weights(tmp_path).part(name, shard)
    assert torch.equal(part, shard.take(whole))
    assert part.is_contiguous() and part.untyped_storage().nbytes() == part.nbytes
