"""A preview in the terminal: trained tokens in colour, and in brackets where there is none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.console import Console
from rich.text import Text

from swiftkit.data.document import RowError
from swiftkit.data.preview import Preview, RowView, Token

OPEN, CLOSE = "⟦", "⟧"
CUT = "red"


@dataclass(frozen=True, slots=True)
class Shades:
    """Styles: two of each, in turn, so that one sees where a token ends."""

    trained: tuple[str, str]
    context: tuple[str, str]
    special: str = "bold magenta"


# Where a terminal has only its own sixteen colours, nobody knows how they look.
SIXTEEN = Shades(("black on green", "black on bright_green"), ("default", "bright_black"))
MANY = Shades(("#0b3d2c on #b9e6cd", "#0b3d2c on #92d4b0"), ("default", "#8c8c8c"))


def show(preview: Preview, console: Console) -> None:
    """Prints a preview."""
    shades: Shades | None = SIXTEEN if console.color_system == "standard" else MANY
    if console.color_system is None or console.no_color:
        shades = None
    _print(console, _legend(shades), Text("  ".join(f"{k} {v}" for k, v in preview.settings.items())))
    for row in preview.rows:
        _print(console, Text())
        if isinstance(row, RowError):
            _head(console, str(row.origin), "refused")
            _print(console, Text(f"training stops here, unless --skip_bad_rows: {visible(row.reason)}", CUT))
        else:
            _head(console, str(row.origin), facts(row))
            _print(console, *_body(row, shades))
    for number, window in enumerate(preview.windows, start=1):
        _print(console, Text())
        used = sum(len(document.tokens) for document in window)
        words = f"{len(window)} documents, {used:,} of {preview.max_length:,} tokens"
        _head(console, f"window {number}", words)
        for document in window:
            _print(
                console, Text(f"-- {document.origin}: {facts(document)}", "bold"), *_body(document, shades)
            )
    if preview.more:
        _print(console, Text(), Text(f"and {preview.more:,} more windows"))


def facts(row: RowView) -> str:
    """A row in a few words."""
    parts = [row.shape, f"{len(row.tokens):,} tokens", f"{row.trained:,} trained", row.fate, *row.notes]
    return ", ".join(part for part in parts if part)


def visible(text: str) -> str:
    """Characters that would steer a terminal, or turn the direction of reading, as signs that can be seen."""
    return text.translate(_SIGNS)


_SIGNS = {
    **{code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"},
    0x7F: "\u2421",
    **{code: f"\\x{code:02x}" for code in range(0x80, 0xA0)},
    **{code: f"\\u{code:04x}" for code in (0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))},
}


def _print(console: Console, *texts: Text) -> None:
    for text in texts:
        console.print(text, highlight=False, soft_wrap=True)


def _head(console: Console, place: str, words: str) -> None:
    _print(console, Text.assemble(("== ", "bright_black"), (place, "bold"), f"  {words}"))


def _legend(shades: Shades | None) -> Text:
    if shades is None:
        return Text(f"{OPEN}trained{CLOSE}  everything else is context")
    return Text.assemble(
        (" trained ", shades.trained[0]),
        "  ",
        ("<special>", shades.special),
        "  ",
        "everything else is context",
    )


def _body(row: RowView, shades: Shades | None) -> Iterator[Text]:
    """The row's text; tokens that are cut off are only counted, unless the whole row is dropped."""
    text = Text()
    for kept, run in groupby(row.tokens, key=lambda token: token.kept):
        tokens = list(run)
        if not kept and row.kept:
            text.append(f"✂ {len(tokens):,} tokens are cut here ✂", CUT)
        elif shades is not None:
            _append_coloured(text, tokens, shades, dropped=not kept)
        else:
            _append_bracketed(text, tokens)
    text.rstrip()
    yield text


def _append_coloured(text: Text, tokens: Sequence[Token], shades: Shades, *, dropped: bool) -> None:
    for number, token in enumerate(tokens):
        shade = (shades.trained if token.trained else shades.context)[number % 2]
        if token.special:
            shade = f"bold {shade}" if token.trained else shades.special
        text.append(_written(token.text), f"{shade} strike" if dropped else shade)


def _append_bracketed(text: Text, tokens: Sequence[Token]) -> None:
    for trained, run in groupby(tokens, key=lambda token: token.trained):
        words = _written("".join(token.text for token in run))
        text.append(f"{OPEN}{words}{CLOSE}" if trained else words)


def _written(words: str) -> str:
    return visible(words).replace("\n", "⏎\n").replace("\t", "→   ")
