"""The fused layer against a plain one under autograd, in float64: every storage, every choice of adapters."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from swiftkit.engine.attention import AttentionPlan
from swiftkit.engine.fused.base import BaseKind
from swiftkit.engine.fused.layer import LINEARS, FusedLlamaLayer, LayerShape, Surroundings
from swiftkit.engine.fused.projection import FrozenLinear
from swiftkit.engine.kernels.nf4 import dequantize
from swiftkit.engine.kernels.rope import Heads
from swiftkit.engine.kernels.rows import FP8
from swiftkit.formats.peft import LoraSpec

pytestmark = pytest.mark.usefixtures("seed")
SHAPE = LayerShape(128, 192, Heads(4, 2, 32))
LENGTHS = (40, 24)
ALL = LoraSpec(rank=16, alpha=32)


SHARED = (-1, 0, 0, -1, 3, 3)  # two prompts, each with two answers


@dataclass
class Case:
    """A fused layer with random weights, and all that is needed to compute it plainly."""

    layer: FusedLlamaLayer
    weights: dict[str, Tensor]
    x: Tensor
    upstream: Tensor
    around: Surroundings


def make(
    *,
    base: BaseKind = "plain",
    dtype: torch.dtype = torch.float64,
    lora: dict[str, LoraSpec] | None = None,
    bias: bool = False,
    shape: LayerShape = SHAPE,
    lengths: tuple[int, ...] = LENGTHS,
    prefixes: tuple[int, ...] = (),
    **options: Any,
) -> Case:
    """A layer whose norms, adapters and biases are all away from their first values."""
    shape = LayerShape(shape.hidden, shape.inter, shape.heads, qkv_bias=bias)
    lora = dict.fromkeys(LINEARS, ALL) if lora is None else lora
    layer = FusedLlamaLayer(shape, base=base, lora=lora, dtype=dtype, **options)
    sizes = {name: shape.out_in(name) for name in LINEARS}
    weights = {n: torch.randn(size, dtype=dtype) * 0.9 * size[1] ** -0.5 for n, size in sizes.items()}
    layer.load({f"{name}.weight": weight for name, weight in weights.items()})
    for name, parameter in layer.named_parameters():
        if "norm" in name:
            parameter.data += torch.randn_like(parameter) * 0.2
        elif "bias" in name:
            parameter.data.normal_()
        elif "lora" in name:
            parameter.data.normal_(std=0.1)
            parameter.data = parameter.data.to(torch.float64 if dtype == torch.float64 else torch.float32)
    tokens = sum(lengths)
    angles = torch.rand(tokens, shape.heads.width // 2, dtype=torch.float64) * 6
    angles = torch.cat([angles, angles], 1)
    plan = AttentionPlan.of(lengths, device=torch.device("cpu"), prefixes=prefixes)
    around = Surroundings(angles.cos().to(dtype), angles.sin().to(dtype), plan)
    x, upstream = (torch.randn(tokens, shape.hidden, dtype=dtype) for _ in range(2))
    return Case(layer, weights, x, upstream, around)


def run(case: Case) -> dict[str, Tensor]:
    """Output (without the residual), input gradient (without the upstream), adapter gradients."""
    x = case.x.clone().requires_grad_()
    case.layer.zero_grad()
    out = case.layer(x, case.around)
    out.backward(case.upstream)
    assert x.grad is not None
    found = {"out": out.detach() - case.x, "dx": x.grad - case.upstream}
    return found | {n: p.grad for n, p in case.layer.named_parameters() if p.grad is not None}


def expected(case: Case, weights: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The same by autograd over plain float64 operations."""
    weights = {name: weight.double() for name, weight in (weights or case.weights).items()}
    values = {n: p.detach().double().requires_grad_("lora" in n) for n, p in case.layer.named_parameters()}
    x = case.x.double().requires_grad_()
    out = plain(case.layer.shape, weights, values, x, case.around)
    out.backward(case.upstream.double())
    assert x.grad is not None
    found = {"out": out.detach() - x.detach(), "dx": x.grad - case.upstream.double()}
    return found | {name: value.grad for name, value in values.items() if value.grad is not None}


def plain(
    shape: LayerShape, weights: dict[str, Tensor], values: dict[str, Tensor], x: Tensor, around: Surroundings
) -> Tensor:
    """The layer as it is usually written."""

    def norm(value: Tensor, name: str) -> Tensor:
        rms = value.square().mean(-1, keepdim=True).add(shape.eps).rsqrt()
        return value * rms * values[f"{name}.weight"]

    def linear(name: str, value: Tensor) -> Tensor:
        y = value @ weights[name].T
        if f"{name}.bias" in values:
            y = y + values[f"{name}.bias"]
        if f"{name}.lora_A" in values:
            a, b = values[f"{name}.lora_A"], values[f"{name}.lora_B"]
            y = y + (value @ a.T) @ b.T * (ALL.alpha / ALL.rank)
        return y

    def rotate(value: Tensor) -> Tensor:
        low, high = value.chunk(2, -1)
        cos, sin = around.cos.double()[:, None], around.sin.double()[:, None]
        return value * cos + torch.cat([-high, low], -1) * sin

    normed = norm(x, "input_layernorm")
    q, k, v = (linear(f"self_attn.{n}_proj", normed).unflatten(1, (-1, shape.heads.width)) for n in "qkv")
    attended = F.scaled_dot_product_attention(
        *(part.transpose(0, 1)[None] for part in (rotate(q), rotate(k), v)),
        attn_mask=seen(around.plan), enable_gqa=True,
    )  # fmt: skip
    x = x + linear("self_attn.o_proj", attended[0].transpose(0, 1).flatten(1))
    normed = norm(x, "post_attention_layernorm")
    inner = F.silu(linear("mlp.gate_proj", normed)) * linear("mlp.up_proj", normed)
    return x + linear("mlp.down_proj", inner)


def seen(plan: AttentionPlan) -> Tensor:
    """Which key each query sees, [tokens, tokens]."""
    places = torch.arange(sum(plan.lengths)).split(plan.lengths)
    found = torch.zeros(sum(plan.lengths), sum(plan.lengths), dtype=torch.bool)
    for own, prefix in zip(places, plan.prefixes or [-1] * len(places), strict=True):
        found[own[:, None], own[None]] = own[:, None] >= own[None]
        if prefix >= 0:
            found[own[:, None], places[prefix][None]] = True
    return found


def error(found: Tensor, wanted: Tensor) -> float:
    """Relative, in the Frobenius norm."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor], bound: float) -> None:
    """Same names, and every tensor within the bound."""
    assert found.keys() == wanted.keys()
    errors = {name: error(found[name], wanted[name]) for name in wanted}
    assert max(errors.values()) < bound, errors


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": True},
        {"recompute_mlp": True},
        {"lora": {name: ALL for name in LINEARS if name.endswith(("q_proj", "v_proj"))}},
        {"lora": {"self_attn.o_proj": ALL}},
        {"lora": {"mlp.up_proj": LoraSpec(rank=5, alpha=10)}},
        {"lora": dict.fromkeys(LINEARS, LoraSpec(rank=40, alpha=80))},
        {"lora": {}},
    ],
    ids=["all", "bias", "recompute", "q and v", "o", "rank 5", "rank 40", "none"],
)
def test_gradients_equal_autograd(options: dict[str, Any]) -> None:
    case = make(**options)
    assert_close(run(case), expected(case), 1e-13)


def test_bf16_is_within_its_rounding() -> None:
    case = make(dtype=torch.bfloat16)
    assert_close(run(case), expected(case), 0.025)


@pytest.mark.parametrize("options", [{}, {"recompute_mlp": True, "two_copies": False}, {"bias": True}])
def test_fp8_is_within_the_bound_of_its_format(options: dict[str, Any]) -> None:
    """One product is 3.7 % off; a gradient that passed six of them is about sqrt(6) times that."""
    case = make(base="fp8", dtype=torch.bfloat16, **options)
    assert_close(run(case), expected(case), 0.13)


def test_fp8_errors_are_those_of_the_stored_weights_and_the_casts_alone() -> None:
    case = make(base="fp8", dtype=torch.bfloat16)
    stored = {}
    for name in LINEARS:
        linear = case.layer.get_submodule(name)
        assert isinstance(linear.weight, Tensor) and isinstance(linear.weight_scale, Tensor)
        assert linear.weight.dtype == torch.uint8
        stored[name] = linear.weight.view(FP8).double() * linear.weight_scale[:, None]
        assert error(stored[name], case.weights[name]) < 0.028
    assert_close(run(case), expected(case, stored), 0.1)


def test_outliers_in_the_residual_stream() -> None:
    case = make(base="fp8", dtype=torch.bfloat16)
    case.x[:, 100] *= 50  # not in the first block of the row: its scale grows late
    case.upstream[5] *= 1e-9
    assert_close(run(case), expected(case), 0.15)


@pytest.mark.parametrize(("base", "bound"), [("nf4", 0.03), ("nf4-fp8", 0.14)])
def test_nf4_computes_with_its_dequantized_weight(base: BaseKind, bound: float) -> None:
    case = make(base=base, dtype=torch.bfloat16)
    stored = {}
    for name in LINEARS:
        linear = case.layer.get_submodule(name)
        assert isinstance(linear, FrozenLinear) and isinstance(linear.absmax, Tensor)
        size = (linear.out_features, linear.in_features)
        stored[name] = dequantize(linear.weight, linear.absmax, shape=size, dtype=torch.float64)
        assert error(stored[name], case.weights[name]) < 0.1
    assert_close(run(case), expected(case, stored), bound)


@pytest.mark.parametrize("base", ["plain", "fp8"])
def test_packed_equals_separate_documents(base: BaseKind) -> None:
    dtype = torch.float64 if base == "plain" else torch.bfloat16
    case = make(base=base, dtype=dtype)
    whole = run(case)
    outs, start = [], 0
    for length in LENGTHS:
        rows = slice(start, start + length)
        plan = AttentionPlan.of((length,), device=torch.device("cpu"))
        around = Surroundings(case.around.cos[rows], case.around.sin[rows], plan)
        single = run(Case(case.layer, case.weights, case.x[rows], case.upstream[rows], around))
        outs.append({"out": single["out"], "dx": single["dx"]})
        start += length
    bound = 1e-13 if base == "plain" else 0.01
    for name in ("out", "dx"):
        assert error(torch.cat([out[name] for out in outs]), whole[name]) < bound


def test_recomputing_the_mlp_changes_nothing() -> None:
    kept = make(base="fp8", dtype=torch.bfloat16)
    again = copy.deepcopy(kept)
    again.layer.recompute_mlp = True
    assert_close(run(again), run(kept), 0.04)  # down's A reads h in bf16 instead of FP8 bytes


def test_a_moved_layer_is_the_same_layer() -> None:
    case = make(base="fp8", dtype=torch.bfloat16)
    before = run(case)
    case.layer._apply(torch.clone)
    assert_close(run(case), before, 1e-9)
    merged = case.layer.qkv.base.stored()["weight"]
    q = case.layer.get_submodule("self_attn.q_proj").weight
    assert isinstance(q, Tensor) and q.data_ptr() == merged.data_ptr()


def test_checkpoint_names() -> None:
    names = {name for name, _ in make(bias=True).layer.named_parameters()}
    assert {f"{name}.weight" for name in LINEARS} <= names
    assert {"input_layernorm.weight", "post_attention_layernorm.weight", "self_attn.k_proj.bias"} <= names
    assert {f"{name}.lora_{factor}" for name in LINEARS for factor in "AB"} <= names


def test_what_the_layer_refuses() -> None:
    with pytest.raises(ValueError, match="dropout"):
        make(lora={"mlp.up_proj": LoraSpec(dropout=0.1)})
    with pytest.raises(ValueError, match="alpha / rank"):
        make(lora={"mlp.up_proj": LoraSpec(alpha=16), "mlp.gate_proj": LoraSpec(alpha=32)})
    with pytest.raises(ValueError, match="multiples of 64, got 100"):
        make(shape=LayerShape(100, 192, Heads(4, 2, 32)))
    with pytest.raises(ValueError, match="head width of 32, 64, 128 or 256, got 96"):
        make(shape=LayerShape(192, 192, Heads(2, 2, 96)))


def test_answers_that_share_a_prompt(seed: int) -> None:
    case = make(lengths=(5, 4, 3, 6, 2, 7), prefixes=SHARED)
    assert_close(run(case), expected(case), 1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("lengths", "prefixes"),
    [((128, 128), ()), ((100, 157), ()), ((70, 50, 40, 20, 64, 13), SHARED), ((64,) * 6, SHARED)],
    ids=["dense", "packed", "shared", "shared-dense"],
)
@pytest.mark.parametrize("base", ["plain", "fp8", "nf4", "nf4-fp8"])
def test_on_a_gpu(base: BaseKind, lengths: tuple[int, ...], prefixes: tuple[int, ...]) -> None:
    """The kernels are as far from float64 as their references on a CPU, up to a tenth."""
    shape = LayerShape(512, 768, Heads(4, 2, 128))
    case = make(
        base=base, dtype=torch.bfloat16, shape=shape, lengths=lengths, prefixes=prefixes, bias=True
    )  # fmt: skip
    wanted = expected(case)
    references = run(case)
    plan = AttentionPlan.of(lengths, device=torch.device("cuda"), prefixes=prefixes)
    moved = Case(
        copy.deepcopy(case.layer).to("cuda"), case.weights, case.x.cuda(), case.upstream.cuda(),
        Surroundings(case.around.cos.cuda(), case.around.sin.cuda(), plan),
    )  # fmt: skip
    found = {name: value.cpu() for name, value in run(moved).items()}
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert error(found[name], value) < 1.1 * error(references[name], value) + 0.002, name
