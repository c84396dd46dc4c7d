"""Frozen weights in FP8 and NF4: the formats' bounds, bitsandbytes and PEFT as oracles, whole models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from swiftkit.engine import Batch, Engine, LoraSpec
from swiftkit.engine.fused.base import BaseKind
from swiftkit.engine.kernels.nf4 import dequantize
from swiftkit.engine.linear import Linear, LoraLinear
from swiftkit.methods.sft import loss
from tests import tiny

CPU = torch.device("cpu")
SHAPE = dict(head_dim=32, intermediate_size=128)  # widths that are multiples of 64
KINDS: list[BaseKind] = ["fp8", "nf4", "nf4-fp8"]


def relative(ours: Tensor, reference: Tensor) -> float:
    ours, reference = ours.detach().double(), reference.detach().double()
    return float((ours - reference).norm() / reference.norm())


def outliers(what: str, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """x [64, 256], W [128, 256], dy [64, 128], with one of the habits of real models."""
    x, w, dy = (torch.randn(*s, generator=generator) for s in ((64, 256), (128, 256), (64, 128)))
    if what == "channels of x":
        x[:, ::50] *= 50
    elif what == "rows of W":
        w[::30] *= 30
    elif what == "columns of W":
        w[:, ::30] *= 30
    elif what == "tokens of dy":
        dy *= torch.randn(64, 1, generator=generator).mul(3).exp()
    elif what == "tiny dy":
        dy *= 1e-12
    return x, w, dy


@pytest.mark.parametrize(
    "what", ["nothing", "channels of x", "rows of W", "columns of W", "tokens of dy", "tiny dy"]
)
def test_fp8_stays_within_the_formats_bound(what: str, seed: int) -> None:
    """e4m3 with 3 mantissa bits rounds each operand by at most 1/16; both together stay near 3.7 % (RMS)."""
    x, w, dy = outliers(what, torch.Generator().manual_seed(seed))
    linear = Linear(nn.Linear(256, 128, bias=False), "fp8")
    linear.load_weight(w)
    x.requires_grad_()
    y = linear(x)
    y.backward(dy)
    assert x.grad is not None
    assert relative(y, x @ w.T) < 0.042
    assert relative(x.grad, dy @ w) < 0.042
    worst = ((x.grad - dy @ w).norm(dim=1) / (dy @ w).norm(dim=1)).max()
    assert worst < 0.12, "no token's gradient may be flushed"


def test_fp8_scales_are_powers_of_two_and_come_from_the_whole_row(seed: int) -> None:
    w = torch.randn(128, 256, generator=torch.Generator().manual_seed(seed))
    linear = Linear(nn.Linear(256, 128, bias=False), "fp8")
    linear.load_weight(w)
    assert linear.base is not None and linear.base.col_scale is not None
    mantissa, _ = torch.frexp(linear.base.col_scale)
    assert torch.equal(mantissa, torch.full_like(mantissa, 0.5))
    assert linear.weight.dtype == torch.uint8 and linear.weight.shape == w.shape


def test_nf4_equals_bitsandbytes_and_peft(tmp_path: Path) -> None:
    """Codes, scales, loss and adapter gradients of a whole model, fp32 compute."""
    bnb = pytest.importorskip("bitsandbytes")
    peft = pytest.importorskip("peft")
    reference = tiny.make("llama", tmp_path, **SHAPE)
    spec = LoraSpec(rank=4, alpha=8)
    engine = Engine.load(tmp_path, dtype=torch.float32, device=CPU, lora=spec, base="nf4")
    tiny.randomise_adapter(engine.parameters)

    for name, module in list(reference.named_modules()):
        if isinstance(module, nn.Linear) and name != "lm_head":
            swapped = bnb.nn.Linear4bit(
                module.in_features, module.out_features, bias=False, compute_dtype=torch.float32,
                quant_type="nf4", compress_statistics=False,
            )  # fmt: skip
            swapped.weight = bnb.nn.Params4bit(
                module.weight.detach(), requires_grad=False, quant_type="nf4", compress_statistics=False
            )
            reference.set_submodule(name, swapped.to("cpu"))
            own = engine.model.get_submodule(name)
            assert torch.equal(own.base.packed.flatten(), swapped.weight.flatten())
            torch.testing.assert_close(own.base.absmax, swapped.weight.quant_state.absmax, rtol=0, atol=0)
    wrapped = peft.get_peft_model(
        reference, peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    theirs = {
        name.removeprefix("base_model.model.").replace(".default.weight", ""): parameter
        for name, parameter in wrapped.named_parameters()
        if parameter.requires_grad
    }
    with torch.no_grad():
        for name, parameter in theirs.items():
            parameter.copy_(engine.parameters[name])

    batch = Batch.of(tiny.packed([23]), device=CPU)
    sums = engine.forward_backward([batch], loss, denominator=1)
    logits = wrapped(input_ids=batch.input_ids[None], use_cache=False).logits[0]
    total = nn.functional.cross_entropy(logits[batch.positions], batch.targets, reduction="sum")
    total.backward()
    torch.testing.assert_close(sums["loss"].float(), total.detach(), rtol=1e-5, atol=0)
    for name, parameter in engine.parameters.items():
        assert parameter.grad is not None and theirs[name].grad is not None
        assert relative(parameter.grad, theirs[name].grad) < 5e-5, name


def stored_value(linear: Linear) -> Tensor:
    """What a quantized linear's weight stands for, [out, in]."""
    if linear.kind == "fp8-backward":
        return linear.weight.detach()
    if linear.kind == "fp8":
        assert linear.base is not None and linear.base.col_scale is not None
        return linear.weight.view(torch.float8_e4m3fn).float() * linear.base.col_scale[:, None]
    stored = linear.base.stored()  # type: ignore[union-attr]
    shape = (linear.out_features, linear.in_features)
    return dequantize(stored["weight"], stored["absmax"], shape=shape, dtype=torch.float32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "phi3"])
def test_a_quantized_model_computes_what_its_stored_weights_say(
    family: str, kind: BaseKind, tmp_path: Path
) -> None:
    """Against the plain engine over the dequantized weights: equal for NF4, near where products are FP8."""
    tiny.make(family, tmp_path, **SHAPE)
    spec = LoraSpec(rank=4, alpha=8)
    batch = Batch.of(tiny.packed([23, 9]), device=CPU)
    quantized, plain = (
        Engine.load(tmp_path, dtype=torch.float32, device=CPU, lora=spec, base=base)
        for base in (kind, "plain")
    )
    for name, module in quantized.model.named_modules():
        if isinstance(module, Linear) and module.base is not None:
            plain.model.get_submodule(name).load_weight(stored_value(module))
    losses, gradients = [], []
    for engine in (quantized, plain):
        tiny.randomise_adapter(engine.parameters)
        losses.append(float(engine.forward_backward([batch], loss, denominator=1)["loss"]))
        gradients.append(
            torch.cat([p.grad.flatten() for p in engine.parameters.values() if p.grad is not None])
        )
    exact = kind == "nf4"
    assert losses[0] == pytest.approx(losses[1], rel=1e-5 if exact else 0.02)
    assert relative(*gradients) < (2e-5 if exact else 0.25)
    assert nn.functional.cosine_similarity(*gradients, dim=0) > (0.99999 if exact else 0.97)


@pytest.mark.parametrize("kind", KINDS)
def test_the_adapter_learns_over_every_base(kind: BaseKind) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(64, 64)
    layer = LoraLinear(plain, LoraSpec(rank=4, alpha=8), kind)
    layer.load_weight(plain.weight.detach())
    layer.reset_adapter(name="layer", seed=1, device=CPU)
    x, goal = torch.randn(32, 64), torch.randn(32, 64)
    optimizer = torch.optim.AdamW([layer.lora_A, layer.lora_B], lr=1e-2)
    first = last = None
    for _ in range(30):
        optimizer.zero_grad()
        last = (layer(x) - goal).square().mean()
        first = first or float(last)
        last.backward()
        optimizer.step()
    assert last is not None and first is not None and float(last) < 0.8 * first
