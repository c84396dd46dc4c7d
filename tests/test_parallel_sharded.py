"""Weights in parts over real processes: the same loss, gradients and steps as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from swiftkit.engine import Batch, Engine, FullSpec, LoraSpec
from swiftkit.methods.sft import loss
from swiftkit.parallel.world import ALONE, World
from tests import tiny
from tests.packed import pack_folder
from tests.ranks import on_ranks
from tests.test_parallel_tp import BOUND, CPU, MODELS, SPEC, error

STEPS = 10
# Rows of each step: over two or four ranks some have one more, or none.
ROWS = (3, 1, 4)
Seen = dict[str, Any]

# A case: a folder below the models', what is trained, and options of `Engine.load`.
Case = tuple[str, LoraSpec | FullSpec, dict[str, Any]]
ENDS = LoraSpec(rank=4, alpha=8, modules_to_save=("embed_tokens", "lm_head"))
CASES: dict[str, Case] = {
    "lora": ("llama", SPEC, {}),
    "lora-tied": ("llama-tied-biased", SPEC, {}),
    "ends": ("llama", ENDS, {}),
    "dora": ("llama", LoraSpec(rank=4, alpha=8, dora=True), {}),
    "pissa": ("llama", LoraSpec(rank=4, alpha=8, pissa=True), {}),
    "uneven": ("odd", SPEC, {}),
    "nf4": ("wide-llama", SPEC, {"base": "nf4"}),
    "fp8": ("wide-llama", SPEC, {"base": "fp8"}),
    "nf4-fp8": ("wide-llama", SPEC, {"base": "nf4-fp8"}),
    "int": ("packed", SPEC, {"base": "int"}),
    "fused": ("square", SPEC, {"fused": True}),
    "fused-qwen2": ("square-qwen2", SPEC, {"fused": True}),
    "fused-nf4": ("wide-llama", SPEC, {"fused": True, "base": "nf4"}),
    "fused-fp8": ("wide-llama", SPEC, {"fused": True, "base": "fp8"}),
    "fused-nf4-fp8": ("wide-llama", SPEC, {"fused": True, "base": "nf4-fp8"}),
    "full": ("llama", FullSpec(), {}),
    "full-tied": ("llama-tied-biased", FullSpec(), {}),
    "full-uneven": ("odd", FullSpec(), {}),
    "full-gemma2": ("gemma2", FullSpec(), {}),
}
ODD = dict(hidden_size=72, num_attention_heads=9, num_key_value_heads=3, vocab_size=273)
QUICK = ["lora", "nf4", "int", "fp8", "fused-nf4-fp8", "full", "full-tied"]


def make_models(folder: Path, cases: list[str]) -> None:
    for name in sorted({CASES[case][0] for case in cases}):
        if name == "packed":
            tiny.make("llama", folder / "unpacked", **MODELS["wide-llama"][1])
            pack_folder(folder / "unpacked", folder / name, "gptq", 4)
            continue
        family, changes = {**MODELS, "odd": ("llama", ODD)}.get(name, (name, {}))
        tiny.make(family, folder / name, **changes)


def load(folder: Path, case: str, mesh: DeviceMesh | None = None, device: torch.device = CPU) -> Engine:
    name, spec, options = CASES[case]
    what = {"lora": spec} if isinstance(spec, LoraSpec) else {"full": spec}
    options = {"fused": False, **options}
    return Engine.load(folder / name, dtype=torch.float32, device=device, shard=mesh, **what, **options)


def world_of(mesh: DeviceMesh | None) -> World:
    if mesh is None:
        return ALONE
    return World(dist.get_rank(), dist.get_world_size(), replicas=dist.group.WORLD)


def rows(step: int, world: World, device: torch.device = CPU) -> list[Batch]:
    """This rank's batches of a step."""
    count = ROWS[step % len(ROWS)]
    packed = [tiny.packed([13, 4, 9 + number], seed=10 * step + number) for number in range(count)]
    return [Batch.of(p, device=device) for p in packed[world.rank :: world.size]]


def trained(engine: Engine) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in engine.whole_parameters().items()}


def run(folder: Path, case: str, mesh: DeviceMesh | None, steps: int = STEPS) -> Seen:
    """An evaluation, first gradients, and what some steps make of the parameters."""
    world, engine = world_of(mesh), load(folder, case, mesh)
    seen: Seen = {"start": trained(engine)}
    if isinstance(CASES[case][1], LoraSpec):
        drawn = {name: value.clone() for name, value in seen["start"].items()}
        tiny.randomise_adapter({name: value for name, value in drawn.items() if "lora_" in name})
        engine.load_adapter(drawn)
    seen["evaluated"] = evaluated(engine, world)
    # With the usual eps, what has no gradient but rounding (key biases) would move by whole steps.
    optimizer = torch.optim.AdamW(list(engine.parameters.values()), lr=1e-3, eps=1e-4)
    for step in range(steps):
        sums = engine.forward_backward(rows(step, world), loss, denominator=38)
        world.sum_gradients(engine.unsummed)
        seen.setdefault("losses", []).append(float(world.sum_named(sums, CPU)["loss"]))
        seen.setdefault("norms", []).append(float(engine.gradient_norm()))
        if step == 0:
            seen["gradients"] = gradients(engine)
        optimizer.step()
        optimizer.zero_grad()
    seen["end"] = trained(engine)
    seen["evaluated again"] = evaluated(engine, world) if steps == STEPS else seen["evaluated"]
    return seen


def evaluated(engine: Engine, world: World) -> list[float]:
    """The loss of three rows, and of one: ranks without any take part."""
    sums = [world.sum_named(engine.evaluate(iter(rows(step, world)), loss), CPU) for step in (0, 1)]
    return [float(each["loss"]) for each in sums]


def gradients(engine: Engine) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in engine.parameters.items():
        assert parameter.grad is not None, name
        own = parameter.grad.clone()
        found[name] = own if engine.cut is None else engine.cut.whole(name, own)
    return found


def compare(own: Seen, one: Seen, bound: float = BOUND) -> list[str]:
    """What differs by more than the bound, in words."""
    found = {}
    for what in ("start", "gradients", "end"):
        assert own[what].keys() == one[what].keys()
        found |= {f"{what} of {name}": error(own[what][name], one[what][name]) for name in one[what]}
    for what in ("losses", "norms", "evaluated", "evaluated again"):
        found[what] = max(abs(a / b - 1) for a, b in zip(own[what], one[what], strict=True))
    return [f"{name}: {value:.1e}" for name, value in found.items() if not value <= bound]


def steps_of(case: str) -> int:
    """FP8 products: rows keep their roundings, but a step later the adapter's last digits differ."""
    return 1 if "fp8" in case else STEPS


def run_cases(folder: Path, cases: list[str], copies: int) -> dict[str, Seen]:
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (copies, size // copies), mesh_dim_names=("replicate", "shard"))
    mesh = mesh if copies > 1 else mesh["shard"]
    return {case: run(folder, case, mesh, steps_of(case)) for case in cases}


def prove(folder: Path, size: int, cases: list[str], copies: int = 1) -> None:
    make_models(folder, cases)
    ranks = on_ranks(run_cases, size, folder / "ranks", folder, cases, copies)
    one = {case: run(folder, case, None, steps_of(case)) for case in cases}
    wrong = {
        f"{case}, rank {rank}": off
        for case in cases
        for rank, seen in enumerate(ranks)
        if (off := compare(seen[case], one[case]))
    }
    assert not wrong, "\n".join(f"{case}: {off[:6]} and {len(off)} in all" for case, off in wrong.items())


def test_two_ranks_equal_one_process(tmp_path: Path) -> None:
    prove(tmp_path, 2, QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_every_base_and_adapter(size: int, tmp_path: Path) -> None:
    """Three parts are uneven, and some are empty."""
    prove(tmp_path, size, [case for case in CASES if size == 3 or case not in QUICK])


@pytest.mark.slow
def test_copies_of_parts(tmp_path: Path) -> None:
    """Two times two ranks: gathered between two, trained gradients summed between all four."""
    prove(tmp_path, 4, ["lora", "nf4", "full", "full-tied"], copies=2)
