"""Bytes moved: small cases by hand, and what holds for every group, layout and model."""

from __future__ import annotations

from itertools import product

import pytest

from swiftkit.plan.collectives import NOTHING, Traffic, all_gather, all_reduce, reduce_scatter
from swiftkit.plan.job import NO_SAVING, SAVINGS, Cut, Job
from swiftkit.plan.layout import Group, Layout
from swiftkit.plan.machine import H200_NODE
from swiftkit.plan.shape import ModelShape
from swiftkit.plan.traffic import step_traffic

TINY = ModelShape("tiny", hidden=8, layers=2, heads=4, kv_heads=2, head_dim=2, inter=16, vocab=10)
GROUPS = [Group(inside, nodes) for inside, nodes in product((1, 2, 3, 4, 8), (1, 2, 5, 64))]
LORA = Job(base="bf16", rank=1, sequence=4, tokens_per_gpu=8)
FULL = Job(tuner="full", base="bf16", sequence=4, tokens_per_gpu=8)
CUT = Cut(4, NO_SAVING)
# Of one block: q 64, k and v 32 each, o 64, gate, up and down 128 each.
LAYER = 576


def test_ring_of_four() -> None:
    """Three of four parts come from others; an all-reduce does it twice."""
    group = Group(inside=4, nodes=1)
    assert all_gather(400, group) == Traffic(nvlink=300, nic=0, nvlink_steps=3, nic_steps=0)
    assert all_reduce(400, group).nvlink == 600


def test_ring_over_two_nodes_of_four() -> None:
    """Half of the whole is in the other node, and comes over four cards; the rest is passed on inside."""
    sent = all_gather(800, Group(inside=4, nodes=2))
    assert sent.nic == 100
    assert sent.nvlink == 600
    sent = all_reduce(800, Group(inside=4, nodes=2))
    assert sent.nic == 200  # 2 (nodes - 1) / nodes of a GPU's quarter
    assert sent.nvlink == 1200  # 2 (inside - 1) / inside of the whole


@pytest.mark.parametrize("group", GROUPS)
def test_every_byte_is_counted_once(group: Group) -> None:
    whole, n = 960.0, group.size
    gathered = all_gather(whole, group)
    assert gathered.total == pytest.approx((n - 1) / n * whole)
    assert all_reduce(whole, group).total == pytest.approx(2 * (n - 1) / n * whole)
    assert reduce_scatter(whole, group) == gathered
    # Into a node come the parts of all other nodes, and no more.
    assert gathered.nic * group.inside == pytest.approx(whole * (group.nodes - 1) / group.nodes)
    assert gathered.nvlink >= -1e-9


def test_the_slower_link_decides() -> None:
    both = Traffic(nvlink=360e9, nic=40e9)  # at 0.8 of 450 and 50 GB/s
    assert both.seconds(H200_NODE) == pytest.approx(1.0)
    assert (both + Traffic(nic=40e9)).seconds(H200_NODE) == pytest.approx(2.0)
    measured = H200_NODE.with_links(nvlink=360e9, nic=20e9)
    assert both.seconds(measured) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("layout", "axes", "group"),
    [
        (Layout(tp=8, replicate=2), ("tp",), Group(8, 1)),
        (Layout(tp=8, replicate=2), ("shard", "replicate"), Group(1, 2)),
        (Layout(tp=2, replicate=8), ("shard", "replicate"), Group(4, 2)),
        (Layout(tp=2, replicate=8), ("tp", "shard", "replicate"), Group(8, 2)),
        (Layout(shard=8, replicate=4), ("shard",), Group(8, 1)),
        (Layout(shard=8, replicate=4), ("replicate",), Group(1, 4)),
        (Layout(shard=32), ("shard",), Group(8, 4)),
        (Layout(tp=4, shard=16), ("shard",), Group(2, 8)),
        (Layout(replicate=2), ("shard", "replicate"), Group(2, 1)),
    ],
)
def test_groups_on_nodes_of_eight(layout: Layout, axes: tuple[str, ...], group: Group) -> None:
    assert layout.group(*axes, node=8) == group


def test_copies_send_adapter_gradients_only() -> None:
    """A of rank 1 has as many numbers as a layer has inputs, B as it has outputs."""
    inputs = 8 * 6 + 16
    outputs = 8 + 4 + 4 + 8 + 16 + 16 + 8
    assert sum(TINY.adapter_weights(1)) == 2 * (inputs + outputs)
    sent = step_traffic(TINY, LORA, Layout(replicate=2), CUT, node=8).step(2)
    assert sent.total == pytest.approx(2 * 0.5 * 4 * 2 * (inputs + outputs))


def test_shards_are_gathered_twice_a_micro_batch() -> None:
    sent = step_traffic(TINY, LORA, Layout(shard=4), CUT, node=8)
    ends = 2 * 10 * 8
    assert sent.gather_forward.total == pytest.approx(0.75 * 2 * (2 * LAYER + ends))
    assert sent.gather_backward.total == pytest.approx(0.75 * 2 * 2 * LAYER)
    assert sent.scatter == NOTHING
    full = step_traffic(TINY, FULL, Layout(shard=4), CUT, node=8)
    assert full.scatter.total == pytest.approx(0.75 * 4 * (2 * LAYER + ends))
    assert full.gradients == NOTHING


@pytest.mark.parametrize(
    ("base", "forward", "backward"),
    [("bf16", 2 * LAYER, 2 * LAYER), ("fp8", LAYER + 128, LAYER), ("nf4", 0.5625 * LAYER, 0.5625 * LAYER)],
)
def test_frozen_shards_travel_in_their_own_precision(base: str, forward: float, backward: float) -> None:
    """FP8 takes a byte a weight, and q, k and v (128 of a block) two forward."""
    job = Job(base=base, sequence=4, tokens_per_gpu=8)  # type: ignore[arg-type]
    sent = step_traffic(TINY, job, Layout(shard=2), CUT, node=8)
    ends = 2 * 2 * 10 * 8
    assert sent.gather_forward.total == pytest.approx(0.5 * (2 * forward + ends))
    assert sent.gather_backward.total == pytest.approx(0.5 * 2 * backward)


def test_tensor_parallel_activations() -> None:
    """Four gathers and four scattered sums a block, three at the ends, of tokens x hidden in bf16."""
    tensor = step_traffic(TINY, LORA, Layout(tp=2), CUT, node=8).tensor
    one = 0.5 * 4 * 8 * 2
    assert tensor.total == pytest.approx((2 * 8 + 3) * one + 2 * 0.5 * 12 * 4)
    again = step_traffic(TINY, LORA, Layout(tp=2), Cut(4, SAVINGS[-1]), node=8).tensor
    assert again.total - tensor.total == pytest.approx(2 * 3 * one)


def test_sequence_parallelism_sends_what_all_reduces_would() -> None:
    """A gather and a scattered sum are the two halves of an all-reduce."""
    group = Group(inside=4, nodes=1)
    assert (all_gather(64, group) + reduce_scatter(64, group)).total == all_reduce(64, group).total


@pytest.mark.parametrize("job", [LORA, FULL], ids=["lora", "full"])
def test_laws_over_layouts(job: Job) -> None:
    """Alone nothing is sent, in one node nothing leaves it, and copies send the same whatever the cut."""
    assert step_traffic(TINY, job, Layout(), CUT, node=8).step(4) == NOTHING
    for layout in (Layout(replicate=8), Layout(shard=8), Layout(tp=2, shard=2, replicate=2)):
        assert step_traffic(TINY, job, layout, CUT, node=8).step(4).nic == 0
        assert step_traffic(TINY, job, layout, CUT, node=4).step(4).nic > 0
    copies = step_traffic(TINY, job, Layout(replicate=4), CUT, node=8)
    assert copies.step(1) == copies.step(7)
    shards = step_traffic(TINY, job, Layout(shard=4), CUT, node=8)
    assert shards.step(3).total - shards.step(2).total == pytest.approx(
        shards.step(2).total - shards.step(1).total
    )


def test_full_hsdp_sends_a_shard_between_copies() -> None:
    sent = step_traffic(TINY, FULL, Layout(replicate=2, shard=8), CUT, node=8)
    assert sent.gradients.nic == pytest.approx(4 * TINY.weights / 8)
    assert sent.gradients.nvlink == 0
    assert sent.gather_forward.nic == sent.scatter.nic == 0
