"""ModelScope, through its package, which is an extra: listed, checked and renamed into our own cache."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from swiftkit.errors import UserError
from swiftkit.hub.files import (
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
    from modelscope_hub import HubApi  # type: ignore[import-not-found, unused-ignore]

BRANCH = "master"


def cached(repo: str, revision: str | None) -> Fetched | None:
    """A model that was downloaded before, found without a connection; else None."""
    folder = _folder(repo, revision)
    if not folder.is_dir() or missing_files(folder):
        return None
    at = revision or BRANCH
    return Fetched(folder, "modelscope", at, f"{repo} from ModelScope, revision {at}")


def fetch(repo: str, revision: str | None, say: Say) -> Fetched:
    """Download what training needs of a repository, and check it against what ModelScope has on record.

    Args:
        repo: ModelScope's id.
        revision: branch or tag; None is `master`.
        say: receives a sentence about each thing that takes time.

    Raises:
        UserError: the package is not installed, or as `huggingface.ask` and `huggingface.fetch` do.
    """
    at = f"{repo} at revision {revision or BRANCH}"
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise UserError(f"{at}: HF_HUB_OFFLINE is set and the cache has no such model; unset it to download")
    if find_spec("modelscope_hub") is None:
        raise UserError(
            "downloads from ModelScope need its package; install it with `pip install 'swiftkit[modelscope]'`"
        )
    target = _folder(repo, revision)
    with locked(target, say):
        found = cached(repo, revision)
        if found is None:
            _download(repo, revision, target, at, say)
            found = cached(repo, revision)
    if found is None:
        raise UserError(f"{at} lacks {', '.join(missing_files(target))}; choose a repository that has them")
    return found


def _folder(repo: str, revision: str | None) -> Path:
    return cache_dir() / "modelscope" / repo.replace("/", "--") / (revision or BRANCH).replace("/", "--")


def _download(repo: str, revision: str | None, target: Path, at: str, say: Say) -> None:
    from modelscope_hub import HubApi
    from modelscope_hub.errors import HubError  # type: ignore[import-not-found, unused-ignore]

    partial = target.with_name(f".{target.name}.partial")  # a later run goes on with what is there
    try:
        api = HubApi()
        records = _records(api, repo, revision)
        if not any(file.name.endswith(".safetensors") for file in records):
            raise UserError(f"{at} has no safetensors files; choose a repository or revision that has them")
        size = sum(file.size or 0 for file in records)
        need_space(target.parent, size, f"downloading {repo}")
        say(f"downloading {repo} from ModelScope: {len(records)} files, {megabytes(size)}")
        names = [file.name for file in records]
        api.download_repo(repo, "model", revision=revision, local_dir=partial, allow_patterns=names)
    except HubError as error:
        raise UserError(_refusal(repo, at, error)) from None
    for record in records:
        path = partial / record.name
        fault = fault_of(path, record, asked=_page(repo)) if path.exists() else "is missing"
        if fault:
            path.unlink(missing_ok=True)
            raise UserError(f"{at}: the downloaded {record.name} {fault}; it was removed, download it again")
    os.replace(partial, target)


def _records(api: HubApi, repo: str, revision: str | None) -> list[Recorded]:
    files = api.list_repo_files(repo, "model", revision=revision)
    return [Recorded(file.path, file.size, file.sha256) for file in files if wanted(file.path)]


def _page(repo: str) -> str:
    return f"{os.environ.get('MODELSCOPE_ENDPOINT', 'https://modelscope.cn').rstrip('/')}/models/{repo}"


def _refusal(repo: str, at: str, error: Exception) -> str:
    """The sentence for a failure; what the package itself says may repeat addresses and is left out."""
    failed: dict[str, Exception] = getattr(error, "failed_files", None) or {}  # of single files, by name
    statuses = [getattr(fault, "status_code", None) for fault in (error, *failed.values())]
    status = next((status for status in statuses if status is not None), None)
    log_in = "log in with `modelscope login` or the environment variable MODELSCOPE_API_TOKEN"
    if status in (401, 403):
        return f"{at}: access refused (HTTP {status}); accept the terms on {_page(repo)}, and {log_in}"
    if status == 404:
        return (
            f"{at}: ModelScope knows no such model or revision, or it is private; look at {_page(repo)}, "
            f"and for a private one {log_in}"
        )
    if status == 429:
        return f"{at}: ModelScope wants fewer requests (HTTP 429); wait some minutes, or {log_in}"
    if status is not None:
        return f"{at}: ModelScope answered HTTP {status}; run the same command again later"
    faults = ", ".join(f"{name} ({type(fault).__name__})" for name, fault in failed.items())
    return (
        f"{at}: the download from ModelScope broke off at {faults or type(error).__name__}; check the "
        "network and run the same command to go on, files that are whole stay"
    )
