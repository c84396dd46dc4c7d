"""From sources to whole documents, before any cut: every row is counted, and a bad one named or skipped."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swiftkit.data.arrays import ArrayWriter
from swiftkit.data.conversation import Message
from swiftkit.data.document import Document, Origin, RowError
from swiftkit.data.documents import Tokens
from swiftkit.data.encode import SAMPLE_CANDIDATES, Encoded, Encoder
from swiftkit.data.lines import Row, Rows
from swiftkit.data.read import Source, is_text, parse_source, rows_of
from swiftkit.data.report import DataReport, SourceCounts
from swiftkit.data.windows import TextWindows
from swiftkit.data.workers import Encoding, Result, encoding
from swiftkit.hub.files import Say

TELL_EVERY = 30  # seconds
BATCH_ROWS = 512  # rows that the tokenizer takes at once
BATCH_WINDOWS = 256  # of a text file, written at once
WINDOWS = "windows of a text file"


def take_in(
    sources: Sequence[str],
    encoder: Encoder,
    folder: Path,
    *,
    window: int,
    streaming: bool = False,
    processes: int = 1,
    say: Say = print,
) -> None:
    """Reads and renders all sources into a folder of arrays, which `Intake.of` understands.

    Args:
        sources: as `read` takes them.
        encoder: what rows become.
        folder: an empty folder.
        window: tokens that a text file is cut into.
        streaming: see `read`.
        processes: that render and tokenise; 1 is this one.
        say: told from time to time how far it is.

    Raises:
        UserError: a source or (unless the encoder skips bad rows) a row is wrong.
    """
    writing = _Writing(ArrayWriter(folder, encoder.stored), DataReport(list(sources)), say)
    try:
        with encoding(encoder, processes=processes) as encode:
            for written in sources:
                writing.begin(written)
                _Taking(writing, encode, encoder, parse_source(written), window).run(streaming=streaming)
        writing.finish()
    finally:
        writing.arrays.close()


@dataclass(slots=True)
class _Writing:
    """What was taken in so far: tokens go to the disk, what is said about them stays."""

    arrays: ArrayWriter
    report: DataReport
    say: Say
    told: float = field(default_factory=time.monotonic)
    bounds: list[int] = field(default_factory=list)
    files: dict[tuple[str, str], int] = field(default_factory=dict)
    prompts: list[tuple[int, list[Message]]] = field(default_factory=list)
    largest: int = -1
    documents: int = 0

    def begin(self, source: str) -> None:
        self.report.counts.append(SourceCounts(source))
        self.bounds.append(self.documents)

    def finish(self) -> None:
        facts: dict[str, Any] = {
            "report": self.report.state(),
            "files": list(self.files),
            "bounds": [*self.bounds, self.documents],
            "prompts": self.prompts,
            "largest": self.largest,
        }
        self.arrays.finish(facts)

    @property
    def wants_prompts(self) -> bool:
        return len(self.prompts) < SAMPLE_CANDIDATES

    def offer(self, document: int, prompt: list[Message]) -> None:
        if self.wants_prompts and all(prompt != known for _, known in self.prompts):
            self.prompts.append((document, prompt))

    def skip(self, error: RowError) -> None:
        self.report.skip(error)
        self.report.counts[-1].skipped += 1

    def keep(
        self,
        tokens: Tokens,
        origins: Sequence[Origin],
        shapes: Mapping[str, int],
        values: Mapping[str, Sequence[float]],
    ) -> None:
        """Some rows: tokens and origins by document, shapes and values by row."""
        report, files = self.report, self.files
        self.arrays.append(
            ids=tokens.ids,
            trained=tokens.trained,
            lengths=tokens.lengths,
            targets=tokens.targets,
            lines=np.array([origin.line for origin in origins], np.int64),
            places=np.array(
                [files.setdefault((origin.file, origin.unit), len(files)) for origin in origins], np.int32
            ),
            **{name: np.array(own) for name, own in values.items()},
        )
        self.largest = max(self.largest, int(tokens.ids.max(initial=-1)))
        self.documents += len(origins)
        rows = sum(shapes.values())
        report.rows_read += rows
        report.counts[-1].read += rows
        report.longest = max(report.longest, int(tokens.lengths.max(initial=0)))
        for shape, count in shapes.items():
            report.shapes[shape] = report.shapes.get(shape, 0) + count
        if time.monotonic() - self.told > TELL_EVERY:
            self.say(f"{report.rows_read:,} rows tokenised")
            self.told = time.monotonic()


@dataclass(slots=True)
class _Taking:
    """One source on its way."""

    writing: _Writing
    encode: Encoding
    encoder: Encoder
    source: Source
    window: int

    def run(self, *, streaming: bool) -> None:
        rows = rows_of(self.source, streaming=streaming)
        for text, run in groupby(rows, key=lambda row: row.origin.file if is_text(row.origin) else None):
            if text is None or not self.encoder.cuts_text:
                self._take_rows(run)
            else:
                self._take_text(run)
            if self._room == 0:
                return

    @property
    def _room(self) -> int:
        """Rows that the source's limit leaves."""
        limit = self.source.limit
        return sys.maxsize if limit is None else limit - self.writing.report.counts[-1].read

    def _take_rows(self, rows: Rows) -> None:
        """Rows of other files, some at once; of a limit, no more than may be needed are on their way."""
        waiting: deque[tuple[Sequence[Row | RowError], Result[Encoded]]] = deque()
        sent = 0
        while True:
            batch = list(islice(rows, min(BATCH_ROWS, self._room - sent)))
            if batch:
                waiting.append((batch, self.encode.submit(batch, prompts=self.writing.wants_prompts)))
                sent += len(batch)
            if waiting and (not batch or len(waiting) > self.encode.ahead):
                first, result = waiting.popleft()
                sent -= len(first)
                self._keep(first, result())
            elif not batch:
                return

    def _keep(self, rows: Sequence[Row | RowError], found: Encoded) -> None:
        writing = self.writing
        for error in found.errors:
            writing.skip(error)
        for number, words in found.notes:
            writing.report.note(rows[number].origin, words)
        for document, prompt in found.prompts:
            writing.offer(writing.documents + document, prompt)
        origins = [rows[number].origin for number in found.numbers]
        writing.keep(found.tokens, origins, found.shapes, found.values)

    def _take_text(self, stretches: Rows) -> None:
        """One text file as windows; no more of it is read than the limit takes."""
        windows = TextWindows(self.encoder.renderer, self.window)
        documents = windows.cut_tokens(self._tokenised(stretches))
        while some := list(islice(documents, min(BATCH_WINDOWS, self._room))):
            origins = [document.origin for document in some]
            self.writing.keep(_joined(some), origins, {WINDOWS: len(some)}, {})

    def _tokenised(self, rows: Rows) -> Iterator[tuple[Row, NDArray[np.int64]]]:
        """Stretches with their tokens; what is read ahead counts when its turn comes."""
        for row, result in self._read_ahead(rows):
            if isinstance(row, Row):
                yield row, result()
            elif self.encoder.skip_bad_rows:
                self.writing.skip(row)
            else:
                raise row

    def _read_ahead(self, rows: Rows) -> Iterator[tuple[Row | RowError, Result[NDArray[np.int64]]]]:
        waiting: deque[tuple[Row | RowError, Result[NDArray[np.int64]]]] = deque()
        for row in rows:
            waiting.append((row, self.encode.submit_text(row)))
            if len(waiting) > self.encode.ahead:
                yield waiting.popleft()
        yield from waiting


def _joined(documents: Sequence[Document]) -> Tokens:
    return Tokens(
        np.concatenate([document.ids for document in documents]),
        np.concatenate([document.trained for document in documents]),
        np.array([len(document) for document in documents], np.int64),
    )
