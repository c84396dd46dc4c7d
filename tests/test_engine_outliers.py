"""The channels that an FP8 product carries twice: which they are, and what that is worth."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from swiftkit.engine import Batch, Engine, LoraSpec
from swiftkit.engine.fused.adopt import FusedDecoderLayer
from swiftkit.engine.fused.base import Fp8Base, kind_of, make_base
from swiftkit.engine.kernels.outliers import MOST, carry, how_many, largest
from swiftkit.engine.kernels.rows import Rows, cast_rows, with_room
from swiftkit.engine.linear import Linear
from tests import tiny

CPU = torch.device("cpu")
SHAPE = dict(
    hidden_size=128, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    num_hidden_layers=4,
)  # fmt: skip
pytestmark = pytest.mark.usefixtures("seed")


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def product(x: Tensor, weight: Tensor, *, carries: bool, kind: str = "fp8") -> Tensor:
    """x @ weight^T as a base computes it."""
    base = make_base(kind, [weight.shape[0]], weight.shape[1], dtype=torch.float32, device=CPU)  # type: ignore[arg-type]
    base.load(0, weight)
    rows = cast_rows(x)
    if carries:
        base.carried.observe()
        base.forward(rows)
        base.carry()  # type: ignore[attr-defined]
        rows = with_room(rows, base.carried.room)
        assert base.carried.channels is not None
        carry(rows, x, base.carried.channels)
    return base.forward(rows).data


@pytest.mark.parametrize("kind", ["fp8", "nf4-fp8"])
def test_outliers_cost_little_precision(kind: str) -> None:
    """A few channels 40 times larger than the rest are most of the sum."""
    x, weight = torch.randn(50, 512), torch.randn(192, 512) * 0.05
    x[:, [3, 100, 377, 511]] *= 40
    wanted = x @ weight.T if kind == "fp8" else x @ stored(weight).T
    without, carried = (error(product(x, weight, carries=c, kind=kind), wanted) for c in (False, True))
    assert without > 0.025
    assert carried < 0.4 * without  # what is left is the rounding of the 508 others


def stored(weight: Tensor) -> Tensor:
    from swiftkit.engine.kernels.nf4 import dequantize, quantize

    shape = (weight.shape[0], weight.shape[1])
    return dequantize(*quantize(weight), shape=shape, dtype=torch.float32)


def test_even_inputs_lose_nothing_by_it() -> None:
    x, weight = torch.randn(50, 512), torch.randn(192, 512) * 0.05
    wanted = x @ weight.T
    without, carried = (error(product(x, weight, carries=carries), wanted) for carries in (False, True))
    assert carried < without


def test_channels_are_those_that_contribute_most() -> None:
    weight, squares = torch.full((10, 64), 0.01), torch.ones(64)
    weight[:, 7], squares[9], squares[11] = 1.0, 1e4, 0.0
    found = largest(squares, weight).tolist()
    assert {7, 9} <= set(found) and len(found) == 8 == how_many(64) and found == sorted(set(found))
    assert how_many(4096) == how_many(512) == MOST


def test_the_low_parts_are_what_the_cast_left_over() -> None:
    x, channels = torch.randn(20, 128) * 3, torch.tensor([1, 5, 64, 127], dtype=torch.int32)
    rows = with_room(cast_rows(x), 8)
    carry(rows, x, channels)
    low, high = rows.dense()[:, 128:].chunk(2, 1)
    assert torch.equal(high, rows.first(128).dense()[:, channels])
    assert error(high, x[:, channels]) > 0.01 and error(high + low, x[:, channels]) < 0.002


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
@pytest.mark.parametrize("base", ["fp8", "nf4-fp8"])
def test_a_model_finds_its_own_outliers(base: str, fused: bool, tmp_path: Path) -> None:
    """A channel that every norm makes large is carried, at every loading alike; ends of FP8 carry nothing."""
    tiny.make("llama", tmp_path, **SHAPE)
    plant(tmp_path, channel=77)
    engines = [
        Engine.load(
            tmp_path, dtype=torch.bfloat16 if fused else torch.float32, device=CPU, fused=fused, base=base,  # type: ignore[arg-type]
            lora=LoraSpec(rank=4, alpha=8),
        )
        for _ in range(2)
    ]  # fmt: skip
    chosen = [channels_of(engine) for engine in engines]
    assert chosen[0] == chosen[1]
    inner = {name: channels for name, channels in chosen[0].items() if ".1." in name or ".2." in name}
    after_norms = [c for name, c in inner.items() if name.endswith(("qkv", "gate_up", "q_proj", "up_proj"))]
    assert after_norms and all(channels is not None and 77 in channels for channels in after_norms)
    if base == "fp8":
        assert all(c is None for name, c in chosen[0].items() if name not in inner)


def plant(folder: Path, *, channel: int) -> None:
    """Make one channel of every norm's output many times larger."""
    from safetensors.torch import load_file, save_file

    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if name.endswith("layernorm.weight"):
            tensor[channel] = 50
    save_file(tensors, path, metadata={"format": "pt"})


def channels_of(engine: Engine) -> dict[str, list[int] | None]:
    found = {}
    for name, module in engine.model.named_modules():
        owned: dict[str, object] = {}
        if isinstance(module, FusedDecoderLayer):
            owned = {part: getattr(module, part).base for part in ("qkv", "o", "gate_up", "down")}
        elif isinstance(module, Linear) and module.base is not None:
            owned = {"": module.base}
        for part, base in owned.items():
            channels = base.carried.channels  # type: ignore[attr-defined]
            found[f"{name}.{part}".rstrip(".")] = None if channels is None else channels.tolist()
    return found


def test_fused_and_plain_layers_agree_over_fp8(tmp_path: Path) -> None:
    """They round in other places, and are as far from the unquantized model."""
    tiny.make("llama", tmp_path, **SHAPE)
    batch = Batch.of(tiny.packed([23, 40]), device=CPU)

    def hidden(**options: object) -> Tensor:
        engine = Engine.load(tmp_path, device=CPU, lora=LoraSpec(rank=4, alpha=8), **options)  # type: ignore[arg-type]
        with torch.no_grad():
            return engine.hidden(batch)

    exact = hidden(dtype=torch.float32)
    fused = hidden(dtype=torch.bfloat16, fused=True, base="fp8")
    plain = hidden(dtype=torch.float32, base="fp8")
    assert error(plain, exact) < 0.15 and error(fused, exact) < 0.15
    assert 0.6 < error(plain, exact) / error(fused, exact) < 1.6


def test_the_ends_of_a_model_keep_their_forward_products() -> None:
    names = [f"model.layers.{n}.mlp.up_proj" for n in range(12)]
    kinds = [kind_of(name, "fp8", 12) for name in names]
    assert kinds == ["fp8-backward", *["fp8"] * 10, "fp8-backward"]
    assert {kind_of(name, "nf4-fp8", 12) for name in names} == {"nf4-fp8"}


def test_a_moved_base_carries_on() -> None:
    x, weight = torch.randn(30, 256), torch.randn(64, 256)
    base = Fp8Base(64, 256, dtype=torch.float32, device=CPU, two_copies=False)
    base.load(0, weight)
    base.carried.observe()
    base.forward(cast_rows(x))
    base.carry()
    channels = base.carried.channels
    assert channels is not None
    rows = with_room(cast_rows(x), base.carried.room)
    carry(rows, x, channels)
    before, back = base.forward(rows).data, base.backward(cast_rows(x[:, :64]))
    base.adopt({name: tensor.clone() for name, tensor in base.stored().items()})
    assert torch.equal(base.forward(rows).data, before)
    assert torch.equal(base.backward(Rows(*cast_rows(x[:, :64]))), back)
