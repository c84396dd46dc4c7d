"""`--gguf`: how llama.cpp's converter is found and called, and what is said where it is not there.

The converter here is a stand-in that writes a GGUF of the folder it is given; its command line and its faults
are what is tested. With a real checkout of llama.cpp in LLAMA_CPP the last test runs that.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from swiftkit.errors import UserError
from swiftkit.export import gguf

# Reads the weights' names, writes a GGUF with as many tensors, and its own arguments beside it.
STAND_IN = """
import json, sys
from pathlib import Path
import gguf, numpy
from safetensors import safe_open

model, out = Path(sys.argv[1]), Path(sys.argv[sys.argv.index("--outfile") + 1])
Path(__file__).with_name("asked.json").write_text(json.dumps(sys.argv[1:]))
writer = gguf.GGUFWriter(out, "llama")
with safe_open(model / "model.safetensors", framework="np") as file:
    for name in file.keys():
        writer.add_tensor(name, numpy.zeros(4, numpy.float32))
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that LLAMA_CPP names, with a converter in it."""
    folder = tmp_path / "llama.cpp"
    folder.mkdir()
    (folder / gguf.SCRIPT).write_text(STAND_IN)
    monkeypatch.setenv(gguf.HOME, str(folder))
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    import torch
    from safetensors.torch import save_file

    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a": torch.zeros(3), "b": torch.zeros(2)}, folder / "model.safetensors")
    return folder


def test_the_converter_is_called_with_its_own_words(home: Path, model: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    out = tmp_path / "tuned.gguf"
    gguf.prepare(str(out), "bf16").convert(model, lines.append)
    asked = json.loads((home / "asked.json").read_text())
    assert asked[0] == str(model) and asked[1] == "--outfile" and asked[3:] == ["--outtype", "bf16"]
    assert out.is_file() and "2 tensors" in lines[-1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["llama.cpp", "model", "tuned.gguf"]


@pytest.mark.parametrize(
    ("script", "says"),
    [
        (
            "import sys; sys.exit('Model FooForCausalLM is not supported')",
            "exit code 1: Model FooForCausalLM",
        ),
        ("pass", "wrote no file"),
        ("import sys; open(sys.argv[3], 'wb').write(b'GGUF half')", "no whole GGUF file"),
    ],
    ids=["refuses", "nothing", "half"],
)
def test_a_converter_that_fails_leaves_the_model_and_no_file(
    home: Path, model: Path, tmp_path: Path, script: str, says: str
) -> None:
    (home / gguf.SCRIPT).write_text(script)
    converter = gguf.prepare(str(tmp_path / "tuned.gguf"), "q8_0")
    with pytest.raises(UserError, match=says):
        converter.convert(model, lambda line: None)
    assert (model / "model.safetensors").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["llama.cpp", "model"]


def test_without_a_converter_the_message_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(gguf.HOME, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        UserError, match=r"git clone https://github.com/ggml-org/llama.cpp, then set LLAMA_CPP"
    ):
        gguf.prepare(str(tmp_path / "tuned.gguf"), "q8_0")
    monkeypatch.setenv(gguf.HOME, str(tmp_path))
    with pytest.raises(UserError, match=r"which has no convert_hf_to_gguf.py"):
        gguf.prepare(str(tmp_path / "tuned.gguf"), "q8_0")


def test_one_on_path_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(gguf.HOME, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    script = tmp_path / gguf.SCRIPT
    script.write_text("pass")
    script.chmod(0o755)
    assert gguf.prepare(str(tmp_path / "tuned.gguf"), "q8_0").script == script


@pytest.mark.parametrize(
    ("name", "says"),
    [("tuned.bin", "end in .gguf"), ("nowhere/tuned.gguf", "is no folder"), ("here.gguf", "exists already")],
)
def test_what_cannot_be_made_is_refused_first(home: Path, tmp_path: Path, name: str, says: str) -> None:
    (tmp_path / "here.gguf").touch()
    with pytest.raises(UserError, match=says):
        gguf.prepare(str(tmp_path / name), "q8_0")


@pytest.mark.slow
def test_the_real_converter(smollm2: Path, tmp_path: Path) -> None:
    """SmolLM2 to GGUF by llama.cpp's own script; what we read back from it is what went in."""
    import torch

    from swiftkit.formats.gguf import convert
    from swiftkit.formats.weights import Weights

    home = os.environ.get(gguf.HOME)
    if not home or not (Path(home) / gguf.SCRIPT).is_file():
        pytest.skip("LLAMA_CPP names no checkout of llama.cpp")
    gguf.prepare(str(tmp_path / "model.gguf"), "bf16").convert(smollm2, print)
    convert(tmp_path / "model.gguf", tmp_path / "back")
    before, after = Weights(smollm2), Weights(tmp_path / "back")
    assert before.names() == after.names()
    for name in before.names():
        assert torch.equal(before.read(name), after.read(name)), name
