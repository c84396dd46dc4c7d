"""A watchdog beside the loop: it says what a run is doing when that takes far too long."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable

CHECKS = 10  # looks at the clock during one timeout


class Watchdog:
    """Reports once, with the main thread's stack, that one phase has lasted longer than a timeout.

    It changes nothing: a run that hangs for good can be killed, and one that was only slow goes on.

    Args:
        timeout: seconds; 0 watches nothing.
        say: takes the report.
    """

    def __init__(self, timeout: float, say: Callable[[str], None]):
        self._timeout, self._say = timeout, say
        self._watched = threading.get_ident()
        self._phase = ("start", 0, time.monotonic())
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="swiftkit-watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self.enter("start", done=0)
        if self._timeout > 0:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def enter(self, phase: str, *, done: int) -> None:
        """A new phase begins; one assignment, so that the watching thread never sees half of it."""
        self._phase = (phase, done, time.monotonic())

    def _watch(self) -> None:
        while not self._ended.wait(self._timeout / CHECKS):
            phase, done, since = self._phase
            spent = time.monotonic() - since
            if spent > self._timeout:
                self._say(self._report(phase, done, spent))
                return

    def _report(self, phase: str, done: int, spent: float) -> str:
        frame = sys._current_frames().get(self._watched)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else "  the thread has ended\n"
        return (
            f"after step {done}: {phase} has taken {spent:.0f} s, longer than --hang_timeout "
            f"{self._timeout:g}; the run goes on, if it can, and is doing this:\n{stack.rstrip()}"
        )
