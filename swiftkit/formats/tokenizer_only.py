"""A model's tokenizer without its weights: what looking at rows needs."""

from __future__ import annotations

from pathlib import Path

from swiftkit import hub
from swiftkit.errors import UserError
from swiftkit.formats.named import locate, open_model
from swiftkit.hub import huggingface
from swiftkit.hub.files import Recorded, fault_of, wanted
from swiftkit.hub.location import PATIENT_SECONDS

WEIGHTS = (".safetensors", ".safetensors.index.json")


def tokenizer_folder(
    name: str, *, source: hub.Source = "auto", revision: str | None = None, say: hub.Say = print
) -> Path:
    """A folder with tokenizer, chat template and config of a model.

    Of a model on Hugging Face that is not here yet, only these files are fetched. Of other places the whole
    model is.

    Args:
        name: of the registry, a hub id, or a folder, which needs no weights.
        source: as for `hub.fetch`.
        revision: as for `hub.fetch`.
        say: as for `hub.fetch`.

    Raises:
        UserError: as `open_model` does.
    """
    where = locate(name)
    if where.folder is not None and (where.folder / "tokenizer.json").is_file():
        return where.folder
    elsewhere = where.hf is None or where.wheel is not None or source not in ("auto", "hf")
    if elsewhere or huggingface.cached(str(where.hf), revision) is not None:
        return open_model(name, source=source, revision=revision, to_train=False, say=say).path
    return _fetched(str(where.hf), revision, say)


def _fetched(repo: str, revision: str | None, say: hub.Say) -> Path:
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.errors import GatedRepoError
    from huggingface_hub.errors import HTTPError as HubError  # type: ignore[attr-defined]

    info = huggingface.ask(repo, revision, timeout=PATIENT_SECONDS)
    files = [
        file
        for file in info.siblings or []
        if wanted(file.rfilename) and not file.rfilename.endswith(WEIGHTS) and "/" not in file.rfilename
    ]
    if not any(file.rfilename == "tokenizer.json" for file in files):
        raise UserError(f"{repo} has no tokenizer.json; take a model or a revision that has one")
    say(f"fetching the tokenizer of {repo} from Hugging Face, commit {str(info.sha)[:12]}")
    folder = Path()
    for file in files:
        try:
            path = Path(hf_hub_download(repo, file.rfilename, revision=info.sha))
        except GatedRepoError:
            raise UserError(
                f"{repo}: access is gated; accept its licence on the hub, then log in with `hf auth login` "
                "or the environment variable HF_TOKEN"
            ) from None
        except (HubError, OSError) as error:
            reason = type(error.__cause__ or error).__name__  # its words may carry signed addresses
            raise UserError(
                f"{repo}: {file.rfilename} could not be fetched ({reason}); check network and access, and "
                "run the same command again"
            ) from None
        sha256 = file.lfs.sha256 if file.lfs else None
        record = Recorded(file.rfilename, file.size, sha256, None if file.lfs else file.blob_id)
        fault = fault_of(path, record, asked=f"{constants.ENDPOINT}/{repo}")
        if fault:
            path.resolve().unlink()
            path.unlink(missing_ok=True)
            raise UserError(f"{repo}: the downloaded {path.name} {fault}; it was removed, fetch it again")
        folder = path.parent
    return folder
