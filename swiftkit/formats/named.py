"""From what a user calls a model (a name of the registry, a hub id, a folder) to its files and its recipe."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

from swiftkit import hub, registry
from swiftkit.formats.source import LocalModel, local_model


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
    known = None if Path(name).is_dir() else registry.resolve(name)
    if to_train and known is not None:
        registry.check_served(known.name, known.model_type)
    accept = partial(registry.check_served, name) if to_train else None
    return local_model(locate(name), source=source, revision=revision, accept=accept, say=say)


def locate(name: str) -> hub.Location:
    """Where a model may come from."""
    if Path(name).is_dir():
        return hub.Location(name, folder=Path(name))
    recipe = registry.resolve(name)
    if recipe is None:
        return hub.Location(name, hf=name, modelscope=name)
    wheel = None if recipe.wheel is None else hub.Wheel(**vars(recipe.wheel))
    return hub.Location(recipe.name, hf=recipe.hf, wheel=wheel, modelscope=recipe.modelscope)


def recipe_of(
    name: str, *, source: hub.Source = "auto", revision: str | None = None, say: hub.Say = print
) -> registry.Recipe:
    """The recipe of a name; of an unknown hub id or a folder, from its `config.json`."""
    known = None if Path(name).is_dir() else registry.resolve(name)
    if known is not None:
        return known
    model = open_model(name, source=source, revision=revision, say=say)
    config = json.loads((model.path / "config.json").read_text(encoding="utf-8"))
    return registry.from_config_json(config, name)
