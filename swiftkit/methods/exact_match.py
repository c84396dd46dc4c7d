"""Exact match: the answer to a row's last question, written by the model and compared with the row's own."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Literal

import numpy as np

from swiftkit.data import Document, Origin

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Rule = Literal["final number", "pattern", "text"]

MARK = "####"  # GSM8K's files write the final number behind it (Cobbe et al. 2021, arXiv 2110.14168)
MINUS = "\N{MINUS SIGN}\N{EN DASH}"
# A sign before or behind a currency, thousands between commas, decimals. A unit may follow, but nothing that
# makes it another number: 3/4, 10:30, 1.234,5, 1e5.
NUMBER = rf"([-+{MINUS}]?)\s*[$€£¥]?\s*([-+{MINUS}]?)(\d[\d,]*(?:\.\d+)?|\.\d+)(?![,./:]?\d|[eE][-+]?\d)"
FINAL = re.compile(rf"{MARK}\s*{NUMBER}")
WHOLE = re.compile(rf"\s*{NUMBER}[^\d]*")
Z = 1.959963984540054  # of the normal distribution, two-sided 95 %


@dataclass(frozen=True, slots=True)
class Question:
    """What a row asks, and what it wants to hear.

    Attributes:
        origin: the row's file and line.
        prompt: all tokens before the last answer.
        target: that answer's text.
    """

    origin: Origin
    prompt: list[int]
    target: str


def question_of(
    document: Document, tokenizer: PreTrainedTokenizerFast, stop_ids: set[int]
) -> Question | None:
    """The row's last question; None for a row that is all answer, as plain text is.

    Prompt and answer are those of training: the answer is the last unbroken run of trained tokens.

    Args:
        document: the row.
        tokenizer: of the model.
        stop_ids: tokens that end an answer; they and what follows are no part of its text.
    """
    stop = int(np.flatnonzero(document.trained)[-1]) + 1
    context = np.flatnonzero(~document.trained[:stop])
    start = int(context[-1]) + 1 if context.size else 0
    prompt, answer = document.ids[:start].tolist(), document.ids[start:stop].tolist()
    if not any(token != tokenizer.bos_token_id for token in prompt):
        return None
    end = next((place for place, token in enumerate(answer) if token in stop_ids), len(answer))
    return Question(document.origin, prompt, str(tokenizer.decode(answer[:end], skip_special_tokens=True)))


def final_number(text: str) -> Decimal | None:
    """The number behind the first `####`; None where there is none."""
    found = FINAL.search(text)
    return None if found is None else _number(found)


def as_number(text: str) -> Decimal | None:
    """The number that a text is, with or without a unit; None for anything else."""
    found = WHOLE.fullmatch(text)
    return None if found is None else _number(found)


def _number(found: re.Match[str]) -> Decimal:
    """`-1,234.50` and `$1234.5` as numbers."""
    before, behind, digits = found.groups()
    value = Decimal(digits.replace(",", ""))
    return -value if (before + behind).strip("+") else value


def rule_of(target: str, pattern: str | None) -> Rule:
    """How a row's answer is compared: as the user says, else by what the row's own answer looks like."""
    if pattern is not None:
        return "pattern"
    return "text" if final_number(target) is None else "final number"


def extract(text: str, rule: Rule, pattern: str | None = None) -> str | None:
    """What is compared of an answer, in one spelling for all that is equal; None where there is nothing.

    Args:
        text: a target or a prediction.
        rule: see `rule_of`. A number is written without commas, currency, unit and trailing zeros; all
            whitespace of a text is one space, and none at its ends.
        pattern: its last match counts, or of that the first group.
    """
    if rule == "final number":
        number = final_number(text)
        return None if number is None else _spelt(number)
    if rule == "text":
        return " ".join(text.split())
    assert pattern is not None
    found = list(re.finditer(pattern, text))
    if not found:
        return None
    part = found[-1][min(1, found[-1].re.groups)] or ""
    number = as_number(part)
    return " ".join(part.split()) if number is None else _spelt(number)


def _spelt(number: Decimal) -> str:
    return f"{number.normalize() + 0:f}"  # + 0: there is one zero


def wilson(right: int, n: int) -> tuple[float, float]:
    """The 95 % interval of a share (Wilson 1927), each end from 0 to 1.

    Args:
        right: hits.
        n: trials, at least 1.
    """
    share, square = right / n, Z * Z
    middle = (share + square / (2 * n)) / (1 + square / n)
    half = Z / (1 + square / n) * math.sqrt(share * (1 - share) / n + square / (4 * n * n))
    return max(0.0, middle - half), min(1.0, middle + half)
