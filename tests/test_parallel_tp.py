"""Tensor parallelism over real processes: the same model, loss, gradients and steps as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from swiftkit.engine import Batch, Engine, FullSpec, LoraSpec
from swiftkit.engine.compiled import compile_layers
from swiftkit.formats.peft import save_adapter
from swiftkit.methods.sft import loss
from tests import tiny
from tests.ranks import on_ranks

CPU = torch.device("cpu")
SPEC = LoraSpec(rank=4, alpha=8)
BOUND = 1e-5
STEPS = 10
Seen = dict[str, Any]

# A case: a folder below the models', what is trained, and options of `Engine.load`.
Case = tuple[str, LoraSpec | FullSpec, dict[str, Any]]
CASES: dict[str, Case] = {
    **{family: (family, SPEC, {}) for family in tiny.FAMILIES},
    "uneven": ("uneven", SPEC, {}),
    "dropout": ("llama", LoraSpec(rank=4, alpha=8, dropout=0.25), {}),
    "ends": ("llama", LoraSpec(rank=4, alpha=8, modules_to_save=("embed_tokens", "lm_head")), {}),
    **{f"full-{family}": (family, FullSpec(), {}) for family in tiny.FAMILIES},
    "fused": ("square", SPEC, {"fused": True}),
    "fused-qwen2": ("square-qwen2", SPEC, {"fused": True}),
    "fused-nf4": ("wide-llama", SPEC, {"fused": True, "base": "nf4"}),
    **{f"nf4-{family}": (f"wide-{family}", SPEC, {"base": "nf4"}) for family in ("llama", "phi3")},
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in tiny.FAMILIES},
    "uneven": ("llama", dict(hidden_size=72, num_attention_heads=9, num_key_value_heads=3, vocab_size=271)),
    "square": ("llama", dict(hidden_size=128, intermediate_size=256, head_dim=64)),
    "square-qwen2": ("qwen2", dict(hidden_size=256, intermediate_size=256, num_hidden_layers=2)),
    **{
        f"wide-{family}": (
            family,
            dict(hidden_size=128, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2,
                 head_dim=64, num_hidden_layers=4),
        )
        for family in ("llama", "phi3")
    },
}  # fmt: skip


def make_models(folder: Path, cases: list[str]) -> None:
    for name in sorted({CASES[case][0] for case in cases}):
        family, changes = MODELS[name]
        tiny.make(family, folder / name, **changes)


def run(folder: Path, cases: list[str], *, parallel: bool) -> dict[str, Seen]:
    """Each case's logits, loss, gradients, their norm, and what ten steps make of the parameters."""
    torch.manual_seed(0)
    group = dist.group.WORLD if parallel else None
    return {case: _run(folder, CASES[case], group) for case in cases}


def _run(folder: Path, case: Case, group: dist.ProcessGroup | None) -> Seen:
    name, spec, options = case
    what = {"lora": spec} if isinstance(spec, LoraSpec) else {"full": spec}
    engine = Engine.load(folder / name, dtype=torch.float32, device=CPU, tp=group, **what, **options)
    start = {key: value.clone() for key, value in engine.whole_parameters().items()}
    if isinstance(spec, LoraSpec):
        drawn = {key: value.clone() for key, value in start.items()}
        tiny.randomise_adapter({key: value for key, value in drawn.items() if "lora_" in key})
        engine.load_adapter(drawn)
    batches = [tiny.row(tiny.documents([13, 4, 22], seed=seed)) for seed in range(3)]
    seen: Seen = {"start": start, "logits": _logits(engine, batches[0])}
    torch.manual_seed(3)
    # With the usual eps, what has no gradient but rounding (key biases) would move by whole steps.
    optimizer = torch.optim.AdamW(list(engine.parameters.values()), lr=1e-3, eps=1e-4)
    for step in range(STEPS):
        sums = engine.forward_backward([batches[step % 3], batches[(step + 1) % 3]], loss, denominator=38)
        norm = engine.gradient_norm()
        if step == 0:
            seen["gradients"] = _gradients(engine)
        seen.setdefault("losses", []).append(float(sums["loss"]))
        seen.setdefault("norms", []).append(float(norm))
        optimizer.step()
        optimizer.zero_grad()
    seen["end"] = engine.whole_parameters()
    return seen


def _logits(engine: Engine, batch: Batch) -> torch.Tensor:
    engine.model.eval()
    with torch.no_grad():
        logits = engine.head.logits(engine.hidden(batch))
    engine.model.train()
    return logits


def _gradients(engine: Engine) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in engine.parameters.items():
        assert parameter.grad is not None, name
        found[name] = parameter.grad.clone() if engine.tp is None else engine.tp.whole(name, parameter.grad)
    return found


def error(own: torch.Tensor, other: torch.Tensor) -> float:
    assert own.shape == other.shape
    return float((own - other).norm() / other.norm().clamp_min(1e-12))


def compare(own: Seen, one: Seen, bound: float = BOUND) -> list[str]:
    """What differs by more than the bound, in words."""
    found = {"logits": error(own["logits"], one["logits"])}
    for what in ("start", "gradients", "end"):
        assert own[what].keys() == one[what].keys()
        found |= {f"{what} of {name}": error(own[what][name], one[what][name]) for name in one[what]}
    for what in ("losses", "norms"):
        found[what] = max(abs(a / b - 1) for a, b in zip(own[what], one[what], strict=True))
    return [f"{name}: {value:.1e}" for name, value in found.items() if not value <= bound]


def prove(folder: Path, size: int, cases: list[str]) -> None:
    make_models(folder, cases)
    ranks = on_ranks(run_parallel, size, folder / "ranks", folder, cases)
    one = run(folder, cases, parallel=False)
    wrong = {
        f"{case}, rank {rank}": off
        for case in cases
        for rank, seen in enumerate(ranks)
        if (off := compare(seen[case], one[case]))
    }
    assert not wrong, "\n".join(f"{case}: {off[:6]} and {len(off)} in all" for case, off in wrong.items())


def run_parallel(folder: Path, cases: list[str]) -> dict[str, Seen]:
    if "llama" in cases:
        save(folder, parallel=True)
    return run(folder, cases, parallel=True)


FAST = ["llama", "phi3", "olmo2", "uneven", "dropout", "full-llama-tied-biased", "nf4-llama", "fused"]


def test_two_ranks_equal_one_process(tmp_path: Path) -> None:
    """Every number of a run, and the adapter's file, byte for byte."""
    prove(tmp_path, 2, FAST)
    save(tmp_path, parallel=False)
    for file in (tmp_path / "one").iterdir():
        assert (tmp_path / "gathered" / file.name).read_bytes() == file.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("part", range(4))
def test_every_family_and_base(part: int, size: int, tmp_path: Path) -> None:
    """With four ranks there are more of them than key-value heads; three cannot share two groups' heads."""
    prove(tmp_path, size, [case for case in CASES if not (size == 4 and case == "uneven")][part::4])


def save(folder: Path, *, parallel: bool) -> None:
    """Drawn values as a PEFT adapter."""
    group = dist.group.WORLD if parallel else None
    engine = Engine.load(folder / "llama", dtype=torch.float32, device=CPU, lora=SPEC, tp=group)
    generator = torch.Generator().manual_seed(5)
    shapes = {name: tensor.shape for name, tensor in engine.whole_parameters().items()}
    engine.load_adapter({name: torch.randn(shape, generator=generator) for name, shape in shapes.items()})
    tensors = engine.whole_parameters()
    if not parallel or dist.get_rank() == 0:
        out = folder / ("gathered" if parallel else "one")
        out.mkdir()
        save_adapter(out, tensors, spec=SPEC, base_model="toy", linear_names=engine.linear_names)


def graphs(folder: Path) -> tuple[list[int], float]:
    """Graphs of compiled layers after each of three rows, and the last loss's error against eager ones."""
    seen: list[float] = []
    counts: list[int] = []
    count = 0

    def counted(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        nonlocal count
        count += 1
        return graph.forward

    for compiled in (False, True):
        engine = Engine.load(
            folder / "llama", dtype=torch.float32, device=CPU, lora=SPEC, tp=dist.group.WORLD
        )
        if compiled:
            compile_layers(engine.model, backend=counted)  # type: ignore[arg-type]
        for lengths in ([13, 4], [9, 8], [17]):
            sums = engine.forward_backward([tiny.row(tiny.documents(lengths))], loss, denominator=1.0)
            counts += [count] if compiled else []
        seen.append(float(sums["loss"]))
    return counts, abs(seen[1] / seen[0] - 1)


@pytest.mark.slow
def test_collectives_compile(tmp_path: Path) -> None:
    """Nothing is compiled again after the first step, whatever documents a row holds."""
    make_models(tmp_path, ["llama"])
    for counts, off in on_ranks(graphs, 2, tmp_path / "ranks", tmp_path):
        assert counts[0] > 0 and set(counts) == {counts[0]}
        assert off < 1e-6
