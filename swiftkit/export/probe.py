"""A few rows on which a merged model is compared with its adapter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from swiftkit.data import Document, Origin, PackedBatch, PlainText, Renderer, collate, read, to_example
from swiftkit.data.shapes import column_names
from swiftkit.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

ROWS, TOKENS = 4, 128  # rows, and tokens of each
SHIPPED = "swiftkit::"
PROSE = (
    "The harbour froze twice that winter, and each time the boats were pulled up on the shingle with ropes.",
    "To divide a fraction by another, multiply the first by the reciprocal of the second: 3/4 / 2/5 = 15/8.",
    "def area(width, height):\n    return width * height\n\nprint(area(3, 4))  # 12",
    "Question: Which planet is nearest to the sun?\nAnswer: Mercury.",
)


@dataclass(frozen=True)
class Probe:
    """The rows as one packed batch, and where they come from, for people."""

    batch: PackedBatch
    source: str


def probe_rows(args: Mapping[str, Any], tokenizer: PreTrainedTokenizerFast, vocabulary: int) -> Probe:
    """The first rows of the run's evaluation or training data; where they are gone, four lines of prose.

    Args:
        args: the `args.json` of the run; empty for an adapter that is not of one.
        tokenizer: with the template of the run.
        vocabulary: tokens that the model has.
    """
    config: Mapping[str, Any] = args.get("config", {})
    for source in (*config.get("val_dataset", ()), *config.get("dataset", ())):
        documents = _usable(_rendered(source, config, tokenizer), vocabulary)
        if documents:
            return Probe(collate([documents], pad_id=0), f"{len(documents)} rows of {source}")
    examples = [PlainText(text=text, origin=Origin("prose", n)) for n, text in enumerate(PROSE, 1)]
    documents = _usable(Renderer(tokenizer).documents(examples), vocabulary)
    return Probe(collate([documents], pad_id=0), f"{len(documents)} lines of prose that ship with swiftkit")


def _rendered(source: str, config: Mapping[str, Any], tokenizer: PreTrainedTokenizerFast) -> list[Document]:
    """Rows of a file that is still here; a hub is not asked again for a probe."""
    here = source.startswith(SHIPPED) or Path(source.rpartition("#")[0] or source).exists()
    if not here:
        return []
    renderer = Renderer(tokenizer, system=config.get("system"), train_on=config.get("train_on", "assistant"))
    names = column_names(config.get("columns") or {})
    try:
        rows = islice(read(source, on_bad=lambda _: None), ROWS)
        return renderer.documents([to_example(row, names) for row in rows])
    except UserError:  # changed since the training: prose will do
        return []


def _usable(documents: list[Document], vocabulary: int) -> list[Document]:
    """Cut to TOKENS, with something to predict, and in words that the model has."""
    found = []
    for document in documents:
        ids, trained = document.ids[:TOKENS], document.trained[:TOKENS]
        if len(ids) < 2 or int(ids.max()) >= vocabulary:
            continue
        if not trained[1:].any():
            trained = np.ones_like(trained)
        found.append(replace(document, ids=ids, trained=trained))
    return found
