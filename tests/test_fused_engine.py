"""Whole models on fused layers: the same numbers as on plain ones, in training and in decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from swiftkit.engine import Batch, Engine, LoraSpec
from swiftkit.engine.fused.adopt import FusedDecoderLayer, why_not
from swiftkit.engine.fused.base import BaseKind
from swiftkit.engine.linear import Linear
from swiftkit.errors import UserError
from swiftkit.generate.decode import stream
from swiftkit.generate.sampling import Sampler
from swiftkit.methods.sft import loss
from tests import tiny
from tests.test_engine_quantized import stored_value

pytestmark = pytest.mark.compat
CPU = torch.device("cpu")
SHAPE = dict(head_dim=32, intermediate_size=128)
SPEC = LoraSpec(rank=4, alpha=8)
FAMILIES = {
    "llama": {},
    "llama3-rope": {},
    "qwen2": {},
    "mistral": dict(sliding_window=None),
}


def pair(family: str, folder: Path, **options: Any) -> tuple[Engine, Engine]:
    """The same model on fused and on plain layers."""
    tiny.make(family, folder, **(SHAPE | FAMILIES[family]))
    options = dict(dtype=torch.float32, device=CPU, lora=SPEC) | options
    fused, plain = (Engine.load(folder, fused=wanted, **options) for wanted in (True, False))
    assert any(isinstance(module, FusedDecoderLayer) for module in fused.model.modules())
    assert fused.parameters.keys() == plain.parameters.keys()
    assert fused.linear_names == plain.linear_names
    return fused, plain


@pytest.mark.parametrize("base", ["plain", "nf4"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_fused_equals_plain(family: str, base: BaseKind, tmp_path: Path) -> None:
    fused, plain = pair(family, tmp_path, base=base)
    for name, parameter in fused.parameters.items():
        torch.testing.assert_close(parameter, plain.parameters[name], rtol=0, atol=0)
    (ours, gradients), (theirs, others) = trained(fused), trained(plain)
    assert ours == pytest.approx(theirs, rel=2e-6)
    for name, gradient in gradients.items():
        assert (gradient - others[name]).norm() / others[name].norm() < 3e-5, name


@pytest.mark.parametrize("base", ["fp8", "nf4-fp8"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_fused_fp8_errs_no_more_than_plain_fp8(family: str, base: BaseKind, tmp_path: Path) -> None:
    """Both against the same stored weights in exact products; roundings near a tie fall either way."""
    fused, plain = pair(family, tmp_path, base=base)
    exact = Engine.load(tmp_path, dtype=torch.float32, device=CPU, lora=SPEC, fused=False)
    for name, module in plain.model.named_modules():
        if isinstance(module, Linear) and module.base is not None:
            exact.model.get_submodule(name).load_weight(stored_value(module))
    (loss_fused, ours), (loss_plain, theirs), (true_loss, truth) = map(trained, (fused, plain, exact))
    reference = torch.cat([g.flatten() for g in truth.values()])

    def error(gradients: dict[str, Tensor]) -> float:
        return float(
            (torch.cat([g.flatten() for g in gradients.values()]) - reference).norm() / reference.norm()
        )

    assert abs(loss_fused / true_loss - 1) < 0.03 and abs(loss_plain / true_loss - 1) < 0.03
    assert error(ours) < 1.4 * error(theirs) + 0.01, (error(ours), error(theirs))


def trained(engine: Engine) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one packed batch."""
    tiny.randomise_adapter(engine.parameters)
    batch = Batch.of(tiny.packed([23, 9, 14]), device=CPU)
    total = float(engine.forward_backward([batch], loss, denominator=10)["loss"])
    gradients = {}
    for name, parameter in engine.parameters.items():
        assert parameter.grad is not None
        gradients[name] = parameter.grad
    return total, gradients


@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), ("down_proj",), ("o_proj", "up_proj")])
def test_some_targets(targets: tuple[str, ...], tmp_path: Path) -> None:
    spec = LoraSpec(rank=6, alpha=3, target_modules=targets)
    fused, plain = pair("llama", tmp_path, lora=spec)
    batch = Batch.of(tiny.packed([23, 9]), device=CPU)
    for engine in (fused, plain):
        tiny.randomise_adapter(engine.parameters)
        engine.forward_backward([batch], loss, denominator=10)
    for name, parameter in fused.parameters.items():
        torch.testing.assert_close(parameter.grad, plain.parameters[name].grad, rtol=1e-3, atol=1e-5)


def test_decoding_goes_on_from_stored_keys(tmp_path: Path) -> None:
    fused, plain = pair("llama", tmp_path)
    for engine in (fused, plain):
        tiny.randomise_adapter(engine.parameters)
    told = [
        list(stream(e, [[11, 12, 13], [14] * 9], max_new_tokens=6, stop_ids=(), sampler=Sampler()))
        for e in (fused, plain)
    ]
    assert told[0] == told[1]


def test_what_fused_layers_do_not_serve_is_said(tmp_path: Path) -> None:
    config = tiny.make("qwen3", tmp_path).config
    assert why_not(config, SPEC) == "there are none for the family qwen3"
    with pytest.raises(UserError, match="fused layers cannot serve here"):
        Engine.load(tmp_path, dtype=torch.float32, device=CPU, lora=SPEC, fused=True)
    served = tiny.make("llama", tmp_path / "llama", **SHAPE).config
    assert why_not(served, SPEC) is None
    assert why_not(served, LoraSpec(dropout=0.1)) == "LoRA dropout"
