"""A merge on a GPU gives what it gives on a CPU, up to the order of sums."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from swiftkit.config import MergeConfig, build
from swiftkit.export.merge import merge
from swiftkit.formats.weights import Weights
from tests.adapters import make_base, make_checkpoint

pytestmark = pytest.mark.gpu
pytest.importorskip("peft")


@pytest.mark.parametrize(
    ("precision", "base"),
    [("bf16", "original"), ("fp8", "original"), ("fp8", "dequantized"), ("nf4", "dequantized")],
)
def test_on_a_gpu_as_on_a_cpu(precision: str, base: str, tmp_path: Path) -> None:
    make_base(tmp_path / "base")
    make_checkpoint(tmp_path / "checkpoint", tmp_path / "base", precision=precision, args={})
    written = []
    for device in ("cpu", "cuda"):
        knobs = {"adapters": str(tmp_path / "checkpoint"), "merge_base": base, "device": device}
        config = build(MergeConfig, {**knobs, "output_dir": str(tmp_path / device)})
        written.append(Weights(merge(config)))
    for name in written[0].names():
        torch.testing.assert_close(written[0].read(name), written[1].read(name), rtol=1e-5, atol=1e-6)
