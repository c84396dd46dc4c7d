"""The first step of preparing data: whole documents from sources, found again where they were made before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from swiftkit.data.cache import DataCache, Entry, Sources, key_of, look_at
from swiftkit.data.documents import Stored
from swiftkit.data.encode import Encoder
from swiftkit.data.intake import take_in
from swiftkit.data.read import has_text
from swiftkit.data.workers import processes_for
from swiftkit.hub.files import Say

NOT_KEPT = "none: what is streamed, or has no fingerprint, cannot be told before it is read"


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """Sources, and how their rows become documents.

    Args:
        sources: what `read` takes.
        encoder: what rows become.
        window: tokens that a text file is cut into.
        streaming: a hub's rows are fetched as they are read.
        num_proc: processes that render and tokenise; auto is one for little data, else one a core.
        say: told how far it is.
    """

    sources: Sequence[str]
    encoder: Encoder
    window: int
    streaming: bool
    num_proc: int | Literal["auto"]
    say: Say

    def look(self, cache: Path | None) -> tuple[DataCache, Sources | None]:
        """The cache, and what the sources hold; nothing is kept where that cannot be told before reading.

        Raises:
            UserError: a source does not exist, or the limit of the cache is no number.
        """
        seen = look_at(self.sources, streaming=self.streaming) if cache else None
        return DataCache(cache if seen else None, self.say), seen

    def key(self, seen: Sources) -> str:
        """A name for the documents, by all that they depend on."""
        encoder = self.encoder
        parts: list[Any] = [
            seen.contents,
            encoder.renderer.identity(),
            encoder.kind,
            self.window if has_text(self.sources) else None,
            sorted(encoder.columns.items()),
            encoder.skip_bad_rows,
        ]
        return key_of(parts)

    def obtain(self, keeping: DataCache, seen: Sources | None) -> Entry:
        """The documents, made or found; `stored` opens them.

        Raises:
            UserError: a source or a row is wrong.
        """

        def build(folder: Path) -> None:
            take_in(
                self.sources,
                self.encoder,
                folder,
                window=self.window,
                streaming=self.streaming,
                processes=processes_for(self.sources) if self.num_proc == "auto" else self.num_proc,
                say=self.say,
            )
            if seen:
                seen.check_unchanged()

        return keeping.obtain(f"tokens-{self.key(seen)}" if seen else "", build)


def stored(whole: Entry) -> Stored:
    """The documents of an entry, mapped into memory."""
    return Stored(whole.arrays, whole.facts["files"], whole.facts["bounds"])
