"""The one error that a user meets: it names the thing, the rule and the mend."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A mistake that the user can mend: printed as one message, without a trace, exit code 2.

    Anything else that escapes is a fault of ours: it keeps its trace and exits with 1.
    """


def nearest(word: str, known: Iterable[str], *, say: str = "did you mean {}?") -> str:
    """A short offer of the known name closest to `word`, or an empty string.

    Args:
        word: what the user typed.
        known: the names that would have been right.
        say: the sentence, with one place for the name.
    """
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return say.format(close[0]) if close else ""
