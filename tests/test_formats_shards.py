"""Safetensors in pieces: the official reader reads what we write, and we read what it wrote."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from swiftkit.errors import UserError
from swiftkit.formats.shards import Stored, StoredWeights, shards, write_shards
from swiftkit.formats.weights import INDEX, WHOLE, Weights


def random_tensors(seed: int) -> dict[str, torch.Tensor]:
    """Of every kind that files hold: sizes that are no multiple of another's, a scalar, an empty one."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "odd": torch.randn(7, 3, generator=generator).bfloat16(),
        "wide": torch.randn(5, 11, generator=generator),
        "bytes": torch.randint(0, 255, (13,), generator=generator, dtype=torch.uint8),
        "count": torch.tensor(5, dtype=torch.int64),
        "none": torch.empty(0, 4),
        "eight": torch.randn(3, 3, generator=generator).to(torch.float8_e4m3fn),
        "half": torch.randn(9, generator=generator).half(),
        "cube": torch.randn(3, 2, 2, generator=generator).double(),
    }


def described(tensors: dict[str, torch.Tensor]) -> list[Stored]:
    return [Stored(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]


def row_by_row(tensors: dict[str, torch.Tensor], stored: Stored) -> Iterator[torch.Tensor]:
    tensor = tensors[stored.name]
    yield from tensor.split(1) if tensor.dim() else [tensor]


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    same = one.shape == other.shape and one.dtype == other.dtype
    return same and one.reshape(-1).view(torch.uint8).equal(other.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("max_bytes", [1 << 20, 100, 1])
def test_the_official_reader_reads_what_we_write(tmp_path: Path, seed: int, max_bytes: int) -> None:
    tensors = random_tensors(seed)
    files = shards(described(tensors), max_bytes=max_bytes)
    write_shards(tmp_path, files, lambda stored: row_by_row(tensors, stored))
    weights = Weights(tmp_path)
    assert weights.names() == tensors.keys()
    assert all(equal(weights.read(name), tensor) for name, tensor in tensors.items())
    written = sorted(tmp_path.glob("*.safetensors"))
    assert len(written) == len(files)
    if len(files) == 1:
        assert [path.name for path in written] == [WHOLE] and not (tmp_path / INDEX).exists()
        return
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    for path in written:
        held = load_file(path)
        assert held.keys() == {name for name, file in index["weight_map"].items() if file == path.name}
        assert sum(t.nbytes for t in held.values()) <= max_bytes or len(held) == 1


def test_we_read_what_the_official_writer_writes(tmp_path: Path, seed: int) -> None:
    tensors = random_tensors(seed)
    save_file(tensors, tmp_path / WHOLE)
    stored = StoredWeights(tmp_path)
    assert stored.tensors == {entry.name: entry for entry in described(tensors)}
    for name, tensor in tensors.items():
        if not tensor.dim():
            assert equal(stored.rows(name, 0, 1), tensor)
            continue
        rows = tensor.shape[0]
        assert equal(stored.rows(name, 0, rows), tensor)
        assert equal(stored.rows(name, rows // 2, rows), tensor[rows // 2 :])


def test_a_cut_file_is_refused(tmp_path: Path) -> None:
    save_file(random_tensors(0), tmp_path / WHOLE)
    (tmp_path / WHOLE).write_bytes((tmp_path / WHOLE).read_bytes()[:-1])
    with pytest.raises(UserError, match=rf"{WHOLE} is cut or damaged"):
        StoredWeights(tmp_path)


def test_ranges_cover_every_row_once() -> None:
    for shape in ((), (5,), (3, 1 << 22), (1 << 20, 33), (0, 4)):
        ranges = list(Stored("w", torch.float32, shape).ranges())
        rows = [row for start, stop in ranges for row in range(start, stop)]
        assert rows == list(range(shape[0] if shape else 1))
