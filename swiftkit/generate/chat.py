"""`swiftkit chat`: a conversation in the terminal."""

from __future__ import annotations

import sys

from swiftkit.config import ChatConfig
from swiftkit.generate.session import Session


def chat(config: ChatConfig) -> None:
    """Answer `--prompt` and end, or go on until the end of input. `/new` starts over."""
    session = Session.open(config, say=_aside)
    if config.prompt is not None:
        _answer(session, config.prompt)
        return
    _aside("Ask away; /new starts over, Ctrl-D ends.")
    while True:
        try:
            prompt = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        if prompt.strip() == "/new":
            session.forget()
        elif prompt.strip():
            _answer(session, prompt)


def _answer(session: Session, prompt: str) -> None:
    for piece in session.stream(prompt):
        print(piece, end="", flush=True)
    print()


def _aside(line: str) -> None:
    """What is not the model's: kept out of standard output, so that answers can be piped."""
    print(line, file=sys.stderr)
