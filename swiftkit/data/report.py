"""What became of the rows: read, kept, dropped by reason, and how full the windows are."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from swiftkit.data.document import Origin

ORIGINS_SHOWN = 3


@dataclass(slots=True)
class Dropped:
    """Rows that one reason cost."""

    rows: int = 0
    first: list[str] = field(default_factory=list)  # file:line of the first few


@dataclass(slots=True)
class DataReport:
    """Counts of one data set; `rows_read` is always kept + held out + dropped.

    Attributes:
        sources: as the user named them.
        rows_read: rows of all sources.
        rows_kept: rows that are in windows.
        rows_held_out: rows that a split gave to evaluation.
        shapes: rows read by what they were taken for.
        dropped: by reason.
        tokens: of the kept rows.
        trained_tokens: targets of the kept rows.
        longest: tokens of the longest row read, before any cut.
        windows: number of windows.
        max_length: tokens of a window.
    """

    sources: list[str]
    rows_read: int = 0
    rows_kept: int = 0
    rows_held_out: int = 0
    shapes: dict[str, int] = field(default_factory=dict)
    dropped: dict[str, Dropped] = field(default_factory=dict)
    tokens: int = 0
    trained_tokens: int = 0
    longest: int = 0
    windows: int = 0
    max_length: int = 0

    def drop(self, origin: Origin, reason: str) -> None:
        """Counts a row that is not kept."""
        entry = self.dropped.setdefault(reason, Dropped())
        entry.rows += 1
        if len(entry.first) < ORIGINS_SHOWN:
            entry.first.append(str(origin))

    @property
    def rows_dropped(self) -> int:
        """Dropped rows, all reasons together."""
        return sum(entry.rows for entry in self.dropped.values())

    @property
    def packing_efficiency(self) -> float:
        """Share of the windows' room that tokens fill, 0 to 1."""
        room = self.windows * self.max_length
        return self.tokens / room if room else 0.0

    def to_dict(self) -> dict[str, Any]:
        """For data_report.json."""
        return {
            "sources": list(self.sources),
            "rows_read": self.rows_read,
            "rows_kept": self.rows_kept,
            "rows_held_out": self.rows_held_out,
            "rows_dropped": self.rows_dropped,
            "dropped": {
                reason: {"rows": entry.rows, "first": list(entry.first)}
                for reason, entry in self.dropped.items()
            },
            "shapes": dict(self.shapes),
            "tokens": self.tokens,
            "trained_tokens": self.trained_tokens,
            "longest": self.longest,
            "windows": self.windows,
            "max_length": self.max_length,
            "packing_efficiency": round(self.packing_efficiency, 4),
        }

    def lines(self) -> list[str]:
        """For the terminal, one fact a line."""
        held_out = f", {self.rows_held_out:,} held out for evaluation" if self.rows_held_out else ""
        share = self.trained_tokens / self.tokens if self.tokens else 0.0
        shapes = ", ".join(f"{count:,} {shape}" for shape, count in self.shapes.items())
        shapes = f" ({shapes})" if shapes else ""
        return [
            f"rows      {self.rows_read:,} read, {self.rows_kept:,} kept{held_out}{shapes}",
            *(
                f"dropped   {entry.rows:,}: {reason} ({', '.join(entry.first)}"
                f"{', ...' if entry.rows > len(entry.first) else ''})"
                for reason, entry in self.dropped.items()
            ),
            f"tokens    {self.tokens:,}, of which {self.trained_tokens:,} are trained ({share:.0%})",
            f"windows   {self.windows:,} of {self.max_length:,} tokens, {self.packing_efficiency:.0%} full",
        ]
