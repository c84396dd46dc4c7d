"""Counts of a data set, as lines for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from swiftkit.data.preview_text import visible
from swiftkit.data.report import REASONS_SHOWN, Tally
from swiftkit.data.stats import Duplicates, Stats

BAR = 40  # columns of the longest bar
EIGHTHS = " ▏▎▍▌▋▊▉█"


def lines(stats: Stats) -> list[str]:
    """One fact a line, labels in the first ten columns."""
    return [visible(line) for line in _all(stats)]


def _all(stats: Stats) -> Iterator[str]:
    yield f"rows      {stats.rows:,}{_shapes(stats.shapes)}"
    yield from _tallied("bad", stats.bad)
    if stats.untrained_rows:
        yield f"dropped   {stats.untrained_rows:,}: no answer to train on"
    yield from _tallied("note", stats.notes)
    if not stats.rows:
        return
    yield from _sizes(stats)
    yield from _talk(stats)
    yield ""
    yield f"length    {'  '.join(f'{_named(p)} {tokens:,}' for p, tokens in stats.lengths.items())} tokens"
    yield from _bars(stats)
    yield ""
    yield from _copies("copies", "with the tokens of an earlier row", stats.duplicates)
    yield from _copies("prompts", "with an earlier row's prompt and another answer", stats.same_prompt)
    yield ""
    yield from _cuts(stats)
    yield ""
    yield from _windows(stats)


def _shapes(shapes: Mapping[str, int]) -> str:
    listed = ", ".join(f"{rows:,} {shape}" for shape, rows in shapes.items())
    return f" ({listed})" if listed else ""


def _tallied(label: str, tallies: Mapping[str, Tally]) -> Iterator[str]:
    most = sorted(tallies.items(), key=lambda entry: -entry[1].rows)
    for words, tally in most[:REASONS_SHOWN]:
        yield f"{label:<10}{tally.rows:,}: {words} ({tally})"
    if rest := most[REASONS_SHOWN:]:
        yield f"{label:<10}{sum(tally.rows for _, tally in rest):,} more, for {len(rest):,} other reasons"


def _sizes(stats: Stats) -> Iterator[str]:
    share = stats.trained_tokens / stats.tokens
    yield f"tokens    {stats.tokens:,}, of which {stats.trained_tokens:,} are trained ({share:.0%})"
    files = "" if stats.file_bytes is None else f"{_size(stats.file_bytes)} of files"
    text = f"{_size(stats.text_bytes)} of rendered text" if stats.text_bytes else ""
    ratio = f" ({stats.text_bytes / stats.tokens:.2f} bytes a token)" if text and not _texts(stats) else ""
    yield f"bytes     {', '.join(part for part in (files, text) if part)}{ratio}"


def _texts(stats: Stats) -> bool:
    return "text file" in stats.shapes


def _talk(stats: Stats) -> Iterator[str]:
    if not stats.roles:
        return
    yield f"roles     {', '.join(f'{count:,} {role}' for role, count in stats.roles.items())}"
    most = sorted(stats.turns.items(), key=lambda entry: -entry[1])[:6]
    shown = ", ".join(f"{rows:,} of {turns}" for turns, rows in most)
    more = len(stats.turns) - len(most)
    longest = f", and others of up to {max(stats.turns)}" if more else ""
    yield f"messages  in a conversation: {shown}{longest}"


def _named(percentile: int) -> str:
    return {0: "shortest", 50: "median", 100: "longest"}.get(percentile, f"p{percentile}")


def _bars(stats: Stats) -> Iterator[str]:
    most = max(rows for *_, rows in stats.histogram)
    width = max(len(f"{low:,}-{high:,}") for low, high, _ in stats.histogram)
    for low, high, rows in stats.histogram:
        eighths = round(rows / most * BAR * 8) or (1 if rows else 0)
        bar = EIGHTHS[8] * (eighths // 8) + EIGHTHS[eighths % 8].strip()
        name = f"{low:,}-{high:,}" if high > low else f"{low:,}"
        yield f"          {name:>{width}} {bar:<{BAR}} {rows:,}"


def _copies(label: str, words: str, found: Duplicates) -> Iterator[str]:
    pairs = ", ".join(f"{later} = {first}" for later, first in found.pairs)
    more = ", ..." if found.rows > len(found.pairs) else ""
    yield f"{label:<10}{found.rows:,} rows {words}{f' ({pairs}{more})' if pairs else ''}"


def _cuts(stats: Stats) -> Iterator[str]:
    chosen = stats.settings["truncation_strategy"]
    yield f"cut       rows longer than {stats.max_length:,} tokens, by --truncation_strategy"
    for strategy, loss in stats.truncation.items():
        labels = loss.trained_lost / stats.trained_tokens if stats.trained_tokens else 0.0
        mark = "  <- chosen" if strategy == chosen else ""
        yield (
            f"          {strategy:<6} {loss.rows_dropped:>9,} dropped {loss.rows_cut:>9,} cut "
            f"{loss.tokens_lost:>12,} tokens lost {labels:>7.2%} of the trained ones{mark}"
        )


def _windows(stats: Stats) -> Iterator[str]:
    how = "packed" if stats.packed else "one row each"
    yield f"windows   by --max_length ({how}, --truncation_strategy {stats.settings['truncation_strategy']})"
    for entry in stats.packing:
        mark = "  <- chosen" if entry.max_length == stats.max_length else ""
        yield (
            f"          {entry.max_length:>6,} {entry.windows:>12,} windows {entry.efficiency:>7.1%} full "
            f"{entry.rows:>12,} rows{mark}"
        )


def _size(count: int) -> str:
    for unit in ("bytes", "KB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:,.0f} {unit}" if unit == "bytes" else f"{count:,.1f} {unit}"
        count /= 1000  # type: ignore[assignment]
    raise AssertionError
