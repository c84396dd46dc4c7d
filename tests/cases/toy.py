"""The toy tokenizers, templates and expected values of this folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from swiftkit.data import Document, Renderer, read, to_example

CASES = Path(__file__).parent


def case(name: str) -> str:
    """The path of a case's file."""
    return str(CASES / name)


def expected(name: str) -> Any:
    return json.loads((CASES / f"{name}.expect.json").read_text(encoding="utf-8"))


def template(name: str) -> str:
    """The path of a toy chat template."""
    return str(CASES / "00-toy" / f"template-{name}.jinja")


def tokenizer(name: str = "plain") -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(CASES / "00-toy" / f"tok-{name}")


def render(name: str, *, tok: str = "plain", chat_template: str | None = None) -> list[Document]:
    """The documents of a case's rows; `chat_template` is a toy template's path, a file, or a built-in."""
    examples = [to_example(row) for row in read(case(name))]
    return Renderer(tokenizer(tok), chat_template=chat_template).documents(examples)


def trained_texts(document: Document, tok: PreTrainedTokenizerFast) -> list[str]:
    """The text of each unbroken run of trained tokens."""
    runs: list[list[int]] = []
    before = False
    for token, trained in zip(document.ids.tolist(), document.trained.tolist(), strict=True):
        if trained:
            runs = runs if before else [*runs, []]
            runs[-1].append(token)
        before = trained
    return [tok.decode(run) for run in runs]
