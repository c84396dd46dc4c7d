"""What became of the rows: read, kept, dropped by reason, and how full the windows are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from swiftkit.data.document import Origin, RowError

ORIGINS_SHOWN = 3
REASONS_SHOWN = 5


@dataclass(slots=True)
class Tally:
    """Rows with something in common."""

    rows: int = 0
    first: list[str] = field(default_factory=list)  # file:line of the first few

    def add(self, place: str) -> None:
        """Counts a row."""
        self.rows += 1
        if len(self.first) < ORIGINS_SHOWN:
            self.first.append(place)

    def __str__(self) -> str:
        return f"{', '.join(self.first)}{', ...' if self.rows > len(self.first) else ''}"


@dataclass(slots=True)
class SourceCounts:
    """Rows of one source; read are kept + held out + dropped + left out together.

    Attributes:
        source: as the user named it.
        read: rows that became tokens (of a .txt: windows).
        kept: of them, those in windows.
        held_out: given to evaluation by a split.
        dropped: too long, or without a trained token.
        left_out: not drawn by the mix.
        repeated: rows in windows beyond the first time.
        skipped: bad rows that were passed over, which count nowhere else.
    """

    source: str
    read: int = 0
    kept: int = 0
    held_out: int = 0
    dropped: int = 0
    left_out: int = 0
    repeated: int = 0
    skipped: int = 0


@dataclass(slots=True)
class DataReport:
    """Counts of one data set; `rows_read` is always kept + held out + dropped + left out.

    Attributes:
        sources: as the user named them.
        rows_read: rows of all sources that became tokens.
        rows_kept: rows that are in windows, each counted once.
        rows_held_out: rows that a split gave to evaluation.
        rows_left_out: rows that a mix of sources did not draw.
        rows_repeated: rows in windows beyond their first time, by a mix.
        shapes: rows read by what they were taken for.
        dropped: by reason.
        skipped: bad rows that were passed over, by reason; they are not among the rows read.
        notes: rows with which something was done that their writer may not expect.
        counts: the same by source, in the order of `sources`.
        settings: what the labels depend on.
        tokens: of the windows.
        trained_tokens: targets of the windows.
        longest: tokens of the longest row read, before any cut.
        windows: number of windows.
        max_length: tokens of a window.
        cache: how this start came to the data, for the terminal; no part of what the data are.
    """

    sources: list[str]
    rows_read: int = 0
    rows_kept: int = 0
    rows_held_out: int = 0
    rows_left_out: int = 0
    rows_repeated: int = 0
    shapes: dict[str, int] = field(default_factory=dict)
    dropped: dict[str, Tally] = field(default_factory=dict)
    skipped: dict[str, Tally] = field(default_factory=dict)
    notes: dict[str, Tally] = field(default_factory=dict)
    counts: list[SourceCounts] = field(default_factory=list)
    settings: dict[str, str] = field(default_factory=dict)
    tokens: int = 0
    trained_tokens: int = 0
    longest: int = 0
    windows: int = 0
    max_length: int = 0
    cache: str = field(default="", compare=False)

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Self:
        """The report whose `state` this is."""
        tallies = {
            name: {reason: Tally(**tally) for reason, tally in state[name].items()}
            for name in ("dropped", "skipped", "notes")
        }
        return cls(**{**state, **tallies, "counts": [SourceCounts(**counts) for counts in state["counts"]]})

    def state(self) -> dict[str, Any]:
        """All that the report knows about the data, as JSON values."""
        return {name: value for name, value in asdict(self).items() if name != "cache"}

    def drop(self, origin: Origin, reason: str) -> None:
        """Counts a row that is not kept."""
        self.dropped.setdefault(reason, Tally()).add(str(origin))

    def skip(self, error: RowError) -> None:
        """Counts a bad row."""
        self.skipped.setdefault(error.reason, Tally()).add(str(error.origin))

    def note(self, origin: Origin, words: str) -> None:
        """Counts a row with which something was done."""
        self.notes.setdefault(words, Tally()).add(str(origin))

    @property
    def rows_dropped(self) -> int:
        """Dropped rows, all reasons together."""
        return sum(entry.rows for entry in self.dropped.values())

    @property
    def rows_skipped(self) -> int:
        """Bad rows, all reasons together."""
        return sum(entry.rows for entry in self.skipped.values())

    @property
    def share_lost(self) -> float:
        """Dropped and skipped rows among all that the sources have, 0 to 1."""
        rows = self.rows_read + self.rows_skipped
        return (self.rows_dropped + self.rows_skipped) / rows if rows else 0.0

    @property
    def packing_efficiency(self) -> float:
        """Share of the windows' room that tokens fill, 0 to 1."""
        room = self.windows * self.max_length
        return self.tokens / room if room else 0.0

    def losses(self) -> str:
        """Why rows were dropped and skipped, for one line."""
        lost = [("dropped", self.dropped), ("skipped", self.skipped)]
        return "; ".join(
            f"{tally.rows:,} {fate}: {reason} ({tally})"
            for fate, reasons in lost
            for reason, tally in list(reasons.items())[:REASONS_SHOWN]
        )

    def to_dict(self) -> dict[str, Any]:
        """For data_report.json."""
        return {
            "sources": list(self.sources),
            "rows_read": self.rows_read,
            "rows_kept": self.rows_kept,
            "rows_held_out": self.rows_held_out,
            "rows_left_out": self.rows_left_out,
            "rows_repeated": self.rows_repeated,
            "rows_dropped": self.rows_dropped,
            "rows_skipped": self.rows_skipped,
            "dropped": {reason: asdict(tally) for reason, tally in self.dropped.items()},
            "skipped": {reason: asdict(tally) for reason, tally in self.skipped.items()},
            "notes": {words: asdict(tally) for words, tally in self.notes.items()},
            "by_source": [asdict(counts) for counts in self.counts],
            "shapes": dict(self.shapes),
            "settings": dict(self.settings),
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
        left_out = f", {self.rows_left_out:,} not drawn by the mix" if self.rows_left_out else ""
        repeated = f", {self.rows_repeated:,} taken again by the mix" if self.rows_repeated else ""
        share = self.trained_tokens / self.tokens if self.tokens else 0.0
        shapes = ", ".join(f"{count:,} {shape}" for shape, count in self.shapes.items())
        shapes = f" ({shapes})" if shapes else ""
        labels = "".join(f"; {name} {value}" for name, value in self.settings.items())
        return [
            f"rows      {self.rows_read:,} read, {self.rows_kept:,} kept"
            f"{held_out}{left_out}{repeated}{shapes}",
            *(_about_source(counts) for counts in self.counts if len(self.counts) > 1),
            *_tallied("dropped", self.dropped),
            *_tallied("skipped", self.skipped),
            *_tallied("note", self.notes),
            f"tokens    {self.tokens:,}, of which {self.trained_tokens:,} are trained ({share:.0%}){labels}",
            f"windows   {self.windows:,} of {self.max_length:,} tokens, {self.packing_efficiency:.0%} full",
            *([f"cache     {self.cache}"] if self.cache else []),
        ]


def nothing_left(report: DataReport) -> str:
    """The sentence that ends a run without a row to train on."""
    names = ", ".join(report.sources)
    if not report.rows_read:
        return f"{names}: there are no rows{f' ({report.losses()})' if report.skipped else ''}"
    return (
        f"{names}: no row has a trainable token ({report.losses()}); the longest row has "
        f"{report.longest:,} tokens, --max_length is {report.max_length:,}"
    )


def _tallied(label: str, tallies: dict[str, Tally]) -> Sequence[str]:
    most = sorted(tallies.items(), key=lambda entry: -entry[1].rows)
    lines = [f"{label:<10}{tally.rows:,}: {words} ({tally})" for words, tally in most[:REASONS_SHOWN]]
    if rest := most[REASONS_SHOWN:]:
        rows = sum(tally.rows for _, tally in rest)
        lines.append(f"{label:<10}{rows:,} more, for {len(rest):,} other reasons (data_report.json has all)")
    return lines


def _about_source(counts: SourceCounts) -> str:
    taken = counts.kept + counts.repeated
    others = {
        "held out": counts.held_out,
        "dropped": counts.dropped,
        "skipped": counts.skipped,
        "not drawn": counts.left_out,
    }
    rest = "".join(f", {number:,} {fate}" for fate, number in others.items() if number)
    times = f" ({counts.kept:,} and {counts.repeated:,} again)" if counts.repeated else ""
    return f"          {counts.source}: {counts.read:,} read, {taken:,} trained{times}{rest}"
