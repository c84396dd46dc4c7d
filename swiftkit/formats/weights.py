"""Base weights on disk: a folder of safetensors, read tensor by tensor or slice by slice."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swiftkit.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from swiftkit.parallel.shards import Shard

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class Weights:
    """The tensors of a model folder, by name. Files stay mapped; nothing is read before it is asked for.

    Raises:
        UserError: for a folder without safetensors, or with files that are missing, cut or damaged.
    """

    def __init__(self, folder: Path):
        from safetensors import SafetensorError, safe_open

        self.folder = folder
        self._files: dict[str, Any] = {}
        self._where: dict[str, str] = {}
        for path in _files_of(folder):
            try:
                handle = safe_open(path, framework="pt")
            except SafetensorError as broken:
                raise UserError(f"{path} is cut or damaged ({broken}); download the model again") from None
            self._files[path.name] = handle
            self._where.update(dict.fromkeys(handle.keys(), path.name))

    def files(self) -> list[Path]:
        """The files that hold the tensors, in order."""
        return [self.folder / name for name in self._files]

    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, from the file's header."""
        return tuple(self._files[self._where[name]].get_slice(name).get_shape())

    def read(self, name: str) -> Tensor:
        """A whole tensor, in the file's own type, on the CPU."""
        tensor: Tensor = self._files[self._where[name]].get_tensor(name)
        return tensor

    def part(self, name: str, shard: Shard) -> Tensor:
        """A shard of a tensor, of which nothing else is read."""
        import torch

        stored = self._files[self._where[name]].get_slice(name)
        before = (slice(None),) * shard.dim
        return torch.cat([stored[(*before, slice(*own))] for own in shard.ranges], shard.dim)

    def rows(self, name: str, ids: Sequence[int]) -> Tensor:
        """Some rows of a matrix, [ids, width], of which nothing else is read."""
        import torch

        matrix = self._files[self._where[name]].get_slice(name)
        return torch.cat([matrix[row : row + 1] for row in ids])


def _files_of(folder: Path) -> list[Path]:
    """The model's weight files; what else lies beside them, another format's copy say, is left alone."""
    index = folder / INDEX
    if index.is_file():
        try:
            named = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UserError(f"{index} is cut or damaged; download the model again") from None
        missing = [name for name in named if not (folder / name).is_file()]
        if missing:
            raise UserError(
                f"{folder} lacks {missing[0]} ({len(missing)} of {len(named)} weight files are missing); "
                "download the model again"
            )
        return [folder / name for name in named]
    if (folder / WHOLE).is_file():
        return [folder / WHOLE]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickled = next(folder.glob("*.bin"), None)
        rule = f" ({pickled.name} is a pickle, which is never loaded)" if pickled else ""
        raise UserError(f"{folder} has no *.safetensors{rule}")
    return files
