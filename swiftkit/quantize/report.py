"""What a quantization cost: perplexity before and after, the error of each layer, agreement, size."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from swiftkit.parallel.world import ALONE, World
from swiftkit.quantize.stream import Sample, StreamedModel

FILE = "quantize_report.json"
BAD_ERROR = 0.5  # of a layer's output, relative: it says little of what it said
TIMES_MEDIAN = 5.0  # an error so far from its like's is worth a name
WORTH = 0.05  # but not below this


@dataclass(frozen=True)
class LinearError:
    """One linear layer.

    Args:
        name: in the model.
        error: of its output on the calibration's inputs, |x D^T| / |x W^T|; without a calibration that of its
            weights, |D| / |W|.
        rounding: the same of plain rounding on the same grid.
        damping: of GPTQ; None where columns were only rounded.
        dead: channels that were zero in the whole calibration.
        rows: of the calibration that reached it.
        method: what quantized it.
    """

    name: str
    error: float
    rounding: float
    damping: float | None
    dead: int
    rows: int
    method: str


@dataclass
class Report:
    """Numbers of a quantization; `quantize_report.json` has them all.

    Args:
        settings: what was asked for, and what `auto` became.
        calibration: windows and tokens, of calibration and judged text.
        linears: each linear layer.
        drift: relative change of the hidden states behind each decoder layer, on the judged text.
        quality: perplexity before and after, top-1 agreement.
        size: bytes before and after.
        notes: what was said on the way.
    """

    settings: dict[str, Any]
    calibration: dict[str, Any] = field(default_factory=dict)
    linears: list[LinearError] = field(default_factory=list)
    drift: list[float] = field(default_factory=list)
    quality: dict[str, Any] = field(default_factory=dict)
    size: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def increase(self) -> float:
        """Of the perplexity, relative."""
        return float(self.quality["perplexity_after"] / self.quality["perplexity_before"] - 1)

    def bad(self) -> list[LinearError]:
        """Layers whose error is beyond use, or far from the others of their kind, the worst first."""
        by_kind: dict[str, list[float]] = {}
        for one in self.linears:
            by_kind.setdefault(one.name.rpartition(".")[2], []).append(one.error)
        medians = {kind: statistics.median(errors) for kind, errors in by_kind.items()}

        def odd(one: LinearError) -> bool:
            usual = medians[one.name.rpartition(".")[2]]
            far = one.error > max(WORTH, TIMES_MEDIAN * usual)
            return not math.isfinite(one.error) or one.error > BAD_ERROR or far

        return sorted(filter(odd, self.linears), key=lambda one: -one.error)

    def as_json(self) -> dict[str, Any]:
        """For the file."""
        content = asdict(self)
        content["bad_layers"] = [one.name for one in self.bad()]
        content["quality"] = {**self.quality, "perplexity_increase": self.increase}
        return content

    def lines(self) -> list[str]:
        """For people."""
        quality, size = self.quality, self.size
        worst = max(self.linears, key=lambda one: one.error)
        what = "output" if self.calibration["tokens"] else "weights"
        held = "held-out text" if quality["held_out"] else "the calibration's own text: nothing was held out"
        said = [
            f"quality   perplexity {quality['perplexity_before']:.3f} before, "
            f"{quality['perplexity_after']:.3f} after ({self.increase:+.2%}), on {quality['tokens']:,} "
            f"tokens of {held}; the likeliest token is the same in {quality['top1_agreement']:.1%} of places",
            f"layers    error of the {what}: {statistics.mean(one.error for one in self.linears):.2%} in the "
            f"mean, {worst.error:.2%} at most ({worst.name})",
            f"size      {size['before'] / 1e9:,.3f} GB before, {size['after'] / 1e9:,.3f} GB after "
            f"({size['after'] / size['before']:.0%})",
        ]
        bad = self.bad()
        if bad:
            names = ", ".join(f"{one.name} ({one.error:.0%})" for one in bad[:3])
            said.append(f"warning   {len(bad)} layers lose far more than the others: {names}")
        return said


@torch.no_grad()
def judge(
    stream: StreamedModel, before: Sequence[Sample], after: Sequence[Sample], world: World = ALONE
) -> dict[str, Any]:
    """Perplexity and agreement of two versions of the same windows, behind the last layer.

    Args:
        stream: has the final norm and the head.
        before, after: this rank's windows.
        world: the processes; the result is that of all their windows.
    """
    losses, agreed, tokens = [0.0, 0.0], 0, 0
    for one, other in zip(before, after, strict=True):
        targets = one.batch.targets
        hidden = [stream.final(one), stream.final(other)]
        for place in range(0, len(targets), stream.head.chunk):
            piece = slice(place, place + stream.head.chunk)
            best = []
            for which, states in enumerate(hidden):
                logits = stream.head.logits(states[piece])
                picked = logits.gather(1, targets[piece, None])[:, 0]
                losses[which] += float((logits.logsumexp(1) - picked).sum(dtype=torch.float64))
                best.append(logits.argmax(1))
            agreed += int((best[0] == best[1]).sum())
        tokens += len(targets)
    sums = torch.tensor([*losses, agreed, tokens], dtype=torch.float64)
    world.sum_up(sums)
    *losses, agreed, tokens = sums.tolist()
    perplexities = [math.exp(min(loss / tokens, 700.0)) for loss in losses]
    return {
        "perplexity_before": perplexities[0],
        "perplexity_after": perplexities[1],
        "top1_agreement": agreed / tokens,
        "tokens": int(tokens),
    }


def drift(before: Sequence[Sample], after: Sequence[Sample], world: World = ALONE) -> float:
    """Relative difference of the hidden states of the same windows, those of all ranks."""
    sums = torch.zeros(2, dtype=torch.float64)
    for a, b in zip(after, before, strict=True):
        sums[0] += float((a.hidden.float() - b.hidden.float()).square().sum())
        sums[1] += float(b.hidden.float().square().sum())
    world.sum_up(sums)
    return math.sqrt(float(sums[0] / sums[1]))
