"""A process that swiftkit's launcher started: how it ends, and how it tells what went wrong.

An environment variable gives the launcher's folder to its workers. Each writes its process id there, and its
failure; the first rank of each node writes where the result is.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from swiftkit.errors import UserError

FOLDER = "SWIFTKIT_LAUNCH_FOLDER"
RESULT = "result.txt"
OTHERS_MAY_TELL = 10.0  # seconds that a rank waits which only knows that another one is gone
FIRST_MAY_TELL = 2.0  # seconds in which the first rank may meet the same mistake: then it is not one rank's
ORPHAN_SAVES = 120.0  # seconds that a rank has to save and end when the launcher is gone


class PeerLostError(RuntimeError):
    """Another rank has ended or does not answer: what failed, failed there."""


@dataclass(frozen=True)
class Failure:
    """What ended a worker.

    Args:
        rank: the worker's.
        message: one line.
        trace: Python's, empty for a user's mistake.
        follows: it only followed from the end of another rank.
        time: of the failure, seconds.
    """

    rank: int
    message: str
    trace: str
    follows: bool
    time: float


@contextmanager
def as_worker() -> Iterator[None]:
    """Around what a worker does; in a process that the launcher did not start it does nothing."""
    folder = os.environ.get(FOLDER)
    if folder is None or "RANK" not in os.environ:
        yield
        return
    rank, place = int(os.environ["RANK"]), Path(folder)
    (place / f"pid-{rank}.txt").write_text(str(os.getpid()))
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    try:
        yield
    except KeyboardInterrupt:
        _end(128 + signal.SIGINT)
    except SystemExit as ending:  # SIGTERM, after its checkpoint
        _end(ending.code if isinstance(ending.code, int) else 1)
    except Exception as error:
        failure = _failure(rank, error)
        write(place, failure)
        if failure.follows:
            time.sleep(OTHERS_MAY_TELL)  # ended by the launcher, as soon as that knows who failed
        elif rank > 0 and isinstance(error, UserError):
            time.sleep(FIRST_MAY_TELL)
        _end(2 if isinstance(error, UserError) else 1)


def _end(code: int) -> NoReturn:
    """Without a farewell to the other ranks, who may be waiting in a call: it could wait for ever."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def write_result(path: Path) -> None:
    """Tell the launcher where the result is."""
    folder = os.environ.get(FOLDER)
    if folder is not None and os.environ.get("LOCAL_RANK") == "0":
        (Path(folder) / RESULT).write_text(str(path.resolve()), encoding="utf-8")


def write(folder: Path, failure: Failure) -> None:
    """Write a failure so that it is never half there."""
    beside = folder / f".failure-{failure.rank}"
    beside.write_text(json.dumps(asdict(failure)), encoding="utf-8")
    beside.rename(folder / f"failure-{failure.rank}.json")


def failures(folder: Path) -> list[Failure]:
    """What workers told, in the order of time; those that only followed come last."""
    found = [
        Failure(**json.loads(path.read_text(encoding="utf-8"))) for path in folder.glob("failure-*.json")
    ]
    return sorted(found, key=lambda failure: (failure.follows, failure.time))


def process_ids(folder: Path) -> dict[int, int]:
    """Of the workers that began, by rank."""
    return {int(path.stem.removeprefix("pid-")): int(path.read_text()) for path in folder.glob("pid-*.txt")}


def _failure(rank: int, error: Exception) -> Failure:
    if isinstance(error, UserError):
        return Failure(rank, str(error), "", False, time.time())
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    words = (str(error).strip().splitlines() or [""])[0]
    message = f"{type(error).__name__}: {words}{where}"
    return Failure(
        rank, message, traceback.format_exc().rstrip(), isinstance(error, PeerLostError), time.time()
    )


def _end_with_parent(parent: int) -> None:
    """Save and end when the launcher was killed: nobody else would end this process."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(ORPHAN_SAVES)
    os._exit(128 + signal.SIGTERM)
