"""Ctrl-C and SIGTERM: the step is ended and saved, then the process exits with the signal's own code."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swiftkit.parallel.world import World

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Terminated(SystemExit):
    """SIGTERM asked the process to end; it exits with 143, as a shell reports that signal."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


class Stopped(Exception):
    """A stop was asked for where nothing has to be finished first."""


class Stop:
    """Whether the run was asked to stop."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.signal: int | None = None
        self._quiet = quiet

    def agree(self, world: World, *numbers: int) -> list[int]:
        """Stop all ranks at the same place, once one was asked to; else sums over all rows of `numbers`.

        Raises:
            Stopped: on every rank, when a stop was asked for on any.
        """
        asked = (self.signal == number for number in SIGNALS)
        *sums, one, other = world.totals(*world.of_rows(*numbers), *asked)
        if one or other:
            self.signal = self.signal or (SIGNALS[0] if one else SIGNALS[1])
            raise Stopped
        return sums

    def exit(self) -> None:
        """End as the signal would have done.

        Raises:
            KeyboardInterrupt: for SIGINT.
            Terminated: for SIGTERM.
        """
        if self.signal == signal.SIGINT:
            raise KeyboardInterrupt
        if self.signal == signal.SIGTERM:
            raise Terminated

    def take(self, number: int, _: FrameType | None) -> None:
        """The signal handler: the first signal asks, the second one ends at once."""
        if self.signal is not None:
            self.signal = number
            self.exit()
        self.signal = number
        if self._quiet:
            return
        words = "\nstopping after this step, which is then saved; once more stops at once\n"
        os.write(1, words.encode())  # print may be in the middle of a line of its own


@contextmanager
def stop_by_signal(*, quiet: bool = False) -> Iterator[Stop]:
    """Take SIGINT and SIGTERM as wishes while a run trains; Python allows it in the main thread only.

    Args:
        quiet: another rank says what will happen.
    """
    stop = Stop(quiet=quiet)
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, stop.take) for number in SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
