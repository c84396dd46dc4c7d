"""Rows and windows as the model sees them: token by token, with what is trained and what a cut takes away."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from swiftkit.data.choose import TruncationStrategy, fit
from swiftkit.data.document import Document, Origin, RowError
from swiftkit.data.prepare import AUTO_MAX_LENGTH, Prepared, Settings, prepare
from swiftkit.data.render import Renderer
from swiftkit.data.seen import Seen, see
from swiftkit.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROWS = 5  # that are shown where nobody says how many
READ_AHEAD = 32  # rows


@dataclass(frozen=True, slots=True)
class Token:
    """A token as a person sees it.

    Attributes:
        id: in the vocabulary.
        text: its characters; empty where the token before shows the character that both make up.
        trained: the model learns to produce it: it is a label.
        special: a token of its own, such as an end-of-turn mark.
        kept: whether it is in a window; else the cut, or the drop of the row, takes it away.
    """

    id: int
    text: str
    trained: bool
    special: bool
    kept: bool = True


@dataclass(frozen=True, slots=True)
class RowView:
    """One row.

    Attributes:
        origin: its file and line.
        shape: the keys that it was taken by.
        tokens: all of them, those that a cut takes away included.
        fate: what became of it where it is not kept whole.
        kept: whether anything of it is trained on.
        notes: what was done with it that its writer may not expect.
    """

    origin: Origin
    shape: str
    tokens: list[Token]
    fate: str = ""
    kept: bool = True
    notes: tuple[str, ...] = ()

    @property
    def trained(self) -> int:
        """Number of labels."""
        return sum(token.trained for token in self.tokens)

    @property
    def used(self) -> int:
        """Number of tokens in a window."""
        return sum(token.kept for token in self.tokens)


@dataclass(frozen=True, slots=True)
class Preview:
    """What is shown.

    Attributes:
        sources: as the user named them.
        settings: what the tokens and labels depend on.
        rows: rows in their order, a refused one as its error; empty where windows are shown.
        windows: the documents of each window.
        max_length: tokens of a window.
        more: windows that are not shown.
    """

    sources: list[str]
    settings: dict[str, str]
    rows: list[RowView | RowError]
    windows: list[list[RowView]]
    max_length: int
    more: int = 0

    def views(self) -> list[RowView]:
        """All rows and documents that became tokens."""
        return [row for row in (*self.rows, *chain(*self.windows)) if isinstance(row, RowView)]


def preview(
    sources: Sequence[str],
    *,
    tokenizer: PreTrainedTokenizerBase,
    rows: int = ROWS,
    row: int | None = None,
    windows: int | None = None,
    longest: int | None = None,
    **settings: Any,
) -> Preview:
    """Takes some rows, or the first windows, the way that training takes them.

    Args:
        sources: what `read` takes.
        tokenizer: a fast transformers tokenizer.
        rows: how many are shown, refused ones among them.
        row: the line (or row) to begin at; None is the first.
        windows: show so many windows in place of rows; all rows are read, and refused ones passed over.
        longest: tokens of a window that the model can read; None is no limit.
        settings: those of `prepare`, with the defaults of `swiftkit sft`.

    Raises:
        UserError: a source cannot be read, there is no template, or there is nothing to show.
    """
    knobs = with_defaults(settings)
    renderer = renderer_of(tokenizer, knobs)
    reader = _Reader(tokenizer, renderer)
    shown = told(knobs)
    if windows is not None:
        packed = partial(prepare, sources, tokenizer=tokenizer)
        return _windows(packed, reader, knobs, shown, longest=longest, show=windows)
    limit = window_tokens(knobs.max_length, longest)
    found: list[RowView | RowError] = []
    for item in _from(sources, renderer, knobs, window=limit, ahead=rows, row=row):
        view = item if isinstance(item, RowError) else reader.row(item, limit, knobs.truncation_strategy)
        found.append(view)
        if len(found) == rows:
            break
    return Preview(list(sources), shown, found, [], limit)


def with_defaults(settings: Mapping[str, Any]) -> Settings:
    """Settings of `prepare`, the defaults of `swiftkit sft` where nothing is said."""
    usual = {"max_length": "auto", "packing": True, "truncation_strategy": "drop", "system": None}
    return Settings(**{**usual, **settings})


def renderer_of(tokenizer: PreTrainedTokenizerBase, knobs: Settings) -> Renderer:
    """What `prepare` renders with."""
    return Renderer(
        tokenizer,
        chat_template=knobs.chat_template,
        system=knobs.system,
        train_on=knobs.train_on,
        thinking_history=knobs.thinking_history,
    )


def told(knobs: Settings) -> dict[str, str]:
    """What tokens and labels depend on, for people."""
    names = ("max_length", "truncation_strategy", "train_on", "thinking_history", "system")
    return {name: str(value) for name in names if (value := getattr(knobs, name)) is not None}


def window_tokens(max_length: int | Literal["auto"], longest: int | None) -> int:
    """Tokens above which a row is cut or dropped, known before a row is read.

    Args:
        max_length: as asked for; auto is the longest row, and never more than AUTO_MAX_LENGTH.
        longest: that the model can read; None is no limit.
    """
    if max_length != "auto":
        return max_length
    return AUTO_MAX_LENGTH if longest is None else min(AUTO_MAX_LENGTH, longest)


def _windows(
    packed: Callable[..., Prepared],
    reader: _Reader,
    knobs: Settings,
    shown: dict[str, str],
    *,
    longest: int | None,
    show: int,
) -> Preview:
    """The first windows, each document with its tokens."""
    chosen = {**asdict(knobs), "skip_bad_rows": True}
    prepared = packed(**chosen)
    if longest is not None and prepared.max_length > longest:
        prepared = packed(**{**chosen, "max_length": longest})
    some = range(min(show, len(prepared.windows)))
    length = str(prepared.max_length)
    return Preview(
        sources=prepared.report.sources,
        settings={**shown, "max_length": length, "packing": str(knobs.packing).lower()},
        rows=[],
        windows=[[reader.document(part) for part in prepared.window(index)] for index in some],
        max_length=prepared.max_length,
        more=len(prepared.windows) - len(some),
    )


def _from(
    sources: Sequence[str],
    renderer: Renderer,
    knobs: Settings,
    *,
    window: int,
    ahead: int,
    row: int | None,
) -> Iterator[Seen | RowError]:
    """The rows of all sources, from a line on."""
    last: Origin | None = None
    for written in sources:
        begun = row is None
        for item in see(
            written,
            renderer,
            window=window,
            columns=knobs.columns,
            streaming=knobs.streaming,
            batch_rows=min(ahead, READ_AHEAD) if row is None else READ_AHEAD,
        ):
            last = item.origin if isinstance(item, RowError) else item.document.origin
            begun = begun or row is None or last.line >= row
            if begun:
                yield item
        if begun and row is not None:
            return
    names = ", ".join(sources)
    if last is None:
        raise UserError(f"{names}: there are no rows")
    if row is not None:
        raise UserError(f"{names}: no row begins at line {row} or behind it; the last is {last}")


class _Reader:
    """Tokens for people."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, renderer: Renderer) -> None:
        self._tokenizer = tokenizer
        self._renderer = renderer
        self._added: dict[int, str] = {
            token: str(word.content) for token, word in tokenizer.added_tokens_decoder.items()
        }

    def document(self, document: Document) -> RowView:
        """A document of a window, all of it kept."""
        texts = self._texts(document.ids, None)
        return RowView(document.origin, "", self._tokens(document, texts, np.ones(len(document), bool)))

    def row(self, seen: Seen, max_length: int, strategy: TruncationStrategy) -> RowView:
        """A row, with what a cut takes away."""
        whole = seen.document
        texts = self._texts(whole.ids, seen.layout.text if seen.layout else None)
        cut = fit(whole, max_length, strategy, bos_id=self._renderer.bos_id)
        kept = np.zeros(len(whole), bool)
        if isinstance(cut, str):
            fate = f"dropped: {cut}"
        else:
            kept[_kept(whole, cut, strategy)] = True
            side = "beginning" if strategy == "left" else "end"
            gone = len(whole) - len(cut)
            fate = f"cut to {max_length:,} tokens: {gone:,} at its {side} are gone" if gone else ""
        tokens = self._tokens(whole, texts, kept)
        notes = seen.layout.notes if seen.layout else ()
        return RowView(whole.origin, seen.shape, tokens, fate, isinstance(cut, Document), notes)

    def _tokens(self, document: Document, texts: list[str], kept: NDArray[np.bool_]) -> list[Token]:
        labels = document.trained & kept
        labels[np.flatnonzero(kept)[:1]] = False  # the first token of a document follows nothing
        return [
            Token(token, text, label, token in self._added, here)
            for token, text, label, here in zip(
                document.ids.tolist(), texts, labels.tolist(), kept.tolist(), strict=True
            )
        ]

    def _texts(self, ids: NDArray[np.int32], text: str | None) -> list[str]:
        """The characters of each token.

        Args:
            ids: of a document.
            text: what it was made of, without start and end tokens that are put around it; None reads it
                back from the ids.
        """
        for front in (0, 1):
            back = self._tokenizer.decode(ids[front:], clean_up_tokenization_spaces=False)
            assert isinstance(back, str)
            ((found, offsets),) = self._renderer.tokens([back if text is None else text])
            behind = front + len(found)
            if len(found) and np.array_equal(ids[front:behind], found) and behind >= len(ids) - 1:
                around = [self._added.get(int(token), "") for token in (*ids[:front], *ids[behind:])]
                inside = pieces(back if text is None else text, offsets)
                return [*around[:front], *inside, *around[front:]]
        return self._alone(ids)

    def _alone(self, ids: NDArray[np.int32]) -> list[str]:
        """The same where the text of the ids makes other ids: each is read for itself."""
        texts: list[str] = []
        begun: list[int] = []
        for token in ids.tolist():
            begun.append(token)
            text = str(self._tokenizer.decode(begun, clean_up_tokenization_spaces=False))
            if "\ufffd" in text and len(begun) < 4:  # a part of a character, of four bytes at most
                continue
            word = str(self._tokenizer.convert_ids_to_tokens(begun[0]))
            space = " " if word.startswith("\u2581") and not text.startswith(" ") else ""
            texts += [space + text, *[""] * (len(begun) - 1)]
            begun = []
        return texts + [str(self._tokenizer.decode([token])) for token in begun]


def pieces(text: str, offsets: NDArray[np.int64]) -> list[str]:
    """The characters of each token, so that all of them together are the text.

    What lies between two tokens belongs to the later one; a character of several tokens to the first of them.

    Args:
        text: that was tokenised.
        offsets: character range of each token, [tokens, 2].
    """
    ends = np.maximum.accumulate(offsets[:, 1])
    if len(ends):
        ends[-1] = len(text)
    starts = np.concatenate([[0], ends[:-1]])
    return [text[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]


def _kept(whole: Document, cut: Document, strategy: TruncationStrategy) -> NDArray[np.int64]:
    """The places of a cut document's tokens in the whole one."""
    if len(cut) == len(whole) or strategy != "left":
        return np.arange(len(cut))
    places = np.arange(len(whole) - len(cut), len(whole))
    if cut.ids[0] != whole.ids[places[0]]:
        places[0] = 0  # the start token stayed in front
    return places
