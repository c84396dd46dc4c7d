"""Tensors in parts on disk: written by some processes, read by others, complete or without a name."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.multiprocessing.spawn import ProcessExitedException

from swiftkit.errors import UserError
from swiftkit.formats.parts import CONTENTS, Part, contents, read_parts, write_parts
from swiftkit.parallel.shards import Shard, evenly
from tests.ranks import on_ranks

SHAPES = {"matrix": (7, 5), "long": (40,), "odd": (1, 3), "cube": (5, 2, 3)}
TYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.int64)


def wholes(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        f"{name}/{dtype}": torch.randint(0, 250, shape, generator=generator).to(dtype)
        for name, shape in SHAPES.items()
        for dtype in TYPES
    }


def cut(whole: dict[str, Tensor], size: int, rank: int, dim: int = 0) -> dict[str, Part]:
    """Each tensor's part along a dimension; those named `long` stay whole."""
    parts = {}
    for name, tensor in whole.items():
        if name.startswith("long"):
            parts[name] = Part(tensor.clone())
            continue
        shard = Shard(dim, (evenly(tensor.shape[dim], size, rank),), tensor.shape[dim])
        parts[name] = Part(shard.take(tensor), shard)
    return parts


def empty(parts: dict[str, Part]) -> dict[str, Part]:
    return {name: Part(torch.zeros_like(part.tensor), part.shard) for name, part in parts.items()}


def write(folder: Path, seed: int) -> float:
    """Write in a thread while the training's group goes on."""
    own = dist.new_group(backend="gloo")
    parts = cut(wholes(seed), dist.get_world_size(), dist.get_rank())
    with ThreadPoolExecutor(1) as writer:
        pending = writer.submit(write_parts, folder, parts, own)
        value = torch.ones(())
        for _ in range(50):
            dist.all_reduce(value)
        pending.result()
    return float(value)


def check(folder: Path, whole: dict[str, Tensor], size: int, dim: int = 0) -> None:
    for rank in range(size):
        wanted = cut(whole, size, rank, dim)
        found = empty(wanted)
        read_parts(folder, found)
        for name, part in wanted.items():
            assert torch.equal(found[name].tensor, part.tensor), (name, size, rank)


def test_other_parts_are_read_than_were_written(tmp_path: Path, seed: int) -> None:
    """By two; read by one, three, five (of which some have nothing), and in columns."""
    folder = tmp_path / "parts"
    assert on_ranks(write, 2, tmp_path / "ranks", folder, seed) == [2.0**50] * 2
    whole = wholes(seed)
    assert contents(folder) == {name: (tuple(t.shape), t.dtype) for name, t in whole.items()}
    for size in (1, 3, 5):
        check(folder, whole, size)
    check(folder, {name: tensor for name, tensor in whole.items() if "cube" in name}, 2, dim=1)
    several = Shard(0, ((5, 7), (1, 3)), 7)
    parts = {name: Part(several.take(t), several) for name, t in whole.items() if "matrix" in name}
    found = empty(parts)
    read_parts(folder, found)
    assert all(torch.equal(found[name].tensor, part.tensor) for name, part in parts.items())


def test_torch_reads_the_folder_and_no_file_is_a_pickle(tmp_path: Path, seed: int) -> None:
    folder = tmp_path / "parts"
    on_ranks(write, 2, tmp_path / "ranks", folder, seed)
    assert {path.suffix for path in folder.iterdir()} == {".safetensors", ".json"}
    whole = wholes(seed)
    found = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
    dcp.load(found, storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=True)
    assert all(torch.equal(found[name], tensor) for name, tensor in whole.items())


def write_and_die(folder: Path, seed: int) -> None:
    """The second process is killed once it has written some bytes of its file."""
    if dist.get_rank() == 1:
        import safetensors.torch as saved

        def die(*_: object, **__: object) -> bytes:
            os.kill(os.getpid(), signal.SIGKILL)
            return b""

        saved.save = die
    write_parts(folder, cut(wholes(seed), 2, dist.get_rank()), dist.group.WORLD)


def test_what_not_all_wrote_has_no_name(tmp_path: Path, seed: int) -> None:
    folder = tmp_path / "parts"
    with pytest.raises(ProcessExitedException, match="SIGKILL"):
        on_ranks(write_and_die, 2, tmp_path / "ranks", folder, seed)
    assert not folder.exists()


def write_nowhere(folder: Path, seed: int) -> str:
    """The second process finds the disk full."""
    if dist.get_rank() == 1:
        import safetensors.torch as saved

        def full(*_: object, **__: object) -> bytes:
            raise OSError(28, "No space left on device")

        saved.save = full
    try:
        write_parts(folder, cut(wholes(seed), 2, dist.get_rank()), dist.group.WORLD)
    except OSError as failure:
        return str(failure)
    return "written"


def test_one_processs_failure_is_everyones(tmp_path: Path, seed: int) -> None:
    words = on_ranks(write_nowhere, 2, tmp_path / "ranks", tmp_path / "parts", seed)
    assert all("No space left on device" in word for word in words), words
    assert [path.name for path in tmp_path.iterdir()] == ["ranks"]


def test_damage_is_named(tmp_path: Path, seed: int) -> None:
    folder = tmp_path / "parts"
    on_ranks(write, 2, tmp_path / "ranks", folder, seed)
    parts = cut(wholes(seed), 1, 0)
    with pytest.raises(UserError, match=r"has for long/.* nothing, the run asks"):
        read_parts(folder, {"long/more": Part(torch.zeros(3))})
    with pytest.raises(UserError, match=r"\(7, 5\).*the run asks for \(\(9, 5\)"):
        read_parts(folder, {"matrix/torch.float32": Part(torch.zeros(9, 5))})
    file = sorted(json.loads((folder / CONTENTS).read_text())["files"])[0]
    content = (folder / file).read_bytes()
    (folder / file).write_bytes(content[:-1])
    with pytest.raises(UserError, match=f"{file} is missing or cut"):
        read_parts(folder, empty(parts))
    (folder / CONTENTS).unlink()
    with pytest.raises(UserError, match=r"parts\.json is missing or damaged"):
        read_parts(folder, empty(parts))
