"""What the kernels compute, against definitions and against autograd in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from swiftkit.engine.kernels import nf4
from swiftkit.engine.kernels.adapter_gradient import adapter_gradient
from swiftkit.engine.kernels.cross_entropy import Fp8Head, cross_entropy
from swiftkit.engine.kernels.norm import norm_backward_cast, norm_cast
from swiftkit.engine.kernels.project import add_low_rank, cast_project
from swiftkit.engine.kernels.rope import Heads, rope, rope_backward_cast
from swiftkit.engine.kernels.rows import FP8, SLICES, Rows, cast_rows, cast_weight, power_of_two_scale
from swiftkit.engine.kernels.swiglu import swiglu_backward_cast, swiglu_cast

pytestmark = pytest.mark.usefixtures("seed")
TOKENS, HIDDEN, INTER, RANK = 21, 128, 192, 16
HEADS = Heads(4, 2, 32)


def wide(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64) * scale


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def test_scales_are_the_smallest_powers_of_two_that_fit() -> None:
    amax = torch.exp(torch.randn(1000) * 20)
    scale = power_of_two_scale(amax)
    mantissa, _ = torch.frexp(scale)
    assert (mantissa == 0.5).all()
    real = amax > 1e-26
    assert (amax / scale)[real].max() <= 448 * (1 + 1e-6)
    assert (amax / scale)[real].min() > 224 * (1 - 1e-6)
    assert power_of_two_scale(torch.zeros(3)).min() > 0


@pytest.mark.parametrize("outliers", [False, True])
def test_a_cast_row_is_within_the_format(outliers: bool) -> None:
    x = torch.randn(64, 1024) * torch.exp(torch.randn(64, 1) * 8)
    if outliers:
        x[:, 900] *= 50
    rows = cast_rows(x)
    each = (rows.dense() - x).norm(dim=1) / x.norm(dim=1)
    # 3 bits of mantissa: 2.65 % on average, 6.25 % where one value is nearly all of its row.
    assert each.max() < (0.0625 if outliers else 0.032)


def test_a_cast_weight_keeps_channels_of_any_size() -> None:
    weight = torch.randn(128, 256) * torch.exp(torch.randn(128, 1) * 3)
    data, scale = cast_weight(weight)
    assert data.dtype == torch.uint8
    each = (data.view(FP8).float() * scale[:, None] - weight).norm(dim=1) / weight.norm(dim=1)
    assert each.max() < 0.035


def test_norm() -> None:
    x, y, weight = wide(TOKENS, HIDDEN), wide(TOKENS, HIDDEN), wide(HIDDEN) + 1
    t, b, a = wide(TOKENS, RANK), wide(HIDDEN, RANK), wide(2 * RANK, HIDDEN)
    found = norm_cast(x, weight=weight, eps=1e-5, fp8=False, y=y, t=t, b=b, a=a)
    total = (x + y + t @ b.T).requires_grad_()
    normed = F.rms_norm(total, (HIDDEN,), weight, 1e-5)
    assert error(found.residual, total.detach()) < 1e-14
    assert error(found.x.dense(), normed.detach()) < 1e-14
    assert found.t is not None and error(found.t, normed.detach() @ a.T) < 1e-14

    dx, u, upstream = wide(TOKENS, HIDDEN), wide(TOKENS, 2 * RANK), wide(TOKENS, HIDDEN)
    whole = dx + u @ a
    normed.backward(whole)
    assert total.grad is not None
    back = norm_backward_cast(
        upstream, dx=dx, u=u, a=a, residual=found.residual, rstd=found.rstd, weight=weight,
        dot=(whole * normed.detach()).sum(1), fp8=False, wants_g=True, b=b,
    )  # fmt: skip
    assert error(back.d_residual, upstream + total.grad) < 1e-13
    assert back.u is not None and error(back.u, back.d_residual @ b) < 1e-14


def test_rope() -> None:
    columns = HEADS.total * HEADS.width
    raw, bias, t, b = wide(TOKENS, columns), wide(columns), wide(TOKENS, 3 * RANK), wide(columns, RANK)
    angles = wide(TOKENS, HEADS.width // 2)
    cos, sin = (f(torch.cat([angles, angles], 1)) for f in (torch.cos, torch.sin))
    ends = [4 * 32, 6 * 32]
    parts = zip(t.chunk(3, 1), b.tensor_split(ends, 0), strict=True)
    product = (raw + torch.cat([small @ factor.T for small, factor in parts], 1)).requires_grad_()
    q_k, v = (product + bias).tensor_split([ends[1]], 1)
    by_head = q_k.unflatten(1, (6, 32))
    low, high = by_head.chunk(2, -1)
    turned = by_head * cos[:, None] + torch.cat([-high, low], -1) * sin[:, None]
    wanted = torch.cat([turned.flatten(1), v], 1)
    qkv = rope(raw.clone(), heads=HEADS, cos=cos, sin=sin, row_scale=None, bias=bias, t=t, b=b)
    assert error(qkv, wanted.detach()) < 1e-14

    upstream = wide(TOKENS, columns)
    wanted.backward(upstream)
    assert product.grad is not None
    dq, dk, dv = (part.contiguous() for part in upstream.tensor_split(ends, 1))
    back = rope_backward_cast(
        dq, dk, dv, qkv=qkv, heads=HEADS, cos=cos, sin=sin, fp8=False, col_scale=None, bias=bias, b=b
    )
    assert error(back.g.dense(), product.grad) < 1e-14
    assert error(back.dot, (product.grad * product.detach()).sum(1)) < 1e-12
    parts = zip(product.grad.tensor_split(ends, 1), b.tensor_split(ends, 0), strict=True)
    assert back.u is not None and error(back.u, torch.cat([d @ f for d, f in parts], 1)) < 1e-13


def test_swiglu() -> None:
    raw, scale = wide(TOKENS, 2 * INTER), torch.rand(TOKENS).double() + 0.5
    t, b, a = wide(TOKENS, 2 * RANK), wide(2 * INTER, RANK, scale=0.1), wide(RANK, INTER)
    product = torch.cat([t[:, :RANK] @ b[:INTER].T, t[:, RANK:] @ b[INTER:].T], 1) + raw * scale[:, None]
    product.requires_grad_()
    gate, up = product.chunk(2, 1)
    wanted = F.silu(gate) * up
    h, projected = swiglu_cast(raw, row_scale=scale, fp8=False, t=t, b=b, a=a)
    assert error(h.dense(), wanted.detach()) < 1e-14
    assert projected is not None and error(projected, wanted.detach() @ a.T) < 1e-14

    dh, u = wide(TOKENS, INTER), wide(TOKENS, RANK)
    wanted.backward(dh + u @ a)
    assert product.grad is not None
    back = swiglu_backward_cast(
        dh, u=u, a=a, raw=raw, row_scale=scale, col_scale=None, t=t, b=b, fp8=False, wants_h=True
    )
    assert error(back.g.dense(), product.grad) < 1e-13
    assert error(back.dot, (product.grad * product.detach()).sum(1)) < 1e-12
    assert back.h is not None and error(back.h, wanted.detach()) < 1e-14
    parts = zip(product.grad.chunk(2, 1), b.chunk(2, 0), strict=True)
    assert back.u is not None and error(back.u, torch.cat([d @ f for d, f in parts], 1)) < 1e-13


def test_casts_fold_the_channel_scales_of_the_weight() -> None:
    x, factor = torch.randn(TOKENS, HIDDEN), torch.randn(HIDDEN, RANK)
    col_scale = torch.exp2(torch.randint(-9, 9, (HIDDEN,)).float())
    rows, projected = cast_project(x, factor=factor, fp8=True, col_scale=col_scale)
    assert error(rows.dense(), x * col_scale) < 0.03
    assert projected is not None and error(projected, x @ factor) < 1e-6


def test_add_low_rank() -> None:
    y, t, b, residual = wide(7, 64), wide(7, 16), wide(64, 16), wide(7, 64)
    assert add_low_rank(y) is y
    assert error(add_low_rank(y, t=t, b=b, residual=residual), y + t @ b.T + residual) < 1e-15


def test_adapter_gradients_of_merged_projections() -> None:
    narrow, wide_side = wide(TOKENS, 3 * RANK), Rows(wide(TOKENS, 256), torch.rand(TOKENS).double())
    out = torch.full((SLICES, 256, RANK), torch.nan, dtype=torch.float64).transpose(1, 2)
    divisor, segments = torch.rand(256).double() + 1, (128, 64, 64)
    adapter_gradient(narrow, wide_side, out=out, factor=2.0, col_divisor=divisor, segments=segments)
    parts = zip(narrow.chunk(3, 1), wide_side.dense().split(list(segments), 1), strict=True)
    wanted = torch.cat([small.T @ x for small, x in parts], 1) * 2 / divisor
    assert error(out.sum(0), wanted) < 1e-14


@pytest.mark.parametrize(("scale", "softcap"), [(1.0, None), (0.25, None), (1.0, 3.0), (0.5, 5.0)])
def test_cross_entropy(scale: float, softcap: float | None) -> None:
    hidden, weight, targets = wide(50, 64), wide(271, 64, scale=0.3), torch.randint(0, 271, (50,))
    found, wanted = (hidden.clone().requires_grad_() for _ in range(2))
    loss = cross_entropy(found, weight, targets, scale=scale, softcap=softcap, chunk=17)
    scores = wanted @ weight.T * scale
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    reference = F.cross_entropy(scores, targets, reduction="sum")
    (loss * 0.5).backward()
    (reference * 0.5).backward()
    assert found.grad is not None and wanted.grad is not None
    assert abs(float(loss / reference) - 1) < 1e-6
    assert error(found.grad, wanted.grad) < 1e-12


def test_the_gradient_of_an_fp8_head_is_within_the_format_also_of_sure_tokens() -> None:
    hidden, weight = torch.randn(96, 128), torch.randn(2048, 128) * torch.rand(2048, 1) * 0.2
    targets = torch.randint(0, 2048, (96,))
    targets[:32] = (hidden[:32] @ weight.T).argmax(-1)
    hidden[:32] *= 4  # what the target lacks to 1 gets as small as 1e-6
    gradients = []
    for fp8 in (None, Fp8Head.of(weight)):
        leaf = hidden.bfloat16().requires_grad_()
        loss = cross_entropy(leaf, weight.bfloat16(), targets, chunk=40, fp8=fp8)
        loss.backward()
        gradients.append(leaf.grad)
    plain, cast = gradients
    assert plain is not None and cast is not None
    assert error(cast, plain) < 0.04
    each = (cast - plain).float().norm(dim=1) / plain.float().norm(dim=1)
    assert each.max() < 0.12


def test_nf4_is_the_nearest_code_two_a_byte() -> None:
    weight = torch.randn(6, 128)
    packed, absmax = nf4.quantize(weight)
    assert packed.shape == (6 * 128 // 2, 1) and absmax.shape == (12,)
    assert torch.equal(absmax, weight.view(12, 64).abs().amax(1))
    codes = torch.tensor(nf4.CODES)
    ratio = weight.view(12, 64) / absmax[:, None]
    nearest = codes[(ratio[..., None] - codes).abs().argmin(-1)]
    dense = nf4.dequantize(packed, absmax, shape=(6, 128), dtype=torch.float32)
    assert torch.allclose(dense.view(12, 64), nearest * absmax[:, None])
    first = int((codes - ratio[0, 0]).abs().argmin())
    assert int(packed[0, 0]) >> 4 == first  # the first value is in the high half


def test_nf4_to_fp8() -> None:
    weight = torch.randn(64, 128) * torch.exp(torch.randn(64, 1))
    packed, absmax = nf4.quantize(weight)
    scale = power_of_two_scale(absmax.view(64, -1).amax(1))
    dense = nf4.dequantize(packed, absmax, shape=(64, 128), dtype=torch.float32)
    cast = nf4.dequantize_to_fp8(packed, absmax, scale, shape=(64, 128), transposed=False)
    turned = nf4.dequantize_to_fp8(packed, absmax, scale, shape=(64, 128), transposed=True)
    assert error(cast.float() * scale[:, None], dense) < 0.03
    assert torch.equal(turned.float(), cast.float().T)
