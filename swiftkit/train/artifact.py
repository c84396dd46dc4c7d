"""The model part of a checkpoint: how the trained tensors lie on disk for other tools, and the way back."""

from __future__ import annotations

import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from swiftkit.formats.full import FullSpec, save_model
from swiftkit.formats.peft import CONFIG, WEIGHTS, LoraSpec, load_trained, save_adapter
from swiftkit.formats.weights import Weights


@dataclass(frozen=True)
class Artifact:
    """What a run makes, apart from the numbers: a PEFT adapter, or a whole model.

    Args:
        spec: the adapter's shape, or that everything is trained.
        base_model: hub id or folder of the base.
        linear_names: all linear modules of the base.
        base: its folder on this machine, which a whole model takes its config.json from.
        starts: what a PiSSA adapter took out of the base.
        tied: whether the output head is the embedding.
    """

    spec: LoraSpec | FullSpec
    base_model: str
    linear_names: tuple[str, ...]
    base: Path | None = None
    starts: Mapping[str, Tensor] = field(default_factory=dict)
    tied: bool = False

    def write(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """Write the tensors, named as in `Engine.parameters` and lying on the host, into a folder."""
        if isinstance(self.spec, FullSpec):
            assert self.base is not None, "a whole model is written beside its base's config.json"
            spec = self.spec
            save_model(folder, tensors, base=self.base, vocabulary=spec.vocabulary, scores=spec.scores)
            return
        save_adapter(
            folder,
            tensors,
            spec=self.spec,
            base_model=self.base_model,
            linear_names=self.linear_names,
            starts=self.starts,
            tied=self.tied,
        )
        # safetensors makes files that only their owner can read.
        (folder / WEIGHTS).chmod(stat.S_IMODE((folder / CONFIG).stat().st_mode))


def read_model(folder: Path) -> dict[str, Tensor]:
    """The trained tensors that `Artifact.write` wrote, by the same names, on the host.

    Raises:
        UserError: for a folder without them, or with damaged files.
    """
    if (folder / CONFIG).is_file():
        return load_trained(folder)
    weights = Weights(folder)
    return {name: weights.read(name) for name in sorted(weights.names())}
