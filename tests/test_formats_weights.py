"""A folder of safetensors: whole, in shards, cut, or not there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from swiftkit.errors import UserError
from swiftkit.formats.weights import INDEX, Weights
from tests import tiny


def sharded(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {f"t{i}": torch.randn(i + 1, 3) for i in range(4)}
    files = {name: f"model-0000{i % 2 + 1}-of-00002.safetensors" for i, name in enumerate(tensors)}
    for file in set(files.values()):
        save_file({name: t for name, t in tensors.items() if files[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return tensors


def test_shards_are_one_set_of_tensors(tmp_path: Path) -> None:
    tensors = sharded(tmp_path)
    save_file({"t0": torch.zeros(9)}, tmp_path / "not-in-the-index.safetensors")
    weights = Weights(tmp_path)
    assert weights.names() == tensors.keys()
    for name, tensor in tensors.items():
        assert weights.shape(name) == tuple(tensor.shape)
        assert torch.equal(weights.read(name), tensor)


def test_a_sharded_model_builds_like_a_whole_one(tmp_path: Path) -> None:
    from swiftkit.engine.build import build_model

    reference = tiny.make("llama", tmp_path / "whole")
    reference.save_pretrained(tmp_path / "parts", max_shard_size="100KB")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 2
    whole, parts = (
        build_model(tmp_path / name, dtype=torch.float32, device=torch.device("cpu")).state_dict()
        for name in ("whole", "parts")
    )
    assert whole.keys() == parts.keys() and all(torch.equal(whole[k], parts[k]) for k in whole)


def test_a_missing_shard_is_named_with_the_mend(tmp_path: Path) -> None:
    sharded(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    rule = r"lacks model-00002-of-00002\.safetensors \(1 of 2 weight files are missing\); download"
    with pytest.raises(UserError, match=rule):
        Weights(tmp_path)


@pytest.mark.parametrize("text", ["{", '{"metadata": {}}', "[]"])
def test_a_damaged_index_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(UserError, match=rf"{INDEX} .*damaged.*download"):
        Weights(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 20, 200, -1])
def test_a_cut_file_is_named_with_the_mend(tmp_path: Path, keep: int) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"t": torch.randn(20, 20)}, file)
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(UserError, match=r"model\.safetensors is cut or damaged \(.*\); download"):
        Weights(tmp_path)


def test_the_model_s_own_file_wins_over_others_beside_it(tmp_path: Path) -> None:
    save_file({"t": torch.ones(2)}, tmp_path / "model.safetensors")
    save_file({"t": torch.zeros(2), "u": torch.zeros(2)}, tmp_path / "zz-consolidated.safetensors")
    weights = Weights(tmp_path)
    assert weights.names() == {"t"} and weights.read("t").tolist() == [1, 1]


def test_a_pickle_is_never_loaded(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no \*\.safetensors$"):
        Weights(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"anything")
    with pytest.raises(UserError, match=r"pytorch_model\.bin is a pickle, which is never loaded"):
        Weights(tmp_path)
