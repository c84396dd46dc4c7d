"""Is the merged model the adapter on its base? Asked of the written files, before they get their name.

Layer by layer, one in memory at a time: W_merged x against W x + s B A x for random x. And, where the model
fits into memory, of the whole: its logits on a few rows against the adapter's on that same base.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from swiftkit.data import PackedBatch
from swiftkit.engine import Batch, Engine, LoraSpec
from swiftkit.engine.fused.base import BaseKind
from swiftkit.export.base import Held
from swiftkit.export.weights import MergedWeights
from swiftkit.formats.shards import Stored, StoredWeights

VECTORS = 8  # random inputs of a layer
FP32_ERROR = 1e-5  # of products and sums in float32, relative, with room


def layer_bound(dtype: torch.dtype) -> float:
    """Largest relative error of a layer's output that rounding its weights to `dtype` can cause.

    Rounding moves a weight by at most eps / 2 of itself, hence the Frobenius norm of the matrix by no more.
    """
    return torch.finfo(dtype).eps / 2 + FP32_ERROR


def logit_bound(dtype: torch.dtype) -> float:
    """Largest relative error of centred logits that is taken for rounding of the weights to `dtype`.

    Each layer adds an error of some 0.4 eps / 2 to the stream, and the layers' errors are independent; the
    bound leaves a factor of about ten above what was measured (docs/merge.md).
    """
    return 8 * torch.finfo(dtype).eps + 10 * FP32_ERROR


@dataclass(frozen=True)
class LayerCheck:
    """What the check of the layers found.

    Args:
        worst: largest error as a share of its bound.
        name: where.
        error: there, relative.
        bound: there.
        kept: share of the adapter's change that is in the written weights; rounding to bf16 loses changes
            much smaller than the weights.
        faults: tensors that differ, though they had to be equal.
    """

    worst: float
    name: str
    error: float
    bound: float
    kept: float
    faults: tuple[str, ...]


def check_layers(merged: MergedWeights, folder: Path, *, device: torch.device) -> LayerCheck:
    """Compare the files of `folder` with base and adapter, a few rows of a tensor at a time."""
    written = StoredWeights(folder)
    generator = torch.Generator().manual_seed(0)
    worst = (-1.0, "", 0.0, 0.0)
    along = whole = 0.0
    faults = []
    for tensor in merged.tensors:
        if tensor.name not in merged.factors:
            if not _equal(merged, written, tensor):
                faults.append(tensor.name)
            continue
        x = torch.randn(tensor.shape[1], VECTORS, generator=generator).to(device)  # [in, vectors]
        error, size, dot, norm = _products(merged, written, tensor, x)
        relative, bound = (error / max(size, 1e-60)) ** 0.5, layer_bound(tensor.dtype)
        share = relative / bound if relative == relative else float("inf")
        worst = max(worst, (share, tensor.name, relative, bound))
        along, whole = along + dot, whole + norm
    return LayerCheck(*worst, kept=along / whole if whole else 1.0, faults=tuple(faults))


def _equal(merged: MergedWeights, written: StoredWeights, tensor: Stored) -> bool:
    start = 0
    for piece in merged.pieces(tensor):
        rows = piece.shape[0] if piece.dim() else 1
        other = written.rows(tensor.name, start, start + rows)
        if not torch.equal(*(t.contiguous().view(-1).view(torch.uint8) for t in (piece, other))):
            return False
        start += rows
    return True


def _products(
    merged: MergedWeights, written: StoredWeights, tensor: Stored, x: Tensor
) -> tuple[float, float, float, float]:
    """Squared error and size of the layer's output; the change's product with the adapter, and its square."""
    factors = merged.factors[tensor.name].to(x.device)
    sums = torch.zeros(4, dtype=torch.float64, device=x.device)
    for start, stop in tensor.ranges():
        base = merged.base(tensor.name, start, stop)
        adapter = factors.change(base, x, start)
        change = (written.rows(tensor.name, start, stop).to(x.device).float() - base) @ x
        terms = ((change - adapter) ** 2, (base @ x + adapter) ** 2, change * adapter, adapter**2)
        sums += torch.stack([term.double().sum() for term in terms])
    error, size, dot, norm = sums.tolist()
    return error, size, dot, norm


# ---- the whole model --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """What a model says to the probe."""

    logits: Tensor  # float32 [tokens, vocabulary], centred: a shift of all means nothing
    loss: float  # mean over the trained tokens


class Models:
    """The base with its adapter, in memory one at a time.

    Args:
        base: the model folder.
        spec, tensors: the adapter.
        batch: the probe.
        device: where it computes.
    """

    def __init__(
        self,
        base: Path,
        spec: LoraSpec,
        tensors: dict[str, Tensor],
        *,
        batch: PackedBatch,
        device: torch.device,
    ):
        self._base, self._spec, self._tensors = base, spec, tensors
        self._batch, self._device = batch, device

    def adapter(self, held: Held | None) -> Answer:
        """The adapter on the original base, or on the dequantized one, in float32."""
        with self._engine(self._base, adapter=True) as engine:
            if held is not None:
                _hold(engine, held)
            return self._answer(engine)

    def as_trained(self, storage: BaseKind) -> Answer:
        """The adapter on the base as it was trained: quantized, with the products of its storage."""
        on_gpu = self._device.type == "cuda"  # where FP8 products give bf16
        dtype = torch.bfloat16 if on_gpu else torch.float32
        with self._engine(self._base, adapter=True, storage=storage, dtype=dtype) as engine:
            return self._answer(engine)

    def whole(self, folder: Path) -> Answer:
        """A model without an adapter, in float32."""
        with self._engine(folder, adapter=False) as engine:
            return self._answer(engine)

    @contextmanager
    def _engine(
        self,
        folder: Path,
        *,
        adapter: bool,
        storage: BaseKind = "plain",
        dtype: torch.dtype = torch.float32,
    ) -> Iterator[Engine]:
        with torch.compiler.set_stance("force_eager"):  # for one batch, compiling would take longer
            engine = Engine.load(
                folder,
                dtype=dtype,
                device=self._device,
                lora=self._spec if adapter else None,
                base=storage,
                fused=False,
            )
            if adapter:
                engine.load_adapter(self._tensors)
            engine.model.eval()
            yield engine

    @torch.no_grad()
    def _answer(self, engine: Engine) -> Answer:
        batch = Batch.of(self._batch, device=self._device)
        hidden = engine.hidden(batch)
        logits = engine.head.logits(hidden)
        loss = engine.head.cross_entropy(hidden[batch.positions], batch.targets) / len(batch.targets)
        return Answer((logits - logits.mean(1, keepdim=True)).cpu(), float(loss))


@torch.no_grad()
def _hold(engine: Engine, held: Held) -> None:
    for name, parameter in engine.model.named_parameters():
        if not parameter.requires_grad:
            parameter.copy_(held(name, parameter.detach()))


def difference(one: Answer, other: Answer) -> float:
    """Relative difference of the logits, by the norm over all positions."""
    return float((one.logits - other.logits).norm() / other.logits.norm())
