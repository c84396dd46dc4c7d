"""What was made of data before: folders of arrays, named by a hash of all that they depend on.

An entry is written beside its place and renamed, so that one with its final name is whole; it is checked when
it is opened, and made again where it is not what was written.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from swiftkit.data.arrays import INDEX, Arrays, DamagedError, open_arrays, size_of
from swiftkit.data.read import files_of_source, parse_source
from swiftkit.data.read_hub import hub_fingerprint
from swiftkit.errors import UserError
from swiftkit.hub.files import Say, cache_dir, locked

LIMIT = "SWIFTKIT_DATA_CACHE_GB"
DEFAULT_LIMIT = 50.0  # GB of all entries together
DRAFT = ".draft-"
DRAFTS_LIVE = 24 * 3600  # seconds; an older draft belongs to a build that was killed
ELSEWHERE = "point SWIFTKIT_CACHE to another disk, or give --load_from_cache_file false"
LIBRARIES = ("jinja2", "tokenizers", "transformers")

Build = Callable[[Path], None]


def data_folder() -> Path:
    """Where prepared data are kept unless somebody says otherwise."""
    return cache_dir() / "data"


@dataclass(frozen=True, slots=True)
class Entry:
    """An opened folder of arrays.

    Attributes:
        arrays: mapped into memory.
        facts: what its builder wrote beside them.
        found: it was there already.
        size: bytes on the disk.
    """

    arrays: Arrays
    facts: dict[str, Any]
    found: bool
    size: int


@dataclass(frozen=True, slots=True)
class Sources:
    """What data sets hold, without their rows.

    Attributes:
        contents: for each source the names and hashes of its files, or a hub's fingerprint; JSON values.
        stamps: size and time of change of each file, from before its content was read.
    """

    contents: list[Any]
    stamps: dict[Path, tuple[int, int]]

    def check_unchanged(self) -> None:
        """Raises UserError: a file is no longer the one whose hash was taken."""
        for path, stamp in self.stamps.items():
            if not path.is_file() or _stamp(path) != stamp:
                raise UserError(f"{path} was changed while it was read; start again when it is whole")


def look_at(sources: Sequence[str], *, streaming: bool) -> Sources | None:
    """The content of sources by its hash; None where rows are streamed, or a hub does not say what they are.

    Raises:
        UserError: a source does not exist.
    """
    contents: list[Any] = []
    stamps: dict[Path, tuple[int, int]] = {}
    for written in sources:
        files = files_of_source(parse_source(written))
        if files is None:
            fingerprint = None if streaming else hub_fingerprint(parse_source(written).name)
            if fingerprint is None:
                return None
            contents.append([written, fingerprint])
            continue
        stamps |= {path: _stamp(path) for path, _ in files}
        contents.append([written, [[name, _sha256(path)] for path, name in files]])
    return Sources(contents, stamps)


def key_of(value: Any) -> str:
    """A name for all that a result depends on: JSON values, and with them this room's code and libraries."""
    written = json.dumps([_code(), value], sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(written.encode()).hexdigest()[:32]


class DataCache:
    """Entries in one folder, of which those that were not used for longest go when there are too many.

    Args:
        folder: of the entries; None keeps none, and each is built for this run alone.
        say: told when another process has to be waited for.

    Raises:
        UserError: the limit of its size is no number.
    """

    def __init__(self, folder: Path | None, say: Say) -> None:
        self.folder = folder
        self._say = say
        self._limit = _limit()

    def obtain(self, name: str, build: Build) -> Entry:
        """The entry of that name, built where there is none, or none that is whole.

        Of several processes that want it at once one builds, and the others wait.

        Args:
            name: from `key_of`.
            build: writes a folder of arrays.
        """
        if self.folder is None:
            return _for_this_run(build)
        target = self.folder / name
        if found := _opened(target):
            return found
        with _writing(self.folder, mend=ELSEWHERE), locked(target, self._say):
            if found := _opened(target):  # made by the process that was waited for
                return found
            with _draft(f".{name}{DRAFT}", self.folder) as draft:
                build(draft)
                _publish(draft, target)
            arrays, facts = open_arrays(target, check=False)
            size = size_of(target)
        self._make_room(target)
        return Entry(arrays, facts, found=False, size=size)

    def _make_room(self, newest: Path) -> None:
        """Removes what was not used for longest until the rest is within the limit."""
        assert self.folder is not None
        used: list[tuple[float, Path]] = []
        for entry in self.folder.iterdir():
            try:
                if entry.name.startswith("."):
                    if DRAFT in entry.name and time.time() - _touched(entry) > DRAFTS_LIVE:
                        shutil.rmtree(entry, ignore_errors=True)
                elif entry != newest:
                    used.append(((entry / INDEX).stat().st_mtime, entry))
            except FileNotFoundError:
                continue  # another process has removed it
        room = self._limit - size_of(newest)
        for _, entry in sorted(used, reverse=True):
            try:
                room -= size_of(entry)
                if room < 0:
                    _remove(entry)
            except FileNotFoundError:
                continue  # as above


def _opened(target: Path) -> Entry | None:
    if not target.is_dir():
        return None
    try:
        arrays, facts = open_arrays(target)
        if os.access(target / INDEX, os.W_OK):  # somebody else's may only be read
            os.utime(target / INDEX)
        return Entry(arrays, facts, found=True, size=size_of(target))
    except (DamagedError, FileNotFoundError):
        return None


def _for_this_run(build: Build) -> Entry:
    """Builds what nobody else will see: mapped files live on without their names."""
    parent = Path(tempfile.gettempdir())
    with _writing(parent, mend="point TMPDIR to another disk"), _draft("swiftkit-", parent) as folder:
        build(folder)
        arrays, facts = open_arrays(folder, check=False)
        return Entry(arrays, facts, found=False, size=size_of(folder))


@contextmanager
def _writing(folder: Path, *, mend: str) -> Iterator[None]:
    """Says what to do when a folder cannot be written."""
    try:
        yield
    except OSError as failure:
        raise UserError(
            f"{folder} cannot be written ({failure.strerror or failure}); make room, or {mend}"
        ) from failure


@contextmanager
def _draft(prefix: str, parent: Path) -> Iterator[Path]:
    """A new folder, which is removed in the end if it still has its first name."""
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _touched(draft: Path) -> float:
    """When something was last written into a folder."""
    return max(path.stat().st_mtime for path in (draft, *draft.iterdir()))


def _publish(draft: Path, target: Path) -> None:
    """Gives a whole folder its final name, in the place of a damaged one."""
    if target.exists():
        _remove(target)
    draft.rename(target)


def _remove(entry: Path) -> None:
    """Takes an entry away at once, then its files: none is ever half there under its name."""
    grave = Path(tempfile.mkdtemp(prefix=f".{entry.name}{DRAFT}", dir=entry.parent))
    entry.rename(grave / "entry")
    shutil.rmtree(grave, ignore_errors=True)


def told(entries: Sequence[Entry], folder: Path) -> str:
    """Where the data came from, for the header of a run."""
    size = f"{sum(entry.size for entry in entries) / 1e6:,.1f} MB"
    if all(entry.found for entry in entries):
        return f"from cache: {size} in {folder}"
    if entries[0].found:
        return f"tokens from cache, packed anew: {size} in {folder}"
    return f"written for the next start: {size} in {folder}"


def _limit() -> float:
    """Bytes that all entries may have together."""
    written = os.environ.get(LIMIT)
    try:
        return float(written or DEFAULT_LIMIT) * 1e9
    except ValueError:
        raise UserError(f"{LIMIT} is a number of gigabytes, not {written!r}") from None


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as failure:
        raise UserError(f"{path} cannot be read: {failure.strerror or failure}") from None


@cache
def _code() -> list[str]:
    """What turns rows into tokens: this room's source, Python, and the libraries that render and tokenise."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return [digest.hexdigest(), platform.python_version(), *map(_version, LIBRARIES)]


def _version(library: str) -> str:
    try:
        return f"{library} {version(library)}"
    except PackageNotFoundError:
        return f"{library} of an unknown version"
