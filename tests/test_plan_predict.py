"""Memory, time and the choice of a layout; the document's tables; and that none of it needs torch."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from swiftkit import registry
from swiftkit.errors import UserError
from swiftkit.plan import compute, document
from swiftkit.plan.job import NO_SAVING, SAVINGS, Cut, Job
from swiftkit.plan.layout import Layout, layouts
from swiftkit.plan.machine import H100_NODE, H200_NODE
from swiftkit.plan.memory import GATHERED_LAYERS, kept_bytes, layer_bytes, memory
from swiftkit.plan.predict import best, compare, predict, why
from swiftkit.plan.shape import ModelShape, shape_of

ROOT = Path(__file__).resolve().parents[1]
TINY = ModelShape("tiny", hidden=8, layers=2, heads=4, kv_heads=2, head_dim=2, inter=16, vocab=10)
CUT = Cut(4, NO_SAVING)


def shape(name: str) -> ModelShape:
    return document.shape_called(name)


def test_shape_counts_what_the_registry_counts() -> None:
    """But for the norms: two a block of the hidden width, and one at the end."""
    for name in ("llama3-8b", "llama3-70b", "llama3.1-405b", "llama3.2-1b"):
        recipe = registry.find(name)
        assert recipe is not None and recipe.dimensions is not None
        mine = shape_of(name, recipe.dimensions)
        norms = (2 * mine.layers + 1) * mine.hidden
        assert mine.weights + norms == registry.parameter_count("llama", recipe.dimensions)


def test_experts_are_refused() -> None:
    with pytest.raises(UserError, match="mixture of experts"):
        shape("mixtral-8x7b")


def test_flops_by_hand() -> None:
    job = Job(base="bf16", sequence=4, tokens_per_gpu=4)
    assert compute.linear_flops(TINY, job, 1) == 4 * (2 * 576 + 80)
    full = Job(tuner="full", base="bf16", sequence=4, tokens_per_gpu=4)
    assert compute.linear_flops(TINY, full, 1) == 6 * (2 * 576 + 80)
    # Two products of 4 x 4 scores of width 8, half of them masked, in two blocks.
    assert compute.attention_flops(TINY, 4, 4) == 2 * (2 * 2 * 4 * 4 * 8) / 2


@pytest.mark.parametrize("base", ["bf16", "fp8", "nf4", "nf4-fp8"])
def test_one_gpu_is_as_measured(base: str) -> None:
    """Within 5 % of speed and memory of docs/performance.md, where the same numbers stand."""
    speed, room = document.MEASURED[base]  # type: ignore[index]
    job = Job(base=base)  # type: ignore[arg-type]
    one = predict(shape("llama3-8b"), job, H200_NODE, Layout())
    assert one.tokens_per_second == pytest.approx(speed, rel=0.05)
    assert one.memory.total / 2**30 == pytest.approx(room, rel=0.05)
    assert (one.waiting, one.communication, one.traffic.total) == (0, 0, 0)
    table = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    assert f"{speed:,}" in table and f"| {room} /" in table


def test_memory_by_hand() -> None:
    full = Job(tuner="full", base="bf16", sequence=4, tokens_per_gpu=4)
    alone = memory(TINY, full, Layout(), CUT)
    assert alone.weights == 2 * TINY.weights
    assert alone.training == 14 * TINY.weights  # float32 value and two moments, and a bf16 gradient
    halves = memory(TINY, full, Layout(shard=2), CUT)
    assert halves.weights == TINY.weights + GATHERED_LAYERS * 2 * 576
    fp8 = Job(base="fp8", sequence=4, tokens_per_gpu=4)
    assert layer_bytes(TINY, fp8, SAVINGS[1]) == 576 + 2 * 128
    assert layer_bytes(TINY, fp8, NO_SAVING) == 2 * 448 + 3 * 128
    lora = Job(base="bf16", rank=1, sequence=4, tokens_per_gpu=4)
    # Two residuals, q twice (the attention's output), k and v, gate and up, two bytes each.
    assert kept_bytes(TINY, lora, NO_SAVING) == 2 * (16 + 16 + 8 + 32)
    assert kept_bytes(TINY, lora, SAVINGS[-1]) == 2 * 8


@pytest.mark.parametrize("job", list(document.JOBS.values()), ids=list(document.JOBS))
def test_each_saving_saves(job: Job) -> None:
    """Down the list memory never grows and time never shrinks."""
    one = shape("llama3-8b")
    cuts = [Cut(16_384, saving) for saving in SAVINGS]
    room = [memory(one, job, Layout(), cut).total for cut in cuts]
    time = [compute.micro_batch(one, job, H200_NODE, cut).total for cut in cuts]
    assert room == sorted(room, reverse=True)
    assert time == sorted(time)
    assert room[0] > room[-1] and time[0] < time[-1]


@pytest.mark.parametrize("job", list(document.JOBS.values()), ids=list(document.JOBS))
@pytest.mark.parametrize("name", document.MODELS.values())
def test_laws_of_every_layout(name: str, job: Job, seed: int) -> None:
    """Never faster than one GPU with room for everything; hidden never slower than not; ordered by time."""
    gpus = random.Random(seed).choice([1, 2, 4, 8, 16, 128, 1024])
    ranked = compare(shape(name), job, H200_NODE, gpus)
    assert {one.layout.gpus for one in ranked} == {gpus}
    for one in ranked:
        assert 0 < one.efficiency_unhidden <= one.efficiency + 1e-12
        assert one.efficiency <= 1 + 1e-9
        assert one.waiting <= one.communication + 1e-9
        assert one.micro_batches * one.cut.micro_tokens == job.tokens_per_gpu * one.layout.tp
        assert (one.traffic.nic > 0) == (gpus > H200_NODE.gpus)
    fitting = [one.seconds for one in ranked if one.fits]
    assert fitting == sorted(fitting)
    assert [one.fits for one in ranked] == sorted((one.fits for one in ranked), reverse=True)


def test_faster_links_never_hurt() -> None:
    slow = compare(shape("llama3-70b"), Job(), H200_NODE.with_links(nvlink=25e9, nic=5e9), 64)[0]
    fast = compare(shape("llama3-70b"), Job(), H200_NODE.with_links(nvlink=450e9, nic=50e9), 64)[0]
    assert slow.seconds > fast.seconds
    assert slow.layout.shard == 1  # where weights cannot be gathered in time they stay where they are


def test_small_bases_are_copied_and_large_ones_cut() -> None:
    """An 8B base is copied, whatever the number of GPUs; 405B cannot be."""
    for gpus in (2, 8, 64, 512):
        assert best(shape("llama3-8b"), Job(), H200_NODE, gpus).layout == Layout(replicate=gpus)
        assert "ddp needs" in why(compare(shape("llama3.1-405b"), Job(), H200_NODE, max(gpus, 8)))
    with pytest.raises(UserError, match=r"does not fit on 2 GPUs.* train an adapter"):
        best(shape("llama3-70b"), document.JOBS["full, bf16"], H200_NODE, 2)
    assert not compare(shape("llama3-70b"), Job(), H100_NODE, 1)[0].fits


def test_layouts_split_whole_heads_and_nodes() -> None:
    for gpus in (1, 2, 8, 64):
        for layout in layouts(shape("llama3-70b"), gpus, node=8):
            assert layout.gpus == gpus
            assert layout.tp <= 8
    assert {layout.tp for layout in layouts(TINY, 8, node=8)} == {1, 2}
    with pytest.raises(UserError, match="no whole number of nodes"):
        list(layouts(TINY, 12, node=8))


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        (Layout(), "one GPU"),
        (Layout(replicate=4), "ddp 4"),
        (Layout(shard=4), "fsdp 4"),
        (Layout(replicate=2, shard=4), "hsdp 2 x 4"),
        (Layout(replicate=2, tp=4), "tp 4 x ddp 2"),
        (Layout(shard=2, tp=4), "tp 4 x fsdp 2"),
    ],
)
def test_names(layout: Layout, name: str) -> None:
    assert layout.name == name


def test_the_document_is_what_the_command_writes(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    assert document.renewed(text) == text, "python -m swiftkit.plan.document --into docs/scaling.md"
    with pytest.raises(ValueError, match="has no <!-- plan measured"):
        document.renewed("nothing")


def test_the_plan_needs_no_torch() -> None:
    code = (
        "import sys; from swiftkit.plan import document, predict; document.winners(document.H200_NODE);"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
