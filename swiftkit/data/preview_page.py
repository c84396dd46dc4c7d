"""A preview as one HTML page that stands alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby
from pathlib import Path

from swiftkit.data.document import RowError
from swiftkit.data.page import chips, page, tiles
from swiftkit.data.preview import Preview, RowView, Token
from swiftkit.data.preview_text import visible

HERE = Path(__file__).parent
GONE_SHOWN = 2_000  # tokens of a row that a cut takes away; more of them are only counted

TOOLBAR = (
    '<div class="toolbar"><ul class="legend" aria-label="legend">'
    '<li><span class="t">trained</span></li><li><span>context</span></li>'
    '<li><span class="s">special token</span></li><li><span class="x">not in a window</span></li></ul>'
    '<div class="buttons" hidden><button type="button" data-look="borders" aria-pressed="false">Token borders'
    '</button><button type="button" data-look="focus" aria-pressed="false">Only trained</button></div></div>'
)


def preview_page(preview: Preview, *, model: str) -> str:
    """The page.

    Args:
        preview: what is shown.
        model: whose tokenizer it is, as the user named it.
    """
    names = ", ".join(preview.sources)
    body = [
        '<header class="top"><p class="kicker">swiftkit data preview</p><h1>What the model sees</h1>',
        f'<p class="lead">{_text(names)}, by the tokenizer and chat template of {_text(model)}</p>',
        chips(preview.settings),
        _tiles(preview),
        "</header><main>",
        TOOLBAR,
        *map(_row, preview.rows),
        *(_window(number, window, preview.max_length) for number, window in enumerate(preview.windows, 1)),
        f'<p class="note">and {preview.more:,} more windows</p>' if preview.more else "",
        "</main><footer>Trained tokens are those that the loss counts. Point at a token for its id, or go "
        "through a row with the arrow keys.</footer>",
    ]
    return page(
        title=f"{names}: what the model sees",
        body="\n".join(body),
        style=HERE / "preview.css",
        script=HERE / "preview.js",
    )


def _tiles(preview: Preview) -> str:
    views = preview.views()
    used, trained = sum(view.used for view in views), sum(view.trained for view in views)
    lost = sum(not view.kept for view in views) + sum(isinstance(row, RowError) for row in preview.rows)
    facts = [
        (f"{used:,}", "tokens", f"in {len(views):,} rows"),
        (f"{trained:,}", "trained tokens", f"{trained / used:.0%}" if used else ""),
    ]
    if preview.windows:
        room = len(preview.windows) * preview.max_length
        facts.insert(0, (f"{len(preview.windows):,}", "windows", f"{used / room:.1%} full"))
    else:
        facts.insert(0, (f"{len(preview.rows):,}", "rows shown", ""))
        facts.append((f"{lost:,}", "dropped or refused", ""))
    return tiles(facts)


def _row(row: RowView | RowError) -> str:
    if isinstance(row, RowError):
        return (
            f'<article class="card"><header><h2 class="place">{_text(str(row.origin))}</h2>'
            '<span class="badge bad">refused</span></header>'
            f'<p class="note bad">{_text(row.reason)}</p>'
            '<p class="note last">Training stops here; --skip_bad_rows counts such rows and goes on.</p>'
            "</article>"
        )
    notes = "".join(f'<p class="note">{_text(note)}</p>' for note in row.notes)
    head = f"<header>{_head(row, level=2)}</header>"
    return f'<article class="card">{head}{notes}{_map(row.tokens)}{_tokens(row)}</article>'


def _window(number: int, window: Sequence[RowView], max_length: int) -> str:
    used = sum(len(document.tokens) for document in window)
    documents = "".join(
        f'<section class="document"><header>{_head(document, level=3)}</header>'
        f"{_map(document.tokens)}{_tokens(document)}</section>"
        for document in window
    )
    return (
        f'<article class="card"><header><h2>Window {number}</h2>'
        f'<span class="badge">{used:,} of {max_length:,} tokens, {used / max_length:.0%} full</span>'
        f'<span class="badge">{len(window):,} document{"s" * (len(window) > 1)}</span></header>'
        '<p class="note">Documents share the window, and never see each other.</p>'
        f"{documents}</article>"
    )


def _head(row: RowView, *, level: int) -> str:
    share = f"{row.trained / row.used:.0%}" if row.used else "0%"
    badges = [
        f'<span class="badge">{_text(row.shape)}</span>' if row.shape else "",
        f'<span class="badge">{len(row.tokens):,} tokens</span>',
        f'<span class="badge{" good" * (row.trained > 0)}">{row.trained:,} trained ({share})</span>',
        f'<span class="badge bad">{_text(row.fate)}</span>' if row.fate else "",
    ]
    return f'<h{level} class="place">{_text(str(row.origin))}</h{level}>{"".join(badges)}'


def _map(tokens: Sequence[Token]) -> str:
    """Where in the row the trained tokens are, and those that are gone."""
    marks = []
    at = 0
    for (trained, kept), run in groupby(tokens, key=lambda token: (token.trained, token.kept)):
        length = len(list(run))
        if trained or not kept:
            look = "" if kept else ' class="gone"'
            marks.append(f'<rect{look} x="{at}" width="{length}" height="1"/>')
        at += length
    return (
        f'<svg class="map" viewBox="0 0 {max(at, 1)} 1" preserveAspectRatio="none" aria-hidden="true">'
        f"{''.join(marks)}</svg>"
    )


def _tokens(row: RowView) -> str:
    label = "tokens; the arrow keys go through them"
    return f'<div class="tokens" tabindex="0" role="group" aria-label="{label}">{"".join(_spans(row))}</div>'


def _spans(row: RowView) -> Iterator[str]:
    for kept, run in groupby(row.tokens, key=lambda token: token.kept):
        tokens = list(run)
        yield from map(_span, tokens if kept else tokens[:GONE_SHOWN])
        if not kept and len(tokens) > GONE_SHOWN:
            yield f"<i> and {len(tokens) - GONE_SHOWN:,} more tokens that are in no window </i>"


def _span(token: Token) -> str:
    looks = [("t", token.trained), ("s", token.special), ("x", not token.kept)]
    names = " ".join(name for name, worn in looks if worn)
    words = _text(token.text).replace("\n", "<i>⏎</i>\n").replace("\t", "<i>→</i>\t") or "<i>·</i>"
    return f'<span{f" class={chr(34)}{names}{chr(34)}" if names else ""} data-i="{token.id}">{words}</span>'


def _text(words: str) -> str:
    return escape(visible(words))
