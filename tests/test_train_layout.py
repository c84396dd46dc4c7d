"""How processes are laid out: what is refused in one line, and what auto takes by the memory there is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from swiftkit.config import DpoConfig, RewardConfig, SftConfig
from swiftkit.engine import FullSpec, LoraSpec
from swiftkit.engine.build import describe
from swiftkit.engine.placement import Placement
from swiftkit.errors import UserError
from swiftkit.parallel.mesh import Layout
from swiftkit.parallel.world import World, dealt
from swiftkit.plan.machine import MACHINES
from swiftkit.train import layout
from swiftkit.train.layout import room_for_tokens, settle_layout
from tests import tiny

GIB = 2**30
CPU = Placement(torch.device("cpu"), "fp32", "plain")
FP8 = Placement(torch.device("cuda"), "fp8", "fp8", fused=True)
BF16 = Placement(torch.device("cuda"), "bf16", "plain", fused=True)
SEVENTY = dict(
    hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
    num_key_value_heads=8, head_dim=128, vocab_size=128256,
)  # fmt: skip
EIGHT = dict(
    hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8, head_dim=128, vocab_size=128256,
)  # fmt: skip


def llama(**changes: Any) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model("llama", **{**tiny.SIZES, **changes})


def settled(
    size: int | str = "auto",
    *,
    processes: int = 1,
    local: int | None = None,
    description: Any = None,
    spec: LoraSpec | FullSpec | None = None,
    placement: Placement = CPU,
    **knobs: Any,
) -> Layout:
    config = SftConfig(model="m", dataset=["d.jsonl"], tensor_parallel_size=size, **knobs)
    world = World(size=processes, local_size=local or processes)
    return settle_layout(config, description or llama(), spec or LoraSpec(), placement, world)


def test_asked_for_it_is_taken() -> None:
    assert settled() == settled(processes=1) == Layout()
    assert settled(processes=4) == Layout(replicate=4)
    assert settled(2, processes=4) == Layout(replicate=2, tp=2)
    assert settled(2, processes=4).name == "tp 2 x ddp 2"


@pytest.mark.parametrize(
    ("size", "options", "words"),
    [
        (2, {}, "takes 2 processes, and this is one; give --nproc_per_node 2"),
        (2, dict(processes=3), "cannot be parted into groups of 2; sizes that would do: 1, 3"),
        (3, dict(processes=3), "4 query heads in 2 groups cannot be cut over 3 ranks"),
        (2, dict(processes=2, optim="adamw_8bit"), "adamw_8bit keeps moments .* take adamw_torch"),
        (2, dict(processes=2, spec=LoraSpec(dora=True)), "--use_dora needs the lengths of whole rows"),
        ("auto", dict(layout="fsdp"), "--layout fsdp takes several processes"),
        (2, dict(processes=2, layout="fsdp"), "--layout fsdp takes several processes"),
        ("auto", dict(processes=4, layout="hsdp"), "this is one; take --layout fsdp"),
        (
            "auto",
            dict(processes=2, layout="fsdp", spec=FullSpec(), optim="adamw_8bit"),
            "--layout fsdp: --optim adamw_8bit keeps moments .* take adamw_torch",
        ),
        (
            2,
            dict(processes=4, layout="fsdp", spec=FullSpec()),
            "with --layout fsdp a whole model is cut",
        ),
    ],
)
def test_what_cannot_be_cut_is_said_in_one_line(size: int, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words) as refusal:
        settled(size, **options)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("shape", "spec", "placement", "card", "wanted", "tokens"),
    [
        (EIGHT, LoraSpec(), FP8, "h100", Layout(replicate=8), 16384),
        (SEVENTY, LoraSpec(), FP8, "h200", Layout(replicate=8), 4096),
        (SEVENTY, LoraSpec(), FP8, "h100", Layout(replicate=4, tp=2), 4096),
        (SEVENTY, LoraSpec(), BF16, "h100", Layout(replicate=2, tp=4), 4096),
        # DoRA cannot be cut, so its base is parted.
        (SEVENTY, LoraSpec(dora=True), BF16, "h100", Layout(shard=8), 8192),
        (EIGHT, FullSpec(), BF16, "h100", Layout(shard=8), 16384),
        # It does not fit, and is refused later: as near as it comes.
        (SEVENTY, FullSpec(), BF16, "h100", Layout(shard=8), 4096),
    ],
)
def test_auto_takes_the_first_that_fits(
    shape: dict[str, int],
    spec: LoraSpec | FullSpec,
    placement: Placement,
    card: str,
    wanted: Layout,
    tokens: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    total = int(MACHINES[card].memory)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (total, total))
    description, config = llama(**shape), SftConfig(model="m", dataset=["d.jsonl"])
    found = settled(processes=8, description=description, spec=spec, placement=placement)
    assert found == wanted
    assert room_for_tokens(config, description, spec, placement, found) == tokens


def test_over_several_machines_parts_stay_within_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they fit there; what does not is parted over all."""
    total = int(MACHINES["h100"].memory)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (total, total))
    options = dict(processes=64, local=8, spec=FullSpec(), placement=BF16)
    assert settled(**options, description=llama(**EIGHT)) == Layout(replicate=8, shard=8)
    assert settled(**options, description=llama(**SEVENTY)) == Layout(shard=64)


def test_a_layout_is_taken_as_asked() -> None:
    assert settled(processes=4, layout="fsdp") == Layout(shard=4)
    assert settled(processes=4, layout="ddp") == Layout(replicate=4)
    assert settled(processes=4, local=2, layout="hsdp") == Layout(replicate=2, shard=2)
    assert settled(2, processes=4, layout="fsdp") == Layout(shard=2, tp=2)
    assert settled(2, processes=8, local=4, layout="hsdp") == Layout(replicate=2, shard=2, tp=2)
    assert [Layout(shard=4).name, Layout(replicate=2, shard=2).name] == ["fsdp 4", "hsdp 2 x 2"]


def test_auto_leaves_alone_what_it_cannot_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (GIB, GIB))
    options = dict(processes=2, placement=BF16, description=llama(**EIGHT))
    assert settled(**options, optim="adamw_8bit", spec=FullSpec()) == Layout(replicate=2)
    assert settled(**options, optim="adamw_8bit", layout="ddp") == Layout(replicate=2)
    assert settled(**options, spec=LoraSpec(dora=True), layout="ddp") == Layout(replicate=2)
    assert settled(**options, layout="ddp") == Layout(tp=2)
    assert settled(**options) == Layout(shard=2)  # nothing fits: as near as it comes


def test_windows_that_are_asked_for_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer ones, or more at once, are held by more GPUs."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (40 * GIB, 40 * GIB))
    options = dict(processes=8, placement=BF16, description=llama(**EIGHT))
    sizes = [
        settled(**options, layout="ddp", **knobs).tp
        for knobs in ({}, {"max_length": 32768}, {"per_device_train_batch_size": 8})
    ]
    assert sizes == sorted(sizes) and sizes[0] < sizes[1]
    kinds = {"plain", "fp8", "nf4", "nf4-fp8", "int"}
    assert layout.BASES.keys() == kinds


def test_ranks_of_one_model_take_the_same_rows(tmp_path: Path) -> None:
    ranks = [World(rank=rank, size=4, layout=Layout(replicate=2, tp=2)) for rank in range(4)]
    shares = [dealt(range(7), world) for world in ranks]
    assert shares[0] == shares[1] == [0, 2, 4, 6] and shares[2] == shares[3] == [1, 3, 5]
    assert [world.of_rows(5) for world in ranks] == [[5], [0], [5], [0]]
    tiny.make("llama", tmp_path)
    assert describe(tmp_path).num_key_value_heads == 2  # what the refusals above are about


def test_a_whole_reward_model_keeps_whole_weights() -> None:
    world = World(size=2, local_size=2)
    for kind, spec in ((DpoConfig, FullSpec()), (RewardConfig, LoraSpec(scores=True))):
        config = kind(model="m", dataset=["d.jsonl"], layout="fsdp")
        assert settle_layout(config, llama(), spec, CPU, world) == Layout(shard=2)
    config = RewardConfig(model="m", dataset=["d.jsonl"], layout="fsdp", tuner_type="full")
    with pytest.raises(UserError, match="trained whole keeps whole weights as yet; take --layout ddp"):
        settle_layout(config, llama(), FullSpec(scores=True), CPU, world)
