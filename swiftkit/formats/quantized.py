"""A quantized model's folder read back: packed matrices as codes, or as what they stand for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from swiftkit.errors import UserError
from swiftkit.formats.codes import Codes
from swiftkit.formats.packing import Packing, packing_of, read_packing
from swiftkit.formats.shards import Stored, StoredWeights, shards, write_shards
from swiftkit.formats.weights import Weights
from swiftkit.parallel.shards import Shard

PACKED = (
    "qweight", "qzeros", "scales", "g_idx", "weight_packed", "weight_scale", "weight_shape", "weight_g_idx",
)  # fmt: skip
SHARD = 5 * 10**9


class QuantizedWeights(Weights):
    """The tensors of a quantized folder: a packed matrix stands under the name of the plain one.

    Args:
        folder: as for `Weights`.
        packing: as config.json tells it.

    Raises:
        UserError: as `Weights` does, and where a packed matrix lacks one of its tensors.
    """

    def __init__(self, folder: Path, packing: Packing):
        super().__init__(folder)
        self.packing = packing
        ending = f".{packing.packed}"
        self.packed = frozenset(name.removesuffix(ending) for name in self._where if name.endswith(ending))
        if not self.packed:
            raise UserError(f"{folder}: config.json says {packing}, and no tensor is named *{ending}")
        needed = ("weight_scale",) if packing.form == "compressed-tensors" else ("qzeros", "scales")
        lacking = sorted(f"{one}.{leaf}" for one in self.packed for leaf in needed
                         if f"{one}.{leaf}" not in self._where)  # fmt: skip
        if lacking:
            raise UserError(f"{folder} lacks {lacking[0]}; download the model again")

    def is_packed(self, name: str) -> bool:
        """Whether the parameter `...weight` is a packed matrix."""
        owner, _, leaf = name.rpartition(".")
        return leaf == "weight" and owner in self.packed

    def names(self) -> set[str]:
        """Names of all parameters."""
        plain = {name for name in self._where if name.rpartition(".")[2] not in PACKED}
        return plain | {f"{owner}.weight" for owner in self.packed}

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a parameter, from the file's header."""
        if not self.is_packed(name):
            return super().shape(name)
        return self.packing.shape(super().shape(f"{name.removesuffix('.weight')}.{self.packing.packed}"))

    def codes(self, name: str) -> Codes:
        """A packed matrix, on the CPU."""
        owner = name.removesuffix(".weight")
        return self.packing.codes(
            {leaf: super(QuantizedWeights, self).read(f"{owner}.{leaf}") for leaf in PACKED
             if f"{owner}.{leaf}" in self._where}
        )  # fmt: skip

    def read(self, name: str) -> Tensor:
        """A whole parameter, on the CPU: a packed matrix in float32, others in the file's own type."""
        return self.codes(name).dequantize() if self.is_packed(name) else super().read(name)

    def part(self, name: str, shard: Shard) -> Tensor:
        """A shard of a parameter; of a packed matrix all is read."""
        return shard.take(self.read(name)) if self.is_packed(name) else super().part(name, shard)


class UnpackedWeights(StoredWeights):
    """As `StoredWeights`, of a quantized folder: packed matrices under the names of the plain ones.

    Args:
        folder: as for `Weights`.
        packing: as config.json tells it.
    """

    def __init__(self, folder: Path, packing: Packing):
        super().__init__(folder)
        self._quantized = QuantizedWeights(folder, packing)
        plain = {name: t for name, t in self.tensors.items() if name in self._quantized.names()}
        # bf16 is what a copy is written in; `rows` gives the numbers as they are.
        made = {
            name: Stored(name, torch.bfloat16, self._quantized.shape(name))
            for name in sorted(f"{owner}.weight" for owner in self._quantized.packed)
        }
        self.tensors = plain | made
        self._last: tuple[str, Tensor] | None = None  # rows are read one after another

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows of a tensor; of a packed matrix in float32."""
        if not self._quantized.is_packed(name):
            return super().rows(name, start, stop)
        if self._last is None or self._last[0] != name:
            self._last = name, self._quantized.read(name)
        return self._last[1][start:stop].clone()


def open_weights(folder: Path, config: Any) -> Weights:
    """The weights of a folder, quantized or not; `config` is its transformers config."""
    packing = packing_of(config)
    return Weights(folder) if packing is None else QuantizedWeights(folder, packing)


def open_stored(folder: Path, config: Any) -> StoredWeights:
    """The same, read piece by piece."""
    packing = packing_of(config)
    return StoredWeights(folder) if packing is None else UnpackedWeights(folder, packing)


def dequantized_copy(folder: Path, out: Path) -> None:
    """Write a plain float32 model with the weights that a quantized one stands for.

    Inputs are not quantized in it: of an FP8 model it is the weights alone.

    Raises:
        UserError: the folder is not quantized, or in a format that is not known here.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    quantization = config.pop("quantization_config", None)
    if quantization is None:
        raise UserError(f"{folder} is not quantized")
    if quantization.get("format") == "float-quantized":
        weights, value = _fp8_values(folder)
    else:
        weights = QuantizedWeights(folder, read_packing(quantization))
        value = weights.read

    def pieces(tensor: Stored) -> Iterator[Tensor]:
        yield value(tensor.name).float().contiguous()

    names = sorted(name for name in weights.names() if not name.endswith(".weight_scale"))
    tensors = [Stored(name, torch.float32, weights.shape(name)) for name in names]
    out.mkdir(parents=True)
    write_shards(out, shards(tensors, max_bytes=SHARD), pieces)
    config["dtype"] = "float32"
    config.pop("torch_dtype", None)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for path in folder.glob("*token*"):
        shutil.copyfile(path, out / path.name)


def _fp8_values(folder: Path) -> tuple[Weights, Any]:
    """The tensors of an FP8 folder, and what reads one with its scale."""
    weights = Weights(folder)
    names = weights.names()

    def value(name: str) -> Tensor:
        tensor = weights.read(name).float()
        scale = f"{name}_scale"
        return tensor * weights.read(scale).float() if scale in names else tensor

    return weights, value
