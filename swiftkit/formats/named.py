"""From what a user calls a model (a name of the registry, a hub id, a folder) to its files and its recipe."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path

from swiftkit import hub, registry
from swiftkit.errors import UserError
from swiftkit.formats.source import LocalModel, local_model
from swiftkit.hub import huggingface
from swiftkit.hub.location import PATIENT_SECONDS

CONFIG = "config.json"


def is_model_folder(name: str) -> bool:
    """Whether a name means a folder of this machine.

    A bare word that the registry knows means that model, also where a folder is called so (a run's, say),
    unless the folder holds a model.
    """
    folder = _folder(name)
    if not folder.is_dir():
        return False
    written_as_path = "/" in name or name.startswith((".", "~"))
    return written_as_path or (folder / CONFIG).is_file() or registry.find(name) is None


def known_recipe(name: str) -> registry.Recipe | None:
    """The registry's recipe of a name; None for a folder, and for a hub id that it does not know.

    Raises:
        UserError: for a plain word that nobody knows, and for a path where no folder is.
    """
    if is_model_folder(name):
        return None
    recipe = registry.resolve(name)
    if recipe is None and (name.startswith(("/", ".", "~")) or name.count("/") > 1):
        raise UserError(
            f"{name} is no folder; give a model folder, a hub id (owner/name) or a name of `swiftkit ls`"
        )
    return recipe


def open_model(
    name: str,
    *,
    source: hub.Source = "auto",
    revision: str | None = None,
    to_train: bool = True,
    say: hub.Say = print,
) -> LocalModel:
    """The model's files on this machine, fetched and converted where that has to be.

    Args:
        name: of the registry, a hub id, or a folder.
        source: as for `hub.fetch`.
        revision: as for `hub.fetch`.
        to_train: refuse, before the download, a model that this version cannot train or talk to.
        say: as for `hub.fetch`.

    Raises:
        UserError: for an unknown name, a family that is not served, or as `hub.fetch` does.
    """
    known = known_recipe(name)
    if to_train and known is not None:
        registry.check_served(known.name, known.model_type)
    accept = partial(registry.check_served, name) if to_train else None
    return local_model(locate(name), source=source, revision=revision, accept=accept, say=say)


def locate(name: str) -> hub.Location:
    """Where a model may come from.

    Raises:
        UserError: as `known_recipe` does.
    """
    if is_model_folder(name):
        return hub.Location(name, folder=_folder(name))
    recipe = known_recipe(name)
    if recipe is None:
        return hub.Location(name, hf=name, modelscope=name)
    wheel = None if recipe.wheel is None else hub.Wheel(**vars(recipe.wheel))
    return hub.Location(recipe.name, hf=recipe.hf, wheel=wheel, modelscope=recipe.modelscope)


def folder_name(model: str) -> str:
    """What a model is called where only one word has room: a folder's last part, else the name itself."""
    return os.path.basename(os.path.abspath(_folder(model))) if is_model_folder(model) else model


def _folder(name: str) -> Path:
    return Path(os.path.expanduser(name))  # Path.expanduser raises for a user that is not there


def recipe_of(
    name: str, *, source: hub.Source = "auto", revision: str | None = None, say: hub.Say = print
) -> registry.Recipe:
    """The recipe of a name; of an unknown hub id or a folder, from its `config.json`.

    Of a model on Hugging Face that file alone is fetched.

    Raises:
        UserError: as `open_model` does, and where there is no config.json.
    """
    known = known_recipe(name)
    if known is not None:
        return known
    where = locate(name)
    if where.folder is not None:
        path = where.folder / CONFIG
        if not path.is_file():
            lacking = ", ".join(hub.missing_files(where.folder))
            raise UserError(f"{name} lacks {lacking}; give a folder with config, tokenizer and weights")
    elif where.hf is not None and source in ("auto", "hf"):
        path = _config_of_hub(where.hf, revision)
    else:
        path = open_model(name, source=source, revision=revision, say=say).path / CONFIG
    recipe = registry.from_config_json(json.loads(path.read_text(encoding="utf-8")), name)
    return recipe if where.folder is None else replace(recipe, hf=None)


def _config_of_hub(repo: str, revision: str | None) -> Path:
    """The config.json of a repository on Hugging Face, from the cache where the whole model is there."""
    cached = huggingface.cached(repo, revision)
    if cached is not None:
        return cached.path / CONFIG
    info = huggingface.ask(repo, revision, timeout=PATIENT_SECONDS)
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import GatedRepoError, RemoteEntryNotFoundError
    from huggingface_hub.errors import HTTPError as HubError  # type: ignore[attr-defined]

    try:
        return Path(hf_hub_download(repo, CONFIG, revision=info.sha))
    except GatedRepoError:
        raise UserError(
            f"{repo}: access is gated; accept its licence on the hub, then log in with `hf auth login` or "
            "the environment variable HF_TOKEN"
        ) from None
    except RemoteEntryNotFoundError:
        raise UserError(f"{repo} has no {CONFIG}; choose a repository that has a model") from None
    except (HubError, OSError) as error:
        reason = type(error.__cause__ or error).__name__  # its words may carry signed addresses
        raise UserError(
            f"{repo}: {CONFIG} could not be fetched ({reason}); check network and access, and run the same "
            "command again"
        ) from None
