"""Safetensors in pieces: read and written without a tensor, or a file, ever standing whole in memory.

Mapped files would count as memory of the process as far as they were read, so reading here is plain reading.
The format: https://huggingface.co/docs/safetensors (length of the header, JSON header, bytes).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from swiftkit.errors import UserError
from swiftkit.formats.weights import INDEX, WHOLE, Weights

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
LENGTH = 8  # bytes in front of the header that hold its length
PIECE = 32 << 20  # bytes of float32 that a piece of a tensor makes


@dataclass(frozen=True)
class Stored:
    """A tensor of a file, described."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Its numbers."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Its size in the file."""
        return self.numel * self.dtype.itemsize

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Ranges of rows (of the first dimension) that make about PIECE bytes of float32 each."""
        rows = self.shape[0] if self.shape else 1
        step = max(1, PIECE // max(4 * math.prod(self.shape[1:]), 1))
        for start in range(0, rows, step):
            yield start, min(start + step, rows)


class StoredWeights:
    """The tensors of a model folder by name, in the order of its files, read piece by piece.

    Args:
        folder: as for `Weights`, which checks the files first.

    Raises:
        UserError: as `Weights` does, and for a type of number that is not known.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.tensors: dict[str, Stored] = {}
        self._where: dict[str, tuple[Path, int]] = {}
        for path in Weights(folder).files():
            with path.open("rb") as file:
                length = int.from_bytes(file.read(LENGTH), "little")
                header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"][0]):
                if entry["dtype"] not in DTYPES:
                    raise UserError(f"{path}: {name} is stored as {entry['dtype']}, which cannot be merged")
                self.tensors[name] = Stored(name, DTYPES[entry["dtype"]], tuple(entry["shape"]))
                self._where[name] = path, LENGTH + length + entry["data_offsets"][0]

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop` of a tensor, on the CPU, in the file's type; a scalar has one row."""
        stored = self.tensors[name]
        path, offset = self._where[name]
        inner = stored.shape[1:]
        row_bytes = math.prod(inner) * stored.dtype.itemsize
        buffer = torch.empty((stop - start) * row_bytes, dtype=torch.uint8)
        _read(path, offset + start * row_bytes, buffer.numpy().data)
        shape = (stop - start, *inner) if stored.shape else ()
        return buffer.view(stored.dtype).view(shape)


def _read(path: Path, offset: int, into: memoryview) -> None:
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        done = 0
        while done < len(into):
            count = file.readinto(into[done:])
            if not count:
                raise UserError(f"{path} ends before its last tensor does; download the model again")
            done += count


def shards(tensors: Iterable[Stored], *, max_bytes: int) -> list[list[Stored]]:
    """Tensors in order, cut into files of at most `max_bytes`; a larger tensor has a file of its own."""
    files: list[list[Stored]] = [[]]
    size = 0
    for tensor in tensors:
        if files[-1] and size + tensor.nbytes > max_bytes:
            files.append([])
            size = 0
        files[-1].append(tensor)
        size += tensor.nbytes
    return files


def write_shards(
    folder: Path, files: Sequence[Sequence[Stored]], pieces: Callable[[Stored], Iterable[Tensor]]
) -> None:
    """Write one `model.safetensors`, or numbered files and their index, and flush them to the disk.

    Args:
        folder: exists already.
        files: what each file holds, as `shards` gives it.
        pieces: the tensor's rows in order, in its type, in pieces of any size.
    """
    count = len(files)
    where: dict[str, str] = {}
    for number, tensors in enumerate(files, 1):
        name = WHOLE if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"
        where.update(dict.fromkeys((tensor.name for tensor in tensors), name))
        _write(folder / name, tensors, pieces)
    if count > 1:
        total = sum(tensor.nbytes for tensors in files for tensor in tensors)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write(path: Path, tensors: Sequence[Stored], pieces: Callable[[Stored], Iterable[Tensor]]) -> None:
    # The widest numbers first, so that each tensor begins at a multiple of its own.
    ordered = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in ordered:
        start, end = end, end + tensor.nbytes
        header[tensor.name] = {
            "dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end],
        }  # fmt: skip
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % LENGTH)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(LENGTH, "little") + text)
        for tensor in ordered:
            written = 0
            for piece in pieces(tensor):
                assert piece.dtype == tensor.dtype, f"{tensor.name} came as {piece.dtype}"
                written += file.write(piece.contiguous().view(-1).view(torch.uint8).numpy().data)
            assert written == tensor.nbytes, f"{tensor.name} came with {written} of {tensor.nbytes} bytes"
        file.flush()
        os.fsync(file.fileno())
