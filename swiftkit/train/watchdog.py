"""A watchdog beside the loop: it says what a run is doing when that takes far too long."""

from __future__ import annotations

import json
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from swiftkit.parallel.standings import Standings, frame_of, recorded

CHECKS = 10  # looks at the clock during one timeout
CALLS = "collective-calls-rank-{}.json"


class Watchdog:
    """Reports once, with the main thread's stack, that one phase has lasted longer than a timeout.

    It changes nothing: a run that hangs for good can be killed, and one that was only slow goes on.

    Args:
        timeout: seconds; 0 watches nothing.
        say: takes the report.
        standings: of several ranks; then the report says where each of them is.
        folder: for what torch recorded of collective calls, a file for each rank whose phase lasts too long.
    """

    def __init__(
        self,
        timeout: float,
        say: Callable[[str], None],
        *,
        standings: Standings | None = None,
        folder: Path | None = None,
    ):
        self._timeout, self._say = timeout, say
        self._standings, self._folder = standings, folder
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
        reported = False
        while not self._ended.wait(self._timeout / CHECKS):
            phase, done, since = self._phase
            spent = time.monotonic() - since
            if self._standings is not None:
                self._standings.put(f"after step {done}, {phase} for {spent:.0f} s", frame_of(self._watched))
            # Others may be a check behind: what they put down before they got stuck would be no help.
            late = self._timeout if self._standings is None else self._timeout * (1 + 2 / CHECKS)
            if spent > late and not reported:
                self._say(self._report(phase, done, spent))
                reported = True
            if reported and self._standings is None:
                return

    def _report(self, phase: str, done: int, spent: float) -> str:
        frame = frame_of(self._watched)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else "  the thread has ended\n"
        lines = [
            f"after step {done}: {phase} has taken {spent:.0f} s, longer than --hang_timeout "
            f"{self._timeout:g}; the run goes on, if it can, and is doing this:",
            stack.rstrip(),
        ]
        if self._standings is not None:
            lines += ["where the ranks are:", *self._standings.report()]
            lines += self._write_calls(self._standings.rank)
        return "\n".join(lines)

    def _write_calls(self, rank: int) -> list[str]:
        calls = recorded()
        if self._folder is None or not calls:
            return []
        (self._folder / CALLS.format(rank)).write_text(json.dumps(calls))
        return [f"the last collective calls of each rank are in {self._folder / CALLS.format('*')}"]
