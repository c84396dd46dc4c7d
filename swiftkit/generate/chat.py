"""`swiftkit chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from contextlib import suppress

from swiftkit.config import ChatConfig
from swiftkit.errors import UserError
from swiftkit.generate.session import Session


def chat(config: ChatConfig) -> None:
    """Answer `--prompt` and end, or go on until the end of input.

    In a terminal `/new` starts over, and Ctrl-C stops an answer; at the prompt it ends the conversation.
    """
    session = Session.open(config, say=_aside)
    if config.prompt is not None:
        _answer(session, config.prompt)
    elif sys.stdin.isatty():
        _converse(session)
    else:
        for line in sys.stdin:
            _take(session, line)


def _converse(session: Session) -> None:
    with suppress(ImportError):  # not on every platform; gives input() arrow keys and a history
        import readline  # noqa: F401
    _aside("Ask away. /new starts over, Ctrl-C stops an answer, Ctrl-D ends.")
    while True:
        try:
            line = input("> ")
        except EOFError:
            print()
            return
        try:
            _take(session, line)
        except KeyboardInterrupt:
            print()
        except UserError as refusal:
            _aside(str(refusal))


def _take(session: Session, line: str) -> None:
    prompt = line.strip()
    if prompt == "/new":
        session.forget()
    elif prompt:
        _answer(session, prompt)


def _answer(session: Session, prompt: str) -> None:
    for piece in session.stream(prompt):
        print(piece, end="", flush=True)
    print()


def _aside(line: str) -> None:
    """What is not the model's: kept out of standard output, so that answers can be piped."""
    print(line, file=sys.stderr)
