"""From sources to whole documents, before any cut: every row is counted, and a bad one named or skipped."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice

from swiftkit.data.conversation import Conversation, Message
from swiftkit.data.document import Document, Origin, RowError
from swiftkit.data.lines import Row
from swiftkit.data.read import Source, parse_source, rows_of
from swiftkit.data.render import Renderer
from swiftkit.data.report import DataReport, SourceCounts
from swiftkit.data.shapes import Completion, Example, column_names, to_example
from swiftkit.data.template import Layout
from swiftkit.data.windows import TextWindows

BATCH_ROWS = 512  # rows that the tokenizer takes at once
SAMPLE_CANDIDATES = 32  # prompts looked at, as their rows may be dropped later
WINDOWS = "windows of a text file"


@dataclass(slots=True)
class Intake:
    """All rows as whole documents.

    Attributes:
        report: what was read so far.
        documents: of each source, in its order.
        prompts: conversations before their first answer, with where they stand.
    """

    report: DataReport
    documents: list[list[Document]] = field(default_factory=list)
    prompts: list[tuple[Origin, list[Message]]] = field(default_factory=list)


def take_in(
    sources: Sequence[str],
    renderer: Renderer,
    *,
    window: int,
    columns: Mapping[str, str] | None = None,
    skip_bad_rows: bool = False,
    streaming: bool = False,
) -> Intake:
    """Reads and renders all sources.

    Args:
        sources: as `read` takes them.
        renderer: with tokenizer and template.
        window: tokens that a text file is cut into.
        columns: as `--columns` has it.
        skip_bad_rows: count the rows that cannot be used, and go on.
        streaming: see `read`.

    Raises:
        UserError: a source or (without `skip_bad_rows`) a row is wrong.
    """
    intake = Intake(DataReport(list(sources)))
    names = column_names(columns or {})
    for written in sources:
        intake.report.counts.append(SourceCounts(written))
        intake.documents.append([])
        taking = _Taking(intake, renderer, parse_source(written), names, skip_bad_rows, window)
        taking.run(streaming=streaming)
    return intake


@dataclass(slots=True)
class _Taking:
    """One source on its way."""

    intake: Intake
    renderer: Renderer
    source: Source
    columns: Mapping[str, str]
    skip_bad_rows: bool
    window: int

    def run(self, *, streaming: bool) -> None:
        rows = self._good(rows_of(self.source, streaming=streaming))
        for text, run in groupby(rows, key=lambda row: row.origin.file if row.stretch else None):
            if text is not None:
                self._take_text(run)
            else:
                while self._take_rows(islice(run, min(BATCH_ROWS, self._room))):
                    pass
            if self._room == 0:
                return

    @property
    def _room(self) -> int:
        """Rows that the source's limit leaves."""
        limit = self.source.limit
        return sys.maxsize if limit is None else limit - self.intake.report.counts[-1].read

    def _good(self, rows: Iterable[Row | RowError]) -> Iterator[Row]:
        for row in rows:
            if isinstance(row, Row):
                yield row
            else:
                self._refuse(row)

    def _refuse(self, error: RowError) -> None:
        if not self.skip_bad_rows:
            raise error
        self.intake.report.skip(error)
        self.intake.report.counts[-1].skipped += 1

    def _take_rows(self, rows: Iterable[Row]) -> int:
        """Takes some rows together, and says how many there were, bad ones included."""
        examples: list[Example] = []
        layouts: list[Layout] = []
        pulled = 0
        for row in rows:
            pulled += 1
            try:
                example = to_example(row, self.columns)
                layouts.append(self.renderer.layout(example))
                examples.append(example)
            except RowError as error:
                self._refuse(error)
        for example, layout, document in zip(examples, layouts, self.renderer.encode(layouts), strict=True):
            for words in layout.notes:
                self.intake.report.note(example.origin, words)
            self._keep(document, _shape_name(example))
            self._offer_prompt(example)
        return pulled

    def _take_text(self, stretches: Iterable[Row]) -> None:
        """One text file as windows; no more of it is read than the limit takes."""
        windows = TextWindows(self.renderer, self.window)
        for document in islice(windows.cut(stretches), self._room):
            self._keep(document, WINDOWS)

    def _keep(self, document: Document, shape: str) -> None:
        report = self.intake.report
        report.rows_read += 1
        report.counts[-1].read += 1
        report.longest = max(report.longest, len(document))
        report.shapes[shape] = report.shapes.get(shape, 0) + 1
        self.intake.documents[-1].append(document)

    def _offer_prompt(self, example: Example) -> None:
        prompts = self.intake.prompts
        if not isinstance(example, Conversation) or example.tools or len(prompts) >= SAMPLE_CANDIDATES:
            return
        prompt = _prompt(self.renderer.with_system(example))
        if prompt and all(prompt != known for _, known in prompts):
            prompts.append((example.origin, prompt))


def _shape_name(example: Example) -> str:
    if isinstance(example, Conversation):
        return "conversations by the chat template"
    return "prompts with completion as plain text" if isinstance(example, Completion) else "plain texts"


def _prompt(conversation: Conversation) -> list[Message]:
    """What stands before the first answer; empty when there is no question."""
    roles = [message["role"] for message in conversation.messages]
    before = conversation.messages[: roles.index("assistant")] if "assistant" in roles else []
    return before if any(message["role"] == "user" for message in before) else []
