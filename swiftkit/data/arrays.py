"""A folder of flat arrays on disk: written piece by piece, checked when it is opened, mapped into memory."""

from __future__ import annotations

import hashlib
import json
import mmap
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

INDEX = "index.json"
CHUNK = 1 << 22  # bytes read at once when an array is checked

Arrays: TypeAlias = dict[str, NDArray[Any]]


class DamagedError(Exception):
    """A folder of arrays is not what was written."""


class ArrayWriter:
    """Appends to arrays, each a raw file in native byte order; `finish` makes the folder one that opens.

    Args:
        folder: an empty folder.
        kinds: name and type of each array.
    """

    def __init__(self, folder: Path, kinds: Mapping[str, type[np.generic]]) -> None:
        self._folder = folder
        self._kinds = {name: np.dtype(kind) for name, kind in kinds.items()}
        self._counts = dict.fromkeys(kinds, 0)
        self._sums = dict.fromkeys(kinds, 0)
        self._files: dict[str, IO[bytes]] = {name: (folder / f"{name}.bin").open("wb") for name in kinds}

    def append(self, **arrays: NDArray[Any]) -> None:
        """Adds one-dimensional pieces to arrays by their names."""
        for name, array in arrays.items():
            piece = np.ascontiguousarray(array, self._kinds[name]).view(np.uint8).data
            self._files[name].write(piece)
            self._sums[name] = zlib.crc32(piece, self._sums[name])
            self._counts[name] += len(array)

    def finish(self, facts: Mapping[str, Any]) -> None:
        """Closes the files and writes the index, which holds the facts (JSON values) beside the arrays."""
        self.close()
        arrays = {
            name: {"kind": kind.str, "count": self._counts[name], "crc32": self._sums[name]}
            for name, kind in self._kinds.items()
        }
        content = json.dumps({"arrays": arrays, "facts": facts}).encode("ascii")
        (self._folder / INDEX).write_bytes(_with_digest(content))

    def close(self) -> None:
        """Closes the files; without `finish` the folder does not open."""
        for file in self._files.values():
            file.close()


def write_arrays(folder: Path, arrays: Arrays, facts: Mapping[str, Any]) -> None:
    """Writes whole arrays into an empty folder."""
    writer = ArrayWriter(folder, {name: array.dtype.type for name, array in arrays.items()})
    try:
        writer.append(**arrays)
        writer.finish(facts)
    finally:
        writer.close()


def open_arrays(folder: Path, *, check: bool = True) -> tuple[Arrays, dict[str, Any]]:
    """The arrays of a folder, mapped read-only, and its facts.

    Args:
        folder: as `ArrayWriter.finish` left it.
        check: every byte is read and compared with its checksum, without staying in memory.

    Raises:
        DamagedError: the folder is not whole, or not what was written.
    """
    try:
        written = (folder / INDEX).read_bytes()
        content = written.partition(b"\n")[2].removesuffix(b"\n")
        if written != _with_digest(content):
            raise DamagedError(f"{folder / INDEX} is not what was written")
        index = json.loads(content)
        arrays = {name: _mapped(folder / f"{name}.bin", entry) for name, entry in index["arrays"].items()}
        for name, entry in index["arrays"].items():
            if check and _crc32(folder / f"{name}.bin") != entry["crc32"]:
                raise DamagedError(f"{folder / name}.bin is not what was written")
    except OSError as failure:
        raise DamagedError(str(failure)) from None
    return arrays, index["facts"]


def let_go(array: NDArray[Any]) -> None:
    """Takes a mapped array out of the process's memory; what is read again comes back from the disk."""
    mapping: Any = array.base.obj if isinstance(array.base, memoryview) else None
    if isinstance(mapping, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        mapping.madvise(mmap.MADV_DONTNEED)


def size_of(folder: Path) -> int:
    """Bytes of the files in a folder."""
    return sum(file.stat().st_size for file in folder.iterdir())


def _mapped(path: Path, entry: Mapping[str, Any]) -> NDArray[Any]:
    kind, count = np.dtype(entry["kind"]), entry["count"]
    if path.stat().st_size != count * kind.itemsize:
        raise DamagedError(f"{path} has not the size that was written")
    if not count:  # an empty file cannot be mapped
        return np.empty(0, kind)
    with path.open("rb") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), kind)


def _crc32(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while piece := file.read(CHUNK):
            value = zlib.crc32(piece, value)
    return value


def _with_digest(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode("ascii") + b"\n" + content + b"\n"
