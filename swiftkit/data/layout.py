"""What a row is between its rendering and its tokens: one text, and which characters of it are trained."""

from __future__ import annotations

from dataclasses import dataclass

from swiftkit.data.document import Origin


@dataclass(frozen=True, slots=True)
class Layout:
    """Text with what is trained in it, before it becomes tokens.

    Attributes:
        text: what is tokenised, once and as a whole.
        spans: character ranges [start, stop) that are trained.
        origin: the row's file and line.
        starts: the tokenizer puts its own start token in front.
        stops: the end-of-sequence token follows the text, trained.
        notes: what was done with the row that its writer may not expect.
    """

    text: str
    spans: tuple[tuple[int, int], ...]
    origin: Origin
    starts: bool = False
    stops: bool = False
    notes: tuple[str, ...] = ()
