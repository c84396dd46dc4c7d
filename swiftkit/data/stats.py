"""Counts of a data set: lengths, trained share, packing, duplicates, and what a cut would lose.

Of a row only numbers stay in memory: lengths, two hashes, and where it stands; under 100 bytes.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from swiftkit.data.choose import TruncationStrategy, fit
from swiftkit.data.conversation import Conversation
from swiftkit.data.document import Document, Origin, RowError
from swiftkit.data.pack import pack_windows
from swiftkit.data.preview import renderer_of, told, window_tokens, with_defaults
from swiftkit.data.read import files_of_source, parse_source
from swiftkit.data.report import Tally
from swiftkit.data.seen import Seen, see

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WINDOWS = (512, 1024, 2048, 4096, 8192)  # for which packing is told
PERCENTILES = (0, 5, 25, 50, 75, 95, 99, 100)
STRATEGIES: tuple[TruncationStrategy, ...] = ("drop", "left", "right")
PAIRS_SHOWN = 5
BARS = 12
TELL_ROWS = 1_000  # rows between two words on how far it is


@dataclass(slots=True)
class Loss:
    """What one truncation choice takes from the rows.

    Attributes:
        rows_cut: shorter than before, and still trained on.
        rows_dropped: too long, or left without a trained token by the cut.
        tokens_lost: tokens of both.
        trained_lost: labels of both.
    """

    rows_cut: int = 0
    rows_dropped: int = 0
    tokens_lost: int = 0
    trained_lost: int = 0


@dataclass(frozen=True, slots=True)
class Packing:
    """Windows of one length.

    Attributes:
        max_length: tokens of a window.
        rows: rows in windows, by the truncation choice.
        windows: how many.
        efficiency: share of their room that tokens fill, 0 to 1.
    """

    max_length: int
    rows: int
    windows: int
    efficiency: float


@dataclass(frozen=True, slots=True)
class Duplicates:
    """Rows that came before: how many, and the first few pairs (row, the first one like it)."""

    rows: int
    pairs: list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Stats:
    """The counts of all sources together.

    Attributes:
        sources: as the user named them.
        settings: what tokens and labels depend on.
        rows: that can be used.
        file_bytes: of the files; None where a source is no file.
        text_bytes: of the rendered text, UTF-8.
        tokens: before any cut.
        trained_tokens: labels before any cut.
        untrained_rows: rows without a label; training drops them.
        lengths: percentile of the rows' tokens, by its number.
        histogram: (from, to, rows) for rows of `from` to `to` tokens.
        shapes: rows by the keys that they were taken by.
        roles: messages by role.
        turns: conversations by their number of messages.
        duplicates: rows with the tokens and labels of an earlier one.
        same_prompt: rows with an earlier one's prompt and another answer.
        bad: rows that cannot be used, by reason.
        notes: rows with which something is done that their writer may not expect.
        max_length: tokens above which rows are cut.
        truncation: what each choice would lose at `max_length`.
        packing: windows at several lengths, `max_length` among them.
        packed: whether rows share windows.
    """

    sources: list[str]
    settings: dict[str, str]
    rows: int
    file_bytes: int | None
    text_bytes: int
    tokens: int
    trained_tokens: int
    untrained_rows: int
    lengths: dict[int, int]
    histogram: list[tuple[int, int, int]]
    shapes: dict[str, int]
    roles: dict[str, int]
    turns: dict[int, int]
    duplicates: Duplicates
    same_prompt: Duplicates
    bad: dict[str, Tally]
    notes: dict[str, Tally]
    max_length: int
    truncation: dict[TruncationStrategy, Loss]
    packing: list[Packing]
    packed: bool

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def count(
    sources: Sequence[str],
    *,
    tokenizer: PreTrainedTokenizerBase,
    longest: int | None = None,
    tell: Callable[[int], None] = lambda rows: None,
    **settings: Any,
) -> Stats:
    """Reads all rows once and counts.

    Args:
        sources: what `read` takes.
        tokenizer: a fast transformers tokenizer.
        longest: tokens of a window that the model can read; None is no limit.
        tell: takes the number of rows so far, now and then.
        settings: those of `prepare`, with the defaults of `swiftkit sft`; bad rows are counted.

    Raises:
        UserError: a source cannot be read, or there is no template.
    """
    knobs = with_defaults(settings)
    renderer = renderer_of(tokenizer, knobs)
    limit = window_tokens(knobs.max_length, longest)
    counting = _Counting(limit=limit, bos_id=renderer.bos_id, strategy=knobs.truncation_strategy)
    for written in sources:
        for item in see(written, renderer, window=limit, columns=knobs.columns, streaming=knobs.streaming):
            counting.take(item)
            if counting.rows % TELL_ROWS == 0:
                tell(counting.rows)
    return counting.stats(list(sources), told(knobs), packing=knobs.packing, auto=knobs.max_length == "auto")


@dataclass(slots=True)
class _Counting:
    """Numbers of the rows so far."""

    limit: int
    bos_id: int | None
    strategy: TruncationStrategy
    rows: int = 0
    text_bytes: int = 0
    tokens: int = 0
    trained: int = 0
    untrained: int = 0
    shapes: Counter[str] = field(default_factory=Counter)
    roles: Counter[str] = field(default_factory=Counter)
    turns: Counter[int] = field(default_factory=Counter)
    bad: dict[str, Tally] = field(default_factory=dict)
    notes: dict[str, Tally] = field(default_factory=dict)
    losses: dict[TruncationStrategy, Loss] = field(default_factory=lambda: {s: Loss() for s in STRATEGIES})
    fits: dict[int, array[int]] = field(default_factory=dict)  # lengths in windows of each length
    lengths: array[int] = field(default_factory=lambda: array("q"))
    hashes: array[int] = field(default_factory=lambda: array("Q"))
    prompts: array[int] = field(default_factory=lambda: array("Q"))  # 0 is a row without a prompt
    lines: array[int] = field(default_factory=lambda: array("q"))
    files: array[int] = field(default_factory=lambda: array("l"))
    names: dict[tuple[str, Literal["line", "row"]], int] = field(default_factory=dict)

    def take(self, item: Seen | RowError) -> None:
        """Counts a row."""
        if isinstance(item, RowError):
            self.bad.setdefault(item.reason, Tally()).add(str(item.origin))
            return
        document = item.document
        self.rows += 1
        self.tokens += len(document)
        self.trained += document.targets
        self.untrained += not document.targets
        self.shapes[item.shape] += 1
        if item.layout is not None:
            self.text_bytes += len(item.layout.text.encode())
            for words in item.layout.notes:
                self.notes.setdefault(words, Tally()).add(str(document.origin))
        if isinstance(item.example, Conversation):
            self.turns[len(item.example.messages)] += 1
            self.roles.update(str(message["role"]) for message in item.example.messages)
        self._remember(document)
        self._cut(document)

    def _remember(self, document: Document) -> None:
        origin = document.origin
        self.lengths.append(len(document))
        self.lines.append(origin.line)
        self.files.append(self.names.setdefault((origin.file, origin.unit), len(self.names)))
        self.hashes.append(_hash(document.ids.tobytes() + document.trained.tobytes()))
        first = int(np.argmax(document.trained)) if document.targets else 0
        asked = document.ids[:first]
        empty = first == 0 or (first == 1 and asked[0] == self.bos_id)
        self.prompts.append(0 if empty else _hash(asked.tobytes()))

    def _cut(self, document: Document) -> None:
        """What becomes of a row by each choice, and in windows of each length by the one that was made."""
        if not document.targets:
            return
        for length in {*WINDOWS, self.limit}:
            found = fit(document, length, self.strategy, bos_id=self.bos_id)
            if isinstance(found, Document):
                self.fits.setdefault(length, array("q")).append(len(found))
        if len(document) <= self.limit:
            return
        for strategy, loss in self.losses.items():
            found = fit(document, self.limit, strategy, bos_id=self.bos_id)
            left, labels = (len(found), found.targets) if isinstance(found, Document) else (0, 0)
            loss.rows_cut += left > 0
            loss.rows_dropped += left == 0
            loss.tokens_lost += len(document) - left
            loss.trained_lost += document.targets - labels

    def stats(self, sources: list[str], settings: dict[str, str], *, packing: bool, auto: bool) -> Stats:
        """All counts, when every row was taken."""
        lengths = np.array(self.lengths)
        found = min(max(int(lengths.max(initial=2)), 2), self.limit) if auto else self.limit
        fits = {length: self.fits.get(length, array("q")) for length in WINDOWS}
        fits[found] = self.fits.get(self.limit, array("q"))
        shares = {length: _packing(length, rows, packing) for length, rows in fits.items()}
        exact, prompts = np.array(self.hashes), np.array(self.prompts)
        same = _repeated(exact)
        asked = _repeated(prompts)
        asked = asked[~np.isin(asked[:, 0], same[:, 0]) & (prompts[asked[:, 0]] != 0)]
        return Stats(
            sources=sources,
            settings=settings,
            rows=self.rows,
            file_bytes=_file_bytes(sources),
            text_bytes=self.text_bytes,
            tokens=self.tokens,
            trained_tokens=self.trained,
            untrained_rows=self.untrained,
            lengths=_percentiles(lengths),
            histogram=_histogram(lengths),
            shapes=dict(self.shapes.most_common()),
            roles=dict(self.roles.most_common()),
            turns=dict(sorted(self.turns.items())),
            duplicates=self._pairs(same),
            same_prompt=self._pairs(asked),
            bad=self.bad,
            notes=self.notes,
            max_length=found,
            truncation=self.losses,
            packing=[shares[length] for length in sorted(shares)],
            packed=packing,
        )

    def _pairs(self, repeated: NDArray[np.int64]) -> Duplicates:
        shown = [(self._place(later), self._place(first)) for later, first in repeated[:PAIRS_SHOWN].tolist()]
        return Duplicates(len(repeated), shown)

    def _place(self, row: int) -> str:
        file, unit = list(self.names)[self.files[row]]
        return str(Origin(file, self.lines[row], unit))


def _hash(content: bytes) -> int:
    """64 bits, never 0: of a million rows, two meet by chance once in 40 million data sets."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") or 1


def _repeated(hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Rows whose hash came before, each with the first row that has it: [repeated, 2], in order."""
    _, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
    rows = np.arange(len(hashes))
    firsts = first[inverse.reshape(-1)]
    return np.stack([rows, firsts], axis=1)[rows != firsts]


def _packing(max_length: int, lengths: array[int], packing: bool) -> Packing:
    windows = len(pack_windows(np.array(lengths), max_length)) if packing else len(lengths)
    efficiency = sum(lengths) / (windows * max_length) if windows else 0.0
    return Packing(max_length, len(lengths), windows, round(efficiency, 4))


def _percentiles(lengths: NDArray[np.int64]) -> dict[int, int]:
    if not len(lengths):
        return {}
    found = np.percentile(lengths, PERCENTILES, method="nearest")
    return {percent: int(value) for percent, value in zip(PERCENTILES, found, strict=True)}


def _histogram(lengths: NDArray[np.int64]) -> list[tuple[int, int, int]]:
    """Rows in bars of equal width, up to the 99th percentile; what is longer is the last one's."""
    if not len(lengths):
        return []
    low, high = int(lengths.min()), int(lengths.max())
    usual = int(np.percentile(lengths, 99, method="nearest"))
    width = max(1, -(-(usual - low + 1) // BARS))
    edges = np.arange(low, usual + width + 1, width)
    counts = np.bincount(np.minimum((lengths - low) // width, len(edges) - 2), minlength=len(edges) - 1)
    bars = [(int(a), int(b) - 1, int(rows)) for a, b, rows in zip(edges, edges[1:], counts, strict=False)]
    return [*bars[:-1], (bars[-1][0], max(high, bars[-1][0]), bars[-1][2])]


def _file_bytes(sources: Sequence[str]) -> int | None:
    """Bytes of all files that the sources stand for, `#N` or not; None where one is a hub's."""
    total = 0
    for written in sources:
        files = files_of_source(parse_source(written))
        if files is None:
            return None
        total += sum(path.stat().st_size for path, _ in files)
    return total
