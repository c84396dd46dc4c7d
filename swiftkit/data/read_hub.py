"""Rows of a data set on a hub: `hf::id[:config[:split]]`, and `ms::id` for ModelScope."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from swiftkit.data.document import Origin
from swiftkit.data.lines import Row, Rows
from swiftkit.errors import UserError

SPLIT = "train"


def hub_rows(name: str, *, streaming: bool) -> Rows:
    """Yields the rows of a hub's data set.

    Args:
        name: `hf::` or `ms::`, then an id, perhaps a configuration, perhaps a split (`train` without it).
        streaming: rows are fetched as they are read, in place of a download of the whole first.

    Raises:
        UserError: the library for it is not installed, the data set is not there, or its rows end early.
    """
    return _rows(_loaded(name, streaming), name)


def hub_fingerprint(name: str) -> str | None:
    """What tells this state of a hub's data set from every other, by `datasets`; None where it does not say.

    Raises:
        UserError: see `hub_rows`.
    """
    found = _loaded(name, streaming=False)
    fingerprint = getattr(found, "_fingerprint", None)
    return fingerprint if isinstance(fingerprint, str) else None


def _loaded(name: str, streaming: bool) -> Iterable[dict[str, Any]]:
    hub, _, rest = name.partition("::")
    identity, *more = rest.split(":")
    if not identity or len(more) > 2:
        raise UserError(f"{name}: behind {hub}:: stand an id, and perhaps :config and :split")
    config, split = (*more, "", "")[:2]
    load = _from_hugging_face if hub == "hf" else _from_modelscope
    return load(name, identity, config or None, split or SPLIT, streaming)


def _from_hugging_face(
    name: str, identity: str, config: str | None, split: str, streaming: bool
) -> Iterable[dict[str, Any]]:
    try:
        import datasets
    except ImportError:
        raise UserError(f"{name} needs the datasets library; pip install 'swiftkit[datasets]'") from None
    try:
        return datasets.load_dataset(identity, config, split=split, streaming=streaming)
    except Exception as failure:  # of a library with many kinds: all are about this one name
        raise _refusal(name, failure) from failure


def _from_modelscope(
    name: str, identity: str, config: str | None, split: str, streaming: bool
) -> Iterable[dict[str, Any]]:
    try:
        from modelscope.msdatasets import MsDataset
    except ImportError:
        raise UserError(f"{name} needs the modelscope library; pip install 'swiftkit[modelscope]'") from None
    try:
        return MsDataset.load(identity, subset_name=config, split=split, use_streaming=streaming)
    except Exception as failure:  # as above
        raise _refusal(name, failure) from failure


def _rows(values: Iterable[dict[str, Any]], name: str) -> Rows:
    number = 0
    remaining = iter(values)
    while True:
        try:
            value = next(remaining, None)
        except Exception as failure:  # the network, or a damaged file of the data set
            raise UserError(f"{name}: row {number + 1} cannot be read: {_one_line(failure)}") from failure
        if value is None:
            return
        number += 1
        yield Row(value, Origin(name, number, "row"), columnar=True)


def _refusal(name: str, failure: Exception) -> UserError:
    hub = name.partition("::")[0]
    return UserError(
        f"{name} cannot be loaded: {_one_line(failure)} (written as {hub}::ID:CONFIG:SPLIT; "
        f"without a split it is {SPLIT})"
    )


def _one_line(failure: Exception) -> str:
    return " ".join(str(failure).split()) or type(failure).__name__
