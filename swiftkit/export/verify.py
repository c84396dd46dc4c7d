"""The check of a merge, told: it passes, or the merge fails."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from swiftkit.config import MergeConfig
from swiftkit.engine.build import describe
from swiftkit.errors import UserError
from swiftkit.export.base import Held, held_of
from swiftkit.export.check import Answer, LayerCheck, Models, check_layers, difference, logit_bound
from swiftkit.export.probe import probe_rows
from swiftkit.export.weights import MergedWeights
from swiftkit.formats.weights import Weights
from swiftkit.hub import Say

if TYPE_CHECKING:
    from swiftkit.export.adapter import Adapter

SHARE = 0.5  # of the free memory that a check may take
COPIES = 1.3  # of the weights in float32, with what is computed beside them
NEARER = 0.05  # a loss that is lower by this share is worth a word
# Shares of the adapter's change in the written weights: outside of these two it is another model.
LEAST_KEPT, MOST_KEPT = 0.5, 1.25
ENOUGH_KEPT = 0.9


@dataclass(frozen=True)
class Checked:
    """What was found, for the model's card.

    Args:
        layers: of the check layer by layer.
        logits: relative difference to the adapter's; None where the model did not fit into memory.
        probe: the rows.
        losses: of the probe, by a word for the model; empty where nothing was quantized.
    """

    layers: LayerCheck
    logits: float | None = None
    probe: str = ""
    losses: tuple[tuple[str, float], ...] = ()


def verify(
    folder: Path,
    adapter: Adapter,
    merged: MergedWeights,
    config: MergeConfig,
    *,
    device: torch.device,
    say: Say,
) -> Checked:
    """Check the files of a merged model against the adapter on the same base.

    Raises:
        UserError: a layer or the logits differ by more than the stated bound.
        OSError: the files read back other than they were written.
    """
    shapes = Weights(folder)  # safetensors' own reader, over headers that we wrote
    layers = check_layers(merged, folder, device=device)
    odd = [*layers.faults, *(t.name for t in merged.tensors if shapes.shape(t.name) != t.shape)]
    if odd:
        raise OSError(f"{folder}: {odd[0]} reads back other than it was written; is the disk sound?")
    if not layers.worst <= 1:
        raise UserError(
            f"the merge failed its check: {layers.name} is off by {layers.error:.1e} of its output, more "
            f"than rounding explains ({layers.bound:.1e}); nothing was kept. Is the adapter finite? "
            "--merge_dtype fp32 avoids overflow and rounding"
        )
    say(
        f"checked   each layer's W_merged x against W x + s B A x: off by {layers.error:.1e} at most "
        f"({layers.name}, bound {layers.bound:.1e}); {layers.kept:.1%} of the adapter's change is written"
    )
    if not LEAST_KEPT <= layers.kept <= MOST_KEPT:
        raise UserError(
            f"the merge failed its check: {layers.kept:.0%} of the adapter's change survives rounding (it is "
            "small beside the last place of the weights), so the model would not answer like the adapter; "
            "nothing was kept. --merge_dtype fp32 keeps all of it"
        )
    if layers.kept < ENOUGH_KEPT:
        say(
            "warning   the adapter's change is small beside the last place of the weights, so part of it is "
            "lost in rounding; --merge_dtype fp32 keeps all of it"
        )
    if not _takes_logits(config, merged, device, say):
        return Checked(layers)
    return _compare(folder, adapter, merged, config, layers, device=device, say=say)


def _takes_logits(config: MergeConfig, merged: MergedWeights, device: torch.device, say: Say) -> bool:
    if merged.ends.tied and not merged.tied:
        say(
            "          logits not compared: the adapter takes a tied embedding and head apart, which only "
            "the merged model can hold"
        )
        return False
    if config.merge_check != "auto":
        return config.merge_check == "logits"
    needed = COPIES * sum(4 * tensor.numel for tensor in merged.tensors)
    free = free_memory(device)
    if needed <= SHARE * free:
        return True
    say(
        f"          logits not compared: in float32 the model takes {needed / 2**30:,.1f} GiB, more than "
        f"half of the {free / 2**30:,.1f} GiB free; --merge_check logits does it all the same"
    )
    return False


def free_memory(device: torch.device) -> int:
    """Bytes that can be had on a device without swapping."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
    else:
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    group = Path("/sys/fs/cgroup")
    limit = group / "memory.max"
    if limit.is_file() and limit.read_text().strip().isdigit():
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        cache = int(counts["inactive_file"]) + int(counts["active_file"])  # given back when it is asked for
        used = int((group / "memory.current").read_text()) - cache
        free = min(free, int(limit.read_text()) - used)
    return max(free, 0)


def _compare(
    folder: Path,
    adapter: Adapter,
    merged: MergedWeights,
    config: MergeConfig,
    layers: LayerCheck,
    *,
    device: torch.device,
    say: Say,
) -> Checked:
    base = adapter.base.path
    probe = probe_rows(adapter.args, adapter.tokenizer, merged.vocabulary)
    models = Models(base, adapter.spec, adapter.tensors, batch=probe.batch, device=device)
    training = held_of(adapter.trained_on, describe(base))
    of_merge = training if config.merge_base == "dequantized" else None
    expected, found = models.adapter(of_merge), models.whole(folder)
    error = difference(found, expected)
    bound = max(logit_bound(t.dtype) for t in merged.tensors if t.dtype.is_floating_point)
    if not error <= bound:
        raise UserError(
            f"the merge failed its check: on {probe.source} its logits are off by {error:.1e} of the "
            f"adapter's, more than rounding explains ({bound:.1e}); nothing was kept. "
            "--merge_dtype fp32 avoids rounding"
        )
    same = (found.logits.argmax(1) == expected.logits.argmax(1)).sum()
    say(
        f"          logits on {probe.source}: off by {error:.1e} of the adapter's (bound {bound:.1e}), "
        f"the likeliest token is the same in {int(same)} of {len(found.logits)} places"
    )
    losses = _losses(adapter, config, models, training, found)
    if losses:
        told = ", ".join(f"{loss:.4f} {name}" for name, loss in losses)
        say(f"loss      on the same rows: {told}")
        (_, ours), (other, theirs) = losses[1:]
        if theirs < ours * (1 - NEARER):
            say(f"note      {other}, the loss is lower: see --merge_base")
    return Checked(layers, error, probe.source, losses)


def _losses(
    adapter: Adapter,
    config: MergeConfig,
    models: Models,
    training: Held | None,
    found: Answer,
) -> tuple[tuple[str, float], ...]:
    """The adapter on the quantized base of its training, and what each base of a merge makes of it."""
    trained = adapter.trained_on
    if training is None or trained is None:
        return ()
    original = config.merge_base == "original"
    other = models.adapter(training if original else None)
    return (
        (f"as trained ({trained.precision})", models.as_trained(trained.storage).loss),
        (f"merged into {config.merge_base} weights (this model)", found.loss),
        (f"merged into {'dequantized' if original else 'original'} ones", other.loss),
    )
