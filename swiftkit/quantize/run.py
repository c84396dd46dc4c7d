"""The quantization of a model: one decoder layer at a time, in three streams of activations.

The calibration goes through what is already quantized, so that each layer is fitted to the inputs that it
will get. The judged text goes through the model as it was, and through the quantized one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from swiftkit.parallel.world import ALONE, World, dealt
from swiftkit.quantize.block import checksum, quantize_block
from swiftkit.quantize.fp8 import round_inputs
from swiftkit.quantize.gram import Inputs, Watch, starved, summed
from swiftkit.quantize.layout import Layout
from swiftkit.quantize.report import Report, drift, judge
from swiftkit.quantize.shapes import linears_of
from swiftkit.quantize.stream import Sample, StreamedModel
from swiftkit.quantize.texts import Texts

Say = Callable[[str], None]


def quantize_layers(
    stream: StreamedModel,
    texts: Texts,
    layout: Layout,
    *,
    folder: Path,
    report: Report,
    say: Say,
    world: World = ALONE,
) -> None:
    """Quantize every decoder layer, and judge the result.

    Several ranks take shares of the texts, sum what they saw of each layer's inputs, and quantize some of its
    matrices each; all of them end with the same weights.

    Args:
        stream: the model.
        texts: calibration and judged windows.
        layout: method, grid and format.
        folder: takes one safetensors file a layer, with all that is written of it, from the first rank.
        report: takes errors and quality.
        say: told how far it is.
        world: the processes.

    Raises:
        RuntimeError: ranks came to other weights.
    """
    calibration = stream.begin(dealt(texts.calibration, world))
    before = stream.begin(dealt(texts.judged, world))
    after = [sample.twin() for sample in before]
    count = len(stream.layers)
    for index in range(count):
        block = stream.load(index)
        stream.run(index, before, keep=True)
        linears = linears_of(block)
        inputs = _watch(stream, index, linears, calibration, report, world) if texts.calibration else []
        first = next(iter(linears))
        made = quantize_block(
            block,
            linears,
            inputs,
            layout=layout,
            prefix=stream.prefixes[index],
            family=stream.model.config.model_type,  # type: ignore[union-attr, arg-type]
            stored=stream.stored_type(f"{stream.prefixes[index]}{first}.weight"),
            world=world,
        )
        _check_equal(block, stream.prefixes[index], world)
        report.linears += made.errors
        if world.first:
            _save(made.tensors, folder / f"layer-{index:05}.safetensors", stream.prefixes[index])
        stream.run(index, calibration, keep=True)
        _run_quantized(stream, index, after, linears, layout)
        report.drift.append(drift(before, after, world))
        stream.free(index)
        worst = max(made.errors, key=lambda one: one.error)
        say(
            f"layer     {index + 1}/{count}: {worst.error:.2%} at most ({worst.name.rpartition('.')[2]}), "
            f"hidden states off by {report.drift[-1]:.2%}"
        )
    report.quality = {**judge(stream, before, after, world), "held_out": texts.held_out}


def _watch(
    stream: StreamedModel,
    index: int,
    linears: dict[str, nn.Linear],
    calibration: list[Sample],
    report: Report,
    world: World,
) -> list[Inputs]:
    """What reaches each linear layer in the calibration; layers that nothing reaches are told of."""
    with Watch(linears) as watch:
        stream.run(index, calibration, keep=False)
    inputs = summed(watch.inputs, linears, world, stream.device)
    without = starved(inputs, linears)
    if without:
        report.notes.append(
            f"{stream.prefixes[index]}{without[0]} and {len(without) - 1} more of its layer got no token of "
            "the calibration (experts that were never chosen): plain rounding"
        )
    return inputs


def _check_equal(block: nn.Module, prefix: str, world: World) -> None:
    """Every rank goes on with the same layer."""
    if world.size == 1:
        return
    sums = world.gathered(checksum(block))
    odd = [rank for rank, other in enumerate(sums) if other != sums[0]]
    if odd:
        raise RuntimeError(f"ranks 0 and {odd[0]} hold other weights of {prefix.rstrip('.')}")


def _run_quantized(
    stream: StreamedModel, index: int, samples: list[Sample], linears: dict[str, nn.Linear], layout: Layout
) -> None:
    """The judged text, with inputs in FP8 where the format says so."""
    hooks = [linear.register_forward_pre_hook(round_inputs) for linear in linears.values()
             if layout.method == "fp8"]  # fmt: skip
    stream.run(index, samples, keep=True)
    for hook in hooks:
        hook.remove()


def _save(tensors: dict[str, Tensor], path: Path, prefix: str) -> None:
    save_file({prefix + name: tensor.contiguous() for name, tensor in tensors.items()}, path)


def preset(layout: Layout, **settings: Any) -> dict[str, Any]:
    """What the report says of the settings."""
    scheme = layout.scheme
    grid = {} if scheme is None else {"bits": scheme.bits, "group_size": scheme.group_size,
                                      "sym": scheme.symmetric}  # fmt: skip
    return {
        "method": layout.method,
        "format": layout.form,
        **(grid or {"bits": 8}),
        **({"damping": layout.damping, "act_order": layout.act_order} if layout.method == "gptq" else {}),
        **settings,
        "torch": torch.__version__,
    }
