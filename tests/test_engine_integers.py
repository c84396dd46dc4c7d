"""Training over packed whole numbers: every format against the plain matrix that it stands for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from swiftkit.engine import Batch, Engine, LoraSpec
from swiftkit.engine.build import check_model, describe
from swiftkit.engine.linear import Linear, LoraLinear
from swiftkit.engine.placement import place
from swiftkit.errors import UserError
from swiftkit.formats import awq, compressed, gptq
from swiftkit.formats.codes import Codes
from swiftkit.formats.packing import Packing, read_packing
from swiftkit.methods.sft import loss
from tests import tiny
from tests.adapters import make_base
from tests.packed import SETTINGS, pack_folder
from tests.test_formats_codes import drawn

CPU = torch.device("cpu")
ROWS, WIDTH, GROUP = 96, 128, 32
FORMS = [
    ("gptq", 3), ("gptq", 4), ("gptq", 8), ("gptq_v2", 3), ("gptq_v2", 4), ("gptq_v2", 8), ("awq", 4),
    ("compressed-tensors", 4), ("compressed-tensors", 8),
]  # fmt: skip
# AWQ has no order of columns, and a single group none either.
CASES = [
    *((form, bits, group, False) for form, bits in FORMS for group in (GROUP, -1)),
    *((form, bits, GROUP, True) for form, bits in FORMS if form != "awq"),
]


def written(codes: Codes, form: str, order: Tensor | None) -> dict[str, Tensor]:
    """As a file holds it; `order` is the group of each column, where that is told."""
    if form == "awq":
        return awq.pack_linear(codes)
    if form == "compressed-tensors":
        packed = compressed.pack_linear(codes)
        return packed if order is None else {**packed, "weight_g_idx": order.int()}
    packed = gptq.pack_linear(codes, version=2 if form == "gptq_v2" else 1)
    return packed if order is None else {**packed, "g_idx": order.int()}


def one_by_one(codes: Codes, order: Tensor | None) -> Tensor:
    """The matrix, column by column, in float64."""
    columns = []
    for column in range(codes.values.shape[1]):
        group = column // codes.group_size if order is None else int(order[column])
        centred = codes.values[:, column].double() - codes.zeros[:, group].double()
        columns.append(centred * codes.scales[:, group].double())
    return torch.stack(columns, 1)


@pytest.mark.parametrize(("form", "bits", "group", "ordered"), CASES)
def test_output_and_gradients_are_those_of_the_plain_matrix(
    form: str, bits: int, group: int, ordered: bool, seed: int
) -> None:
    symmetric = form == "compressed-tensors"
    codes = drawn(ROWS, WIDTH, bits, group, seed, symmetric=symmetric, least=1 if form == "gptq" else 0)
    generator = torch.Generator().manual_seed(seed)
    groups = torch.arange(WIDTH) // GROUP
    order = groups[torch.randperm(WIDTH, generator=generator)] if ordered else None
    packing = Packing(form, bits, group, symmetric)
    read = packing.codes(written(codes, form, order))

    plain = nn.Linear(WIDTH, ROWS)
    plain.weight = nn.Parameter(one_by_one(codes, order), requires_grad=False)
    layers = [LoraLinear(plain, LoraSpec(rank=4, alpha=8), kind) for kind in ("int", "plain")]
    layers[0].load_codes(read, dtype=torch.float64, device=CPU)
    x, dy = (torch.randn(7, n, generator=generator, dtype=torch.float64) for n in (WIDTH, ROWS))
    a, b = (torch.randn(*s, generator=generator).double() for s in ((4, WIDTH), (ROWS, 4)))
    found = []
    for layer in layers:
        layer.bias = nn.Parameter(plain.bias.detach().double(), requires_grad=False)
        layer.lora_A, layer.lora_B = nn.Parameter(a.clone()), nn.Parameter(b.clone())
        own = x.clone().requires_grad_()
        y = layer(own)
        y.backward(dy)
        found.append([y, own.grad, layer.lora_A.grad, layer.lora_B.grad])
    for ours, reference in zip(*found, strict=True):
        reference = reference.detach()
        torch.testing.assert_close(ours, reference, rtol=1e-6, atol=1e-6 * float(reference.abs().max()))
    assert layers[0].weight.dtype == torch.int32 and layers[0].weight.shape == (ROWS, WIDTH * bits // 32)


def test_nothing_of_the_matrix_is_kept_for_the_backward() -> None:
    codes = drawn(ROWS, WIDTH, 4, GROUP, 0, symmetric=True)
    layer = Linear(nn.Linear(WIDTH, ROWS, bias=False), "int")
    layer.load_codes(codes, dtype=torch.float32, device=CPU)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(torch.randn(3, WIDTH, requires_grad=True)).sum()
    assert not [tensor for tensor in kept if tensor.numel() >= ROWS * WIDTH]
    assert not any(v.numel() == ROWS * WIDTH for v in layer.base.stored().values())  # type: ignore[union-attr]


@pytest.mark.parametrize("form", ["gptq", "gptq_v2", "awq", "compressed-tensors"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "phi3"])
def test_a_model_computes_as_its_unpacked_self(family: str, form: str, tmp_path: Path, seed: int) -> None:
    """`int` keeps the weights packed, `plain` unpacks the same files; one layer is not quantized."""
    make_base(tmp_path / "base", family)
    pack_folder(tmp_path / "base", tmp_path / "packed", form, 4, seed=seed, leave=("layers.1.mlp.down_proj",))
    batch = Batch.of(tiny.packed([23, 9]), device=CPU)
    spec = LoraSpec(rank=4, alpha=8)
    found = []
    for base in ("int", "plain"):
        engine = Engine.load(tmp_path / "packed", dtype=torch.float32, device=CPU, lora=spec, base=base)  # type: ignore[arg-type]
        tiny.randomise_adapter(engine.parameters)
        total = float(engine.forward_backward([batch], loss, denominator=1)["loss"])
        gradients = [p.grad.flatten() for p in engine.parameters.values() if p.grad is not None]
        found.append((total, torch.cat(gradients)))
        kinds = {name: m.kind for name, m in engine.model.named_modules() if isinstance(m, Linear)}
        left = {name for name, kind in kinds.items() if kind == "plain"}
        expected = {n for n in kinds if n == "lm_head" or n.endswith("layers.1.mlp.down_proj")}
        assert left == (expected if base == "int" else set(kinds))
    (ours, gradient), (theirs, reference) = found
    assert ours == pytest.approx(theirs, rel=1e-6)
    assert float((gradient - reference).norm() / reference.norm()) < 1e-5


# ---- what is refused --------------------------------------------------------------------------------------

GPTQ, AWQ, COMPRESSED = SETTINGS["gptq"](4), SETTINGS["awq"](4), SETTINGS["compressed-tensors"](4)


def weights(**changes: Any) -> dict[str, Any]:
    own = COMPRESSED["config_groups"]["group_0"]
    return {"config_groups": {"group_0": {**own, "weights": {**own["weights"], **changes}}}}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({**GPTQ, "bits": 2}, "gptq.*2 bits are not served"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format marlin"),
        ({**GPTQ, "dynamic": {"-:.*k_proj": {}}}, "differ from layer to layer"),
        ({**GPTQ, "pack_dtype": "int16"}, "words of int16"),
        ({**AWQ, "version": "gemv"}, "awq.*version gemv"),
        ({**AWQ, "bits": 8}, "8 bits are not served"),
        ({**COMPRESSED, "format": "float-quantized"}, "format float-quantized"),
        ({**COMPRESSED, **weights(symmetric=False)}, "zero points"),
        ({**COMPRESSED, **weights(num_bits=3)}, "int of 3 bits"),
        ({**COMPRESSED, **weights(type="float")}, "float of 4 bits"),
        ({**COMPRESSED, **weights(strategy="block")}, "scales by block"),
        ({**COMPRESSED, "config_groups": {}}, "0 config_groups"),
        ({**COMPRESSED, "transform_config": {"config_groups": {"R1": {}}}}, "rotated or sparse"),
        ({**COMPRESSED, "sparsity_config": {"format": "sparse-24-bitmask"}}, "rotated or sparse"),
        ({"quant_method": "bitsandbytes"}, "bitsandbytes.*only gptq, awq and compressed-tensors"),
        ({}, "in an unknown way"),
    ],
)
def test_other_forms_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=f"{words}.*give the model in bf16 or fp32") as refusal:
        read_packing(settings)
    assert "\n" not in str(refusal.value)


def test_what_the_settings_say_is_what_is_read() -> None:
    assert str(read_packing(GPTQ)) == "gptq int4, group 32, symmetric"
    assert str(read_packing({**GPTQ, "group_size": -1, "sym": False})) == (
        "gptq int4, a scale a row, asymmetric"
    )
    assert str(read_packing(AWQ)) == "awq int4, group 32, asymmetric"
    assert str(read_packing(COMPRESSED)) == "compressed-tensors int4, group 32, symmetric"
    channel = {**COMPRESSED, **weights(strategy="channel", group_size=None)}
    assert read_packing(channel).group_size == -1


def test_a_folder_that_lacks_what_its_config_says_is_named(tmp_path: Path) -> None:
    make_base(tmp_path / "base")
    content = json.loads((tmp_path / "base" / "config.json").read_text())
    path = tmp_path / "base" / "config.json"
    path.write_text(json.dumps({**content, "quantization_config": GPTQ}))
    with pytest.raises(UserError, match=r"no tensor is named \*\.qweight"):
        check_model(tmp_path / "base", None)
    pack_folder(tmp_path / "base", tmp_path / "packed", "gptq", 4)
    path = tmp_path / "packed" / "config.json"
    path.write_text(path.read_text().replace('"bits": 4', '"bits": 8'))
    with pytest.raises(UserError, match=r"q_proj\.weight has shape \(64, 32\), config.json asks for"):
        check_model(tmp_path / "packed", None)


def test_the_folder_decides_the_precision(tmp_path: Path) -> None:
    make_base(tmp_path / "base")
    pack_folder(tmp_path / "base", tmp_path / "packed", "gptq", 4)
    plain, packed = describe(tmp_path / "base"), describe(tmp_path / "packed")
    for asked in ("auto", "int4"):
        found = place("cpu", asked, description=packed, fuses=True)
        assert (found.base_precision, found.base, found.fused) == ("int4", "int", False)
        assert found.dtype == torch.float32 and found.precision == "gptq int4, group 32, symmetric"
    unpacked = place("cpu", "fp32", description=packed)
    assert unpacked.base == "plain" and unpacked.precision.startswith("fp32, unpacked from gptq int4")
    for asked in ("nf4", "fp8", "int8"):
        with pytest.raises(UserError, match=f"--base_precision {asked}: .* already .gptq int4.*auto"):
            place("cpu", asked, description=packed)
    with pytest.raises(UserError, match=r"--base_precision int4 is for a folder that holds it"):
        place("cpu", "int4", description=plain)
    with pytest.raises(UserError, match=r"--tensor_parallel_size 2: the model is quantized .gptq int4"):
        check_model(tmp_path / "packed", None, tensor_parallel_size=2)


def test_groups_of_neighbours_are_not_looked_up() -> None:
    codes = drawn(ROWS, WIDTH, 4, GROUP, 0, symmetric=True)
    neighbours = torch.arange(WIDTH, dtype=torch.int32) // GROUP
    assert codes.with_groups(neighbours) is codes
    other = codes.with_groups(neighbours.flip(0))
    assert other.groups is not None
    assert torch.equal(replace(other, values=codes.values).dequantize(), other.dequantize())
