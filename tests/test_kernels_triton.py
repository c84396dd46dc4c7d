"""Every Triton kernel against its reference on a GPU, with fresh inputs and poisoned outputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from swiftkit.engine.kernels import (
    adapter_gradient,
    cross_entropy,
    nf4,
    norm,
    project,
    rope,
    swiglu,
    transpose,
)
from swiftkit.engine.kernels import (
    columns as gptq_columns,
)
from swiftkit.engine.kernels import (
    outliers as carried,
)
from swiftkit.engine.kernels.rows import FP8, SLICES, Rows, cast_rows, power_of_two_scale

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("seed", "poison")]
TOKENS = 300  # not a multiple of any tile
SIZES = [(4096, 14336, 16, rope.Heads(32, 8, 128)), (576, 1536, 32, rope.Heads(9, 3, 64))]
sizes = pytest.mark.parametrize(("hidden", "inter", "rank", "heads"), SIZES, ids=["8b", "135m"])
fp8s = pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
outliers = pytest.mark.parametrize("outlier", [1.0, 60.0], ids=["even", "outliers"])


@pytest.fixture
def poison() -> Iterator[None]:
    """New tensors are full of NaN, so that what a kernel did not write shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


def draw(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return (torch.randn(*shape, device="cuda") * scale).to(dtype)


def channels(width: int, fp8: bool) -> Tensor | None:
    return torch.exp2(torch.randint(-12, -8, (width,), device="cuda").float()) if fp8 else None


def assert_same(found: Any, wanted: Any, bound: float = 0.012) -> None:
    """Tensors, Rows, None, or tuples of them."""
    if wanted is None:
        assert found is None
    elif isinstance(wanted, Rows):
        assert_same(found.dense(), wanted.dense(), 0.02)
    elif isinstance(wanted, Tensor):
        found, wanted = found.double(), wanted.double()
        assert float((found - wanted).norm() / wanted.norm()) < bound
    else:
        for one, other in zip(found, wanted, strict=True):
            assert_same(one, other, bound)


@sizes
@fp8s
@outliers
def test_norm(hidden: int, inter: int, rank: int, heads: rope.Heads, fp8: bool, outlier: float) -> None:
    residual = draw(TOKENS, hidden)
    residual[:, hidden - 7] *= outlier
    weight, a = draw(hidden) + 1, draw(3 * rank, hidden, scale=0.05)
    for y, t, b in (
        (None, None, None),
        (draw(TOKENS, hidden), draw(TOKENS, rank), draw(hidden, rank, scale=0.1)),
    ):
        inputs = (residual, weight, 1e-5, fp8, y, t, b, a)
        found = norm.norm_cast(residual, weight=weight, eps=1e-5, fp8=fp8, y=y, t=t, b=b, a=a)
        assert_same(found, norm.norm_cast_reference(*inputs))
    for wants_g in (True, False):
        options: dict[str, Any] = dict(
            dx=draw(TOKENS, hidden), u=draw(TOKENS, 2 * rank), a=draw(2 * rank, hidden, scale=0.1),
            residual=residual, rstd=torch.rand(TOKENS, device="cuda"), weight=weight,
            dot=torch.randn(TOKENS, device="cuda"), fp8=fp8, wants_g=wants_g,
            col_scale=channels(hidden, fp8), b=draw(hidden, rank),
        )  # fmt: skip
        d = draw(TOKENS, hidden)
        found_back = norm.norm_backward_cast(d, **options)
        assert_same(found_back, norm.norm_backward_cast_reference(d, *options.values()))


@sizes
@outliers
def test_carried_channels(hidden: int, inter: int, rank: int, heads: rope.Heads, outlier: float) -> None:
    """What is carried is high + low; how it is split hangs on the last bit of the cast."""

    def both(x: Rows, count: int) -> Tensor:
        low, high = x.dense()[:, -2 * count :].chunk(2, 1)
        return low + high

    residual, weight, rstd = draw(TOKENS, hidden), draw(hidden) + 1, torch.rand(TOKENS, device="cuda") + 0.1
    residual[:, hidden - 7] *= outlier
    t, b = draw(TOKENS, 2 * rank), draw(2 * inter, rank, scale=0.1)
    raw = draw(TOKENS, 2 * inter)
    for width, exact in ((hidden, residual), (inter, None)):
        channels = carried.largest(torch.rand(width, device="cuda"), draw(8, width))
        count = channels.shape[0]
        if exact is None:
            h = swiglu.swiglu_cast_reference(raw, None, True, t, b, None, 2 * count)[0]
            found, wanted = h, Rows(h.data.cpu(), h.scale.cpu())  # type: ignore[union-attr]
            carried.carry_swiglu(found, raw, channels, t=t, b=b)
            carried.carry_swiglu(wanted, raw.cpu(), channels.cpu(), t=t.cpu(), b=b.cpu())
        else:
            x = norm.norm_cast_reference(residual, weight, 1e-5, True, None, None, None, None, 2 * count).x
            found, wanted = x, Rows(x.data.cpu(), x.scale.cpu())  # type: ignore[union-attr]
            carried.carry(found, exact, channels, weight=weight, rstd=rstd)
            carried.carry(wanted, exact.cpu(), channels.cpu(), weight=weight.cpu(), rstd=rstd.cpu())
        assert_same(both(found, count).cpu(), both(wanted, count), 0.005)
        assert torch.equal(
            found.data[:, -count:].cpu().view(torch.uint8), wanted.data[:, -count:].view(torch.uint8)
        )


@sizes
@fp8s
@outliers
def test_rope(hidden: int, inter: int, rank: int, heads: rope.Heads, fp8: bool, outlier: float) -> None:
    columns, width = heads.total * heads.width, heads.width
    angles = torch.rand(TOKENS, width // 2, device="cuda") * 6
    angles = torch.cat([angles, angles], 1)
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    raw, scale, bias = draw(TOKENS, columns), torch.rand(TOKENS, device="cuda"), draw(columns)
    t, b = draw(TOKENS, 3 * rank), draw(columns, rank, scale=0.2)
    wanted = rope.rope_reference(raw, heads, cos, sin, scale, bias, t, b)
    found = rope.rope(raw.clone(), heads=heads, cos=cos, sin=sin, row_scale=scale, bias=bias, t=t, b=b)
    assert_same(found, wanted)
    dq, dk, dv = (draw(TOKENS, count * width) for count in (heads.queries, heads.keys, heads.keys))
    dv[:, 5] *= outlier
    options: dict[str, Any] = dict(
        qkv=wanted, heads=heads, cos=cos, sin=sin, fp8=fp8, col_scale=channels(columns, fp8), bias=bias, b=b
    )
    back = rope.rope_backward_cast_reference(dq, dk, dv, *options.values())
    assert_same(rope.rope_backward_cast(dq, dk, dv, **options), back)


@sizes
@fp8s
@outliers
def test_swiglu(hidden: int, inter: int, rank: int, heads: rope.Heads, fp8: bool, outlier: float) -> None:
    raw, scale = draw(TOKENS, 2 * inter), torch.rand(TOKENS, device="cuda") + 0.1
    raw[:, inter - 3] *= outlier
    raw[:, 2 * inter - 3] *= outlier
    t, b, a = draw(TOKENS, 2 * rank), draw(2 * inter, rank, scale=0.1), draw(rank, inter, scale=0.1)
    found = swiglu.swiglu_cast(raw, row_scale=scale, fp8=fp8, t=t, b=b, a=a)
    assert_same(found, swiglu.swiglu_cast_reference(raw, scale, fp8, t, b, a))
    options: dict[str, Any] = dict(
        u=draw(TOKENS, rank), a=a, raw=raw, row_scale=scale, col_scale=channels(2 * inter, fp8), t=t, b=b,
        fp8=fp8, wants_h=not fp8,
    )  # fmt: skip
    dh = draw(TOKENS, inter)
    back = swiglu.swiglu_backward_cast_reference(dh, *options.values())
    assert_same(swiglu.swiglu_backward_cast(dh, **options), back)


@sizes
@outliers
def test_project(hidden: int, inter: int, rank: int, heads: rope.Heads, outlier: float) -> None:
    x = draw(TOKENS, hidden)
    x[:, hidden - 3] *= outlier
    x[3] *= 1e-9
    for factor, scales in ((draw(rank, hidden).T, None), (draw(hidden, rank), channels(hidden, True))):
        found = project.cast_project(x, factor=factor, fp8=True, col_scale=scales)
        assert_same(found, project.cast_project_reference(x, factor, scales))
    y = draw(TOKENS, hidden)
    for ranks in (rank, 3 * rank):
        t, b = draw(TOKENS, ranks), draw(ranks, hidden).T
        wanted = project.add_low_rank_reference(y, t, b, x)
        assert_same(project.add_low_rank(y, t=t, b=b, residual=x), wanted)


@sizes
@fp8s
def test_adapter_gradient(hidden: int, inter: int, rank: int, heads: rope.Heads, fp8: bool) -> None:
    width = heads.width
    segments = (heads.queries * width, heads.keys * width, heads.keys * width)
    for columns, parts in ((hidden, None), (sum(segments), segments), (2 * inter, (inter, inter))):
        side = draw(TOKENS, columns)
        wide = cast_rows(side) if fp8 else Rows(side, torch.rand(TOKENS, device="cuda"))
        narrow = draw(TOKENS, 3 * rank if parts is None else len(parts) * rank)
        ranks = 3 * rank if parts is None else rank
        out = torch.empty(SLICES, columns, ranks, device="cuda").transpose(1, 2)
        wanted = torch.empty(SLICES, ranks, columns, device="cuda")
        factors = draw(columns) + 1, torch.rand(columns, device="cuda") + 1
        adapter_gradient.adapter_gradient(
            narrow, wide, out=out, factor=2.0, col_factor=factors[0], col_divisor=factors[1], segments=parts
        )
        adapter_gradient.adapter_gradient_reference(narrow, wide, wanted, 2.0, *factors, parts)
        assert_same(out.sum(0), wanted.sum(0))


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("vocabulary", [1000, 128256])
def test_loss_and_gradient(vocabulary: int, softcap: float | None) -> None:
    logits, targets = draw(7, vocabulary, scale=4), torch.randint(0, vocabulary, (7,), device="cuda")
    head = cross_entropy.Fp8Head.of(draw(vocabulary, 64) * torch.rand(vocabulary, 1, device="cuda"))
    for fp8 in (None, head):
        wanted = cross_entropy.loss_and_gradient_reference(logits.clone(), targets, 0.5, softcap, True, fp8)
        found = cross_entropy.loss_and_gradient_(
            logits.clone(), targets, scale=0.5, softcap=softcap, wants_gradient=True, fp8=fp8
        )
        assert_same(found, wanted)


def test_nf4() -> None:
    shape = (192, 256)
    packed, absmax = nf4.quantize(draw(*shape))
    wanted = nf4.dequantize_reference(packed, absmax, shape=shape, dtype=torch.bfloat16)
    assert torch.equal(nf4.dequantize(packed, absmax, shape=shape, dtype=torch.bfloat16), wanted)
    scale = power_of_two_scale(absmax.view(192, -1).amax(1))
    dense = nf4.dequantize_reference(packed, absmax, shape=shape, dtype=torch.float32)
    cast = (dense / scale[:, None]).to(FP8).float()
    for transposed in (False, True):
        found = nf4.dequantize_to_fp8(packed, absmax, scale, shape=shape, transposed=transposed)
        assert torch.equal(found.float(), cast.T if transposed else cast)


def test_transpose() -> None:
    x = torch.randint(0, 255, (300, 1000), dtype=torch.uint8, device="cuda")
    assert torch.equal(transpose.transpose(x), x.T)


@pytest.mark.parametrize(("rows", "width", "group"), [(1000, 128, 32), (77, 100, 50), (4097, 128, 128)])
def test_round_columns(rows: int, width: int, group: int) -> None:
    """Two orders of a sum may round a value on the border apart, and then the rest of its row."""
    block = draw(rows, 3 * width, dtype=torch.float32)[:, width : 2 * width]
    inputs = draw(4 * width, width, dtype=torch.float64)
    hessian = inputs.T @ inputs / len(inputs) + 0.05 * torch.eye(width, device="cuda")
    factor = torch.linalg.cholesky(torch.linalg.inv(hessian), upper=True).float().contiguous()
    groups = torch.randperm(width, device="cuda") // group
    scales = (torch.rand(rows, width // group, device="cuda") * 0.2 + 0.05).half()
    zeros = torch.randint(0, 16, scales.shape, device="cuda", dtype=torch.uint8)
    codes, errors = gptq_columns.round_columns(
        block, factor=factor, scales=scales, zeros=zeros, groups=groups, top=15
    )
    wide = (block.double(), factor.double(), scales, zeros, groups, 15)
    wanted, exact = gptq_columns.round_columns_reference(*wide)
    same = (codes == wanted).all(1)
    assert same.float().mean() > 0.97
    assert_same(errors[same], exact[same], 1e-4)
