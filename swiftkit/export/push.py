"""`--push_to_hub`: a merged model to the Hugging Face hub. The token is never in a message."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from swiftkit.errors import UserError
from swiftkit.hub import Say


@dataclass(frozen=True)
class Pushing:
    """A repository that may be written to.

    Args:
        repo: owner/name.
        private: whether it shall be, when it is made now.
    """

    repo: str
    private: bool

    def upload(self, folder: Path, say: Say) -> None:
        """Make the repository where it is missing, and send the folder as one commit.

        Raises:
            UserError: the hub refuses, or the connection breaks; the folder stays as it is.
        """
        from huggingface_hub import HfApi

        api = HfApi()
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        say(f"pushing   {folder} to {self.repo}, {size / 1e9:,.2f} GB")
        with _told(
            self.repo, mend=f"the merged model stands in {folder}; `hf upload {self.repo} {folder}` sends it"
        ):
            api.create_repo(self.repo, private=self.private, exist_ok=True)
            api.upload_folder(
                repo_id=self.repo, folder_path=folder, commit_message="Merged model, made with swiftkit"
            )
        say(f"pushed    {_address(self.repo)}")


def prepare(repo: str, *, private: bool) -> Pushing:
    """Ask, before the work, whether there is a token that may write there.

    Raises:
        UserError: not a hub id, no token, one that is refused or only reads, somebody else's name, or a
            public repository where a private one is wanted.
    """
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(repo)
    except HFValidationError:
        raise UserError(f"--push_to_hub {repo} is no hub id, which reads owner/name") from None
    if not get_token():
        raise UserError("--push_to_hub needs a token: `hf auth login`, or the environment variable HF_TOKEN")
    api = HfApi()
    with _told(repo, mend="nothing was merged yet"):
        me = api.whoami()
    if me.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise UserError(f"--push_to_hub {repo}: the token that is set may only read; make one that may write")
    repo = repo if "/" in repo else f"{me['name']}/{repo}"
    owners = [me["name"], *(org["name"] for org in me.get("orgs", ()))]
    if repo.partition("/")[0] not in owners:
        raise UserError(
            f"--push_to_hub {repo}: the token that is set is of {me['name']}, who writes for "
            f"{', '.join(owners)}; take one of these as the owner, or another token"
        )
    try:
        with _told(repo, mend="nothing was merged yet"):
            there = api.model_info(repo)
    except RepositoryNotFoundError:
        return Pushing(repo, private)
    if private and not there.private:
        raise UserError(
            f"--push_to_hub {repo} exists and is public, so --private would not hold; choose another name, "
            "or make it private on the hub first"
        )
    return Pushing(repo, private)


def _address(repo: str) -> str:
    from huggingface_hub import constants

    return f"{constants.ENDPOINT}/{repo}"


@contextmanager
def _told(repo: str, *, mend: str) -> Iterator[None]:
    """Refusals and broken connections as one sentence: addresses, headers and bodies are left out."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (  # type: ignore[attr-defined]
        HTTPError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    try:
        yield
    except OfflineModeIsEnabled:
        raise UserError(f"--push_to_hub {repo}: HF_HUB_OFFLINE is set; unset it to push ({mend})") from None
    except RepositoryNotFoundError:
        raise
    except (HTTPError, OSError) as error:
        response = getattr(error, "response", None)
        if response is None:
            raise UserError(
                f"--push_to_hub {repo}: {constants.ENDPOINT} cannot be reached ({type(error).__name__}); "
                f"{mend}"
            ) from None
        status = response.status_code
        why = {
            401: "the token that is set is not accepted; `hf auth login` again",
            403: "the token that is set may not write there; give it write access to this owner",
            409: "the repository is being changed by somebody else; try again",
            413: "a file is larger than the hub takes; make --max_shard_size smaller",
            429: "it wants fewer requests; wait some minutes",
        }.get(status, "a fault on its side" if status >= 500 else "unexpected")
        raise UserError(
            f"--push_to_hub {repo}: {constants.ENDPOINT} answered HTTP {status}: {why} ({mend})"
        ) from None
