"""Hugging Face: what huggingface_hub leaves out is said, checked and locked here.

The files go to huggingface_hub's own cache (HF_HOME), where every other program finds them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swiftkit.errors import UserError
from swiftkit.hub.files import (
    ALLOW,
    IGNORE,
    Fetched,
    Recorded,
    Say,
    cache_dir,
    fault_of,
    locked,
    megabytes,
    missing_files,
    need_space,
    wanted,
)

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo


def cached(repo: str, revision: str | None) -> Fetched | None:
    """A complete and checked snapshot of the local cache, found without a connection; else None."""
    folder = _snapshot_folder(repo, revision)
    if folder is None or _lacking(repo, folder) or not _log(repo, folder.name).get("checked", True):
        return None
    return _snapshot(repo, folder)


def ask(repo: str, revision: str | None, *, timeout: float) -> ModelInfo:
    """What the hub knows about a repository: one cheap request, and the place where refusals are told.

    Raises:
        UserError: no access, no such repository or revision, no connection, or an answer that is no hub's.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HFValidationError, OfflineModeIsEnabled

    at = f"{repo} at revision {revision or 'main'}"
    try:
        return HfApi().model_info(repo, revision=revision, timeout=timeout, files_metadata=True)
    except HFValidationError:
        raise UserError(f"{repo} is no hub id, which reads owner/name") from None
    except OfflineModeIsEnabled:
        raise UserError(_offline(at, repo, revision)) from None
    except _network_errors() as error:
        response = getattr(error, "response", None)
        if response is not None:
            raise UserError(_refusal(repo, at, error)) from None
        raise UserError(
            f"{at}: {constants.ENDPOINT} cannot be reached ({type(error).__name__}); "
            "check the network, or set HF_ENDPOINT to a mirror"
        ) from None
    except ValueError:
        raise UserError(
            f"{at}: {constants.ENDPOINT} gave no hub's answer (a login page?); check the network"
        ) from None


def fetch(repo: str, revision: str | None, info: ModelInfo, say: Say) -> Fetched:
    """Download what training needs of a repository, and check it against what the hub has on record.

    Args:
        repo: the hub id.
        revision: branch, tag or commit; None is the hub's main branch.
        info: the answer of `ask`.
        say: receives a sentence about each thing that takes time.

    Raises:
        UserError: no weights to load, no space, no access, a broken connection, or files that are damaged.
    """
    records = {file.name: file for file in _records(info)}
    if not any(name.endswith(".safetensors") for name in records):
        raise UserError(f"{repo} has no safetensors files; choose a repository or revision that has them")
    commit = str(info.sha)
    with locked(_log_folder(repo), say):
        before = _snapshot_folder(repo, commit)
        absent = [name for name in records if before is None or not (before / name).exists()]
        if absent:  # else made meanwhile by another process, or known under another revision
            _announce(repo, [records[name] for name in absent], say)
        # Until all is checked the log says so: a run that is killed leaves nothing that a later one trusts.
        suspects = absent if _log(repo, commit).get("checked", True) else list(records)
        _write_log(repo, commit, records, checked=False)
        folder = _download(repo, revision, commit, absent)
        lost = [name for name in records if not (folder / name).exists()]
        if folder.name != commit or lost:  # moved, or a lost connection: huggingface_hub gives what it has
            why = f"it lacks {', '.join(lost)}" if lost else "the branch moved to another commit meanwhile"
            raise UserError(f"{repo}: the download is not whole, {why}; run the same command again")
        for name in suspects:
            _check_file(repo, folder / name, records[name])
        _write_log(repo, commit, records, checked=True)
    return _snapshot(repo, folder)


def _records(info: ModelInfo) -> Iterator[Recorded]:
    for file in info.siblings or []:
        if wanted(file.rfilename):
            sha256 = file.lfs.sha256 if file.lfs else None
            yield Recorded(file.rfilename, file.size, sha256, None if file.lfs else file.blob_id)


def _announce(repo: str, absent: list[Recorded], say: Say) -> None:
    from huggingface_hub import constants

    size = sum(file.size or 0 for file in absent)
    need_space(Path(constants.HF_HUB_CACHE), size, f"downloading {repo}")
    say(f"downloading {repo} from Hugging Face: {len(absent)} files, {megabytes(size)}")


def _download(repo: str, revision: str | None, commit: str, absent: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import FileMetadataError

    at = f"{repo} at {revision or 'main'}, commit {commit}"
    try:
        # By the name that was asked for, not by commit: so the cache learns what the name stands for.
        return Path(snapshot_download(repo, revision=revision, allow_patterns=ALLOW, ignore_patterns=IGNORE))
    except _network_errors() as error:
        causes = list(_causes(error))
        answered = next((cause for cause in causes if getattr(cause, "response", None) is not None), None)
        if answered is not None:
            raise UserError(_refusal(repo, at, answered)) from None
        unrecorded = any(isinstance(cause, FileMetadataError) for cause in causes)
        page = _web_page(repo, commit, absent) if unrecorded else ""
        broken = f"{at}: the download broke off ({_reason(error)}); run the same command to go on"
        raise UserError(page or f"{broken}, files that are whole stay") from None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """A failure and what it came from: huggingface_hub wraps refusals of single files."""
    while error is not None:
        yield error
        error = error.__cause__


def _web_page(repo: str, commit: str, names: Sequence[str]) -> str:
    """What to say when a network answers with its own pages; empty if it does not."""
    from huggingface_hub import get_session, hf_hub_url
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    for name in names:
        url = hf_hub_url(repo, name, revision=commit)
        try:
            answer = get_session().head(url, headers=build_hf_headers(), follow_redirects=True)
        except _network_errors():
            return ""
        if answer.headers.get("content-type", "").startswith("text/html"):
            kind = "is not JSON but" if name.endswith(".json") else "is"
            return f"{repo}: {name} {kind} a web page (asked {url}); does the network want a login?"
    return ""


# ---- what was downloaded, and whether it was checked -----------------------------------------------------


def _log_folder(repo: str) -> Path:
    return cache_dir() / "hub" / repo.replace("/", "--")


def _log(repo: str, commit: str) -> dict[str, Any]:
    """The files of a snapshot, and whether all were checked; empty for another program's download."""
    path = _log_folder(repo) / f"{commit}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _write_log(repo: str, commit: str, files: Iterable[str], *, checked: bool) -> None:
    path = _log_folder(repo) / f"{commit}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({"checked": checked, "files": sorted(files)}), encoding="utf-8")
    os.replace(partial, path)


def _lacking(repo: str, folder: Path) -> list[str]:
    """The files that a snapshot lacks, by the log of its download where there is one."""
    absent = [name for name in _log(repo, folder.name).get("files", ()) if not (folder / name).exists()]
    return absent or missing_files(folder)


def _check_file(repo: str, path: Path, record: Recorded) -> None:
    """Refuse, and take out of the cache, a downloaded file that is not what the hub has on record."""
    from huggingface_hub import constants

    fault = fault_of(path, record, asked=f"{constants.ENDPOINT}/{repo}")
    if fault:
        path.resolve().unlink()
        path.unlink(missing_ok=True)
        raise UserError(f"{repo}: the downloaded {path.name} {fault}; it was removed, download it again")


# ---- the local cache -------------------------------------------------------------------------------------


def _snapshot_folder(repo: str, revision: str | None) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repo, revision=revision, local_files_only=True, allow_patterns=[]))
    except LocalEntryNotFoundError:
        return None


def _snapshot(repo: str, folder: Path) -> Fetched:
    return Fetched(folder, "hf", folder.name, f"{repo} from Hugging Face, commit {folder.name[:12]}")


# ---- refusals: response bodies, headers and tokens are never repeated -------------------------------------


def _network_errors() -> tuple[type[Exception], ...]:
    # The base class comes from httpx or httpx2, whichever this huggingface_hub is built on.
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    return HTTPError, OSError


def _reason(error: Exception) -> str:
    # Messages of HTTP errors carry addresses, and those of a CDN carry signatures.
    return getattr(error, "strerror", None) or type(error).__name__


def _offline(at: str, repo: str, revision: str | None) -> str:
    folder = _snapshot_folder(repo, revision)
    lacks = ", ".join(_lacking(repo, folder)) if folder else "every file"
    state = f"the cache lacks {lacks}" if lacks else "its last download broke off before it was checked"
    return f"{at}: HF_HUB_OFFLINE is set and {state}; unset it to download"


def _refusal(repo: str, at: str, error: BaseException) -> str:
    """The sentence for an answer that is not a success."""
    from huggingface_hub import constants, get_token
    from huggingface_hub.errors import GatedRepoError, RevisionNotFoundError

    status, page = error.response.status_code, f"{constants.ENDPOINT}/{repo}"  # type: ignore[attr-defined]
    sent = "the token that is set was sent" if get_token() else "no token is set"
    log_in = f"log in with `hf auth login` or the environment variable HF_TOKEN ({sent})"
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
    if status == 416:
        return f"{at}: a broken-off file could not be gone on with (HTTP 416); run the same command again"
    if status == 429:
        return f"{at}: {constants.ENDPOINT} wants fewer requests (HTTP 429); wait some minutes, or {log_in}"
    fault = "a fault on its side" if status >= 500 else "unexpected"
    return f"{at}: {constants.ENDPOINT} answered HTTP {status}, {fault}; run the same command again later"
