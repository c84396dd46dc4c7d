"""One line of the doctor's report, and how its numbers are written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["good", "weak", "broken"]

GIB = 2**30


@dataclass(frozen=True)
class Line:
    """One check.

    Args:
        name: of what was looked at.
        found: what is there.
        mend: what to do; empty where all is well.
    """

    name: str
    verdict: Verdict
    found: str
    mend: str = ""


def dotted(version: Sequence[int] | None) -> str:
    """A version as people write it."""
    return ".".join(map(str, version or ()))


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: `2.13.0+cu130` is (2, 13, 0)."""
    found = []
    for part in version.split("+")[0].split("."):
        digits = part[: next((at for at, sign in enumerate(part) if not sign.isdigit()), len(part))]
        if not digits:
            break
        found.append(int(digits))
    return tuple(found)


def few(words: Sequence[str], most: int = 4) -> str:
    """The first of many words, and how many more there are."""
    return ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")


def size(count: float) -> str:
    """Bytes, in the unit that suits them."""
    for unit, bytes_of in (("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= bytes_of:
            return f"{count / bytes_of:,.0f} {unit}"
    return f"{count:,.0f} bytes"
