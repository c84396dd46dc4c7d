"""Every served family: our engine computes what transformers and PEFT compute, packed or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from swiftkit.data import collate
from swiftkit.engine import Batch, Engine, LoraSpec
from swiftkit.engine.families import FAMILIES as SERVED
from swiftkit.methods.sft import loss
from tests import tiny

pytestmark = pytest.mark.compat
CPU = torch.device("cpu")
SPEC = LoraSpec(rank=4, alpha=8)
ENGINES = sorted(tiny.FAMILIES)


def engine_of(folder: Path, spec: LoraSpec | None = SPEC, **options: Any) -> Engine:
    engine = Engine.load(folder, dtype=torch.float32, device=CPU, lora=spec, **options)
    tiny.randomise_adapter(engine.parameters)
    return engine


def one_by_one(lengths: list[int]) -> list[Batch]:
    return [Batch.of(collate([[d]], pad_id=0), device=CPU) for d in tiny.documents(lengths)]


def test_every_served_family_has_a_tiny_model() -> None:
    assert {options["model_type"] for options in tiny.FAMILIES.values()} == set(SERVED)


@pytest.mark.parametrize("family", ENGINES)
def test_logits_equal_transformers(family: str, tmp_path: Path) -> None:
    reference = tiny.make(family, tmp_path)
    engine = engine_of(tmp_path, None)
    batch = Batch.of(tiny.packed([21]), device=CPU)
    with torch.no_grad():
        ours = engine.head.logits(engine.hidden(batch))
        theirs = reference(input_ids=batch.input_ids[None], use_cache=False).logits[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("family", ENGINES)
def test_packed_equals_unpacked(family: str, tmp_path: Path) -> None:
    tiny.make(family, tmp_path)
    engine = engine_of(tmp_path)
    lengths = [13, 4, 22, 9]
    packed = [Batch.of(tiny.packed(lengths), device=CPU)]
    together = engine.forward_backward(packed, loss, denominator=24)
    gradients = take_gradients(engine)
    apart = engine.forward_backward(one_by_one(lengths), loss, denominator=24)
    torch.testing.assert_close(together["loss"], apart["loss"], rtol=1e-6, atol=0)
    assert_gradients_close(gradients, take_gradients(engine), 2e-5)


@pytest.mark.parametrize("family", ENGINES)
def test_adapter_equals_peft(family: str, tmp_path: Path) -> None:
    """Loss and gradients of our engine, packed, against PEFT over transformers, one document at a time."""
    peft = pytest.importorskip("peft")
    reference = tiny.make(family, tmp_path)
    engine = engine_of(tmp_path)
    lengths = [13, 4, 22]
    ours = engine.forward_backward([Batch.of(tiny.packed(lengths), device=CPU)], loss, denominator=1)
    gradients = take_gradients(engine)

    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=sorted({name.split(".")[-2] for name in engine.parameters})
    )
    wrapped = peft.get_peft_model(reference, config)
    theirs = {
        name.removeprefix("base_model.model.").replace(".default.weight", ""): parameter
        for name, parameter in wrapped.named_parameters()
        if parameter.requires_grad
    }
    assert theirs.keys() == engine.parameters.keys()
    with torch.no_grad():
        for name, parameter in theirs.items():
            parameter.copy_(engine.parameters[name])
    total = torch.zeros(())
    for batch in one_by_one(lengths):
        logits = wrapped(input_ids=batch.input_ids[None], use_cache=False).logits[0]
        total = total + torch.nn.functional.cross_entropy(
            logits[batch.positions], batch.targets, reduction="sum"
        )
    total.backward()
    torch.testing.assert_close(ours["loss"].float(), total.detach(), rtol=1e-5, atol=0)
    assert_gradients_close(gradients, {name: p.grad for name, p in theirs.items()}, 5e-5)


def test_a_family_that_is_not_served_is_refused_by_name(tmp_path: Path) -> None:
    from transformers import AutoConfig

    from swiftkit.errors import UserError

    AutoConfig.for_model("gpt2").save_pretrained(tmp_path)
    with pytest.raises(UserError, match="'gpt2' are not served yet"):
        Engine.load(tmp_path, dtype=torch.float32, device=CPU)


def test_a_tied_head_is_one_tensor(tmp_path: Path) -> None:
    tiny.make("llama-tied-biased", tmp_path)
    engine = engine_of(tmp_path)
    assert engine.head.weight is engine.model.get_input_embeddings().weight
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.tie_word_embeddings


def take_gradients(engine: Engine) -> dict[str, torch.Tensor]:
    taken = {}
    for name, parameter in engine.parameters.items():
        assert parameter.grad is not None, name
        taken[name], parameter.grad = parameter.grad, None
    return taken


def assert_gradients_close(
    ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor | None], bound: float
) -> None:
    for name, gradient in ours.items():
        other = theirs[name]
        assert other is not None
        assert gradient.norm() > 0, name
        error = (gradient - other).norm() / other.norm()
        assert error < bound, f"{name}: relative error {error:.2e}"


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3"])
def test_a_micro_batch_never_waits_for_the_device(family: str, tmp_path: Path) -> None:
    """Nothing reads a value back (`.item()`, a branch on a tensor): the host runs ahead of the GPU."""
    tiny.make(family, tmp_path)
    engine = engine_of(tmp_path)
    batch = Batch.of(tiny.packed([5, 9]), device=CPU)
    with RefuseReading():
        engine.forward_backward([batch], loss, denominator=3)


class RefuseReading(TorchDispatchMode):
    """Raises where a tensor's value decides something on the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert "_local_scalar_dense" not in str(func) and "nonzero" not in str(func), func
        return func(*args, **(kwargs or {}))
