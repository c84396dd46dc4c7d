"""One HTML page that stands alone: nothing is fetched, and what comes from data stays text."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from swiftkit.errors import UserError

LOOKS = Path(__file__).with_name("page.css")


def check_target(knob: str, written: str, suffix: str) -> Path:
    """Where a file will be written, checked before the work.

    Args:
        knob: the flag that named it.
        written: the path.
        suffix: that it has to have, so that no data set is overwritten by a slip.

    Raises:
        UserError: another suffix, or no folder to write to.
    """
    path = Path(written).expanduser()
    if path.suffix.lower() != suffix:
        raise UserError(f"--{knob} {written}: the file's name ends in {suffix}")
    if path.is_dir() or not path.parent.is_dir():
        what = f"{path} is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise UserError(f"--{knob} {written}: {what}; give a file in a folder that exists")
    return path


def page(*, title: str, body: str, style: Path, script: Path) -> str:
    """A whole page.

    The content security policy lets nothing load, and no script run but the page's own: also a mistake in
    escaping could not make a row's text act.

    Args:
        title: plain text.
        body: HTML.
        style: a CSS file, added to the looks that all pages share.
        script: a JavaScript file.
    """
    code = script.read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    looks = "".join(file.read_text(encoding="utf-8") for file in (LOOKS, style))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)}</title>\n<style>\n{looks}</style>\n</head>\n<body>\n{body}\n"
        f"<script>{code}</script>\n</body>\n</html>\n"
    )


def chips(facts: Mapping[str, object]) -> str:
    """Names with their values, in small frames."""
    parts = "".join(f"<li><b>{escape(name)}</b> {escape(str(value))}</li>" for name, value in facts.items())
    return f'<ul class="chips">{parts}</ul>'


def tiles(facts: Sequence[tuple[str, str, str]]) -> str:
    """Numbers to be seen first: (value, what it is, a word more)."""
    parts = "".join(
        f'<div class="tile"><dt>{escape(name)}</dt><dd>{escape(value)}'
        f"{f' <small>{escape(more)}</small>' if more else ''}</dd></div>"
        for value, name, more in facts
    )
    return f'<dl class="tiles">{parts}</dl>'
