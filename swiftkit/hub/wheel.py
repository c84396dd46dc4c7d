"""A GGUF file inside a wheel of the package index, for machines that reach no hub."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from swiftkit.errors import UserError
from swiftkit.hub.files import Fetched, Say, cache_dir, locked, megabytes, need_space, sha256_of


@dataclass(frozen=True)
class Wheel:
    """A GGUF file inside a wheel of the package index."""

    package: str
    version: str
    file: str  # the end of the GGUF's path in the wheel
    sha256: str  # of the GGUF
    size: int  # of the GGUF, bytes
    precision: str  # "Q4_1"

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


def _gguf_path(wheel: Wheel) -> Path:
    return cache_dir() / "wheels" / f"{wheel.package}-{wheel.version}" / Path(wheel.file).name


def cached(wheel: Wheel) -> Fetched | None:
    """The GGUF of a wheel that was fetched before, or None."""
    path = _gguf_path(wheel)
    if not path.exists() or path.stat().st_size != wheel.size:
        return None
    note = (
        f"weights from the wheel {wheel.requirement}: {wheel.precision} values, not the hub's; "
        "losses and answers differ a little from the hub's model (--model_source hf takes that one)"
    )
    return Fetched(path, "pypi", f"{wheel.package}-{wheel.version}", note)


def fetch(wheel: Wheel, say: Say) -> Fetched:
    """Download a wheel with pip and keep its GGUF.

    Raises:
        UserError: no pip, no such version, no connection, no space, or another file than the one on record.
    """
    target = _gguf_path(wheel)
    with locked(target, say):
        fetched = cached(wheel)
        if fetched is None:
            need_space(target.parent, 2 * wheel.size, f"downloading {wheel.requirement}")
            say(f"downloading {wheel.requirement} from the package index (about {megabytes(wheel.size)})")
            partial = target.parent / "partial"
            shutil.rmtree(partial, ignore_errors=True)  # left by a run that was killed
            partial.mkdir()
            try:
                os.replace(_unpack(wheel, _pip_download(wheel, partial)), target)
            finally:
                shutil.rmtree(partial)
            fetched = cached(wheel)
    assert fetched is not None
    return fetched


def _pip_download(wheel: Wheel, folder: Path) -> Path:
    if find_spec("pip") is None:
        raise UserError(
            f"{wheel.requirement} is fetched with pip, which {sys.executable} lacks; "
            "add it with `uv pip install pip` or `python -m ensurepip`"
        )
    # Without --no-deps pip would build the wheel's dependencies, which takes minutes and is not needed.
    arguments = ["download", "--no-deps", "--only-binary", ":all:", "--no-input", "--progress-bar", "off"]
    command = [sys.executable, "-m", "pip", *arguments, "--dest", str(folder), wheel.requirement]
    done = subprocess.run(command, capture_output=True, text=True)
    found = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(found) != 1:
        complaints = re.findall(r"^ERROR: (.*)$", done.stderr, flags=re.MULTILINE) or [done.stderr.strip()]
        raise UserError(
            f"pip could not download {wheel.requirement}: {' '.join(complaints)}\n"
            "Check the package index (`pip config list`, PIP_INDEX_URL) and the network, "
            "or take the model from Hugging Face with --model_source hf."
        )
    return found[0]


def _unpack(wheel: Wheel, archive: Path) -> Path:
    """The GGUF of a wheel, copied beside it and checked against the size and sha256 on record."""
    target = archive.parent / Path(wheel.file).name
    try:
        with zipfile.ZipFile(archive) as opened:
            inside = [name for name in opened.namelist() if name.endswith(wheel.file)]
            if len(inside) != 1:
                raise UserError(f"{wheel.requirement} has no file {wheel.file}; is the version right?")
            with opened.open(inside[0]) as packed, target.open("wb") as plain:
                shutil.copyfileobj(packed, plain, length=1 << 20)
    except zipfile.BadZipFile as error:
        raise UserError(f"{archive.name} is damaged ({error}); run the same command again") from None
    size, sha256 = target.stat().st_size, sha256_of(target)
    if (size, sha256) != (wheel.size, wheel.sha256):
        raise UserError(
            f"{wheel.file} in {wheel.requirement} is not the file on record: {size} bytes with sha256 "
            f"{sha256}, not {wheel.size} bytes with {wheel.sha256}; it was removed. "
            "Check which package index serves it (`pip config list`)."
        )
    return target
