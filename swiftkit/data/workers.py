"""Processes that encode rows beside this one, in the order in which rows are given to them."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from swiftkit.data.document import RowError
from swiftkit.data.encode import Encoded, Encoder
from swiftkit.data.lines import Row
from swiftkit.data.read import files_of_source, parse_source
from swiftkit.errors import UserError

PACKAGES = Path(__file__).parents[2]
MANY_BYTES = 32_000_000  # of files: ten seconds and more for one process
BYTES_EACH = 8_000_000  # of files, at least, for a process
ROW_BYTES = 4_096  # as a row may have
HUB_BYTES = 1_000_000_000  # as a data set may have
START = "from swiftkit.data.workers import serve; serve()"

ResultT = TypeVar("ResultT")
Result: TypeAlias = Callable[[], ResultT]
"""Gives what became of rows, or raises what their encoding raised."""


class Encoding(Protocol):
    """Takes rows; how many times it may be asked before the first result is asked for is `ahead`."""

    @property
    def ahead(self) -> int: ...

    def submit(self, rows: Sequence[Row | RowError], *, prompts: bool) -> Result[Encoded]: ...
    def submit_text(self, row: Row | RowError) -> Result[NDArray[np.int64]]: ...


@dataclass(frozen=True, slots=True)
class InProcess:
    """Encodes rows here and now."""

    encoder: Encoder
    ahead: int = 0

    def submit(self, rows: Sequence[Row | RowError], *, prompts: bool) -> Result[Encoded]:
        """See Encoding; errors are raised at once."""
        found = self.encoder.rows(rows, prompts=prompts)
        return lambda: found

    def submit_text(self, row: Row | RowError) -> Result[NDArray[np.int64]]:
        """See Encoding."""
        found = self.encoder.text(row)
        return lambda: found


class _Worker:
    """One process, which answers one request at a time.

    It is started with a command of its own, so that no user's script is imported again (as multiprocessing's
    spawn does) and no threads are copied half (as fork does).
    """

    def __init__(self, encoder: bytes) -> None:
        paths = [str(PACKAGES), *filter(None, sys.path)]
        # The processes share the cores already; the tokenizer's own threads would only wait for each other.
        few_threads = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", START],  # without the folder that it is started in
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **few_threads, "PYTHONPATH": os.pathsep.join(paths)},
        )
        self._send(encoder)

    def ask(self, method: str, *args: Any, **keywords: Any) -> Any:
        """Calls a method of the encoder in the process; its errors are raised here."""
        self._send(pickle.dumps((method, args, keywords), pickle.HIGHEST_PROTOCOL))
        assert self._process.stdout is not None
        try:
            answer: Any = pickle.load(self._process.stdout)
        except EOFError:
            raise self._death() from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def end(self) -> None:
        """Ends the process, whatever it does."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:
                continue  # what was not sent yet has nobody to read it

    def _send(self, message: bytes) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(message)
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._death() from None

    def _death(self) -> UserError:
        code = self._process.wait()
        cause = "it was killed, perhaps for want of memory" if code < 0 else "see above"
        return UserError(
            f"a process that tokenises rows has ended early (code {code}: {cause}); "
            "give fewer, as --dataset_num_proc 1"
        )


class _Pool:
    """Several processes; a thread waits for each."""

    def __init__(self, workers: list[_Worker], threads: ThreadPoolExecutor) -> None:
        self.ahead = 2 * len(workers)
        self._threads = threads
        self._idle: SimpleQueue[_Worker] = SimpleQueue()
        for worker in workers:
            self._idle.put(worker)

    def submit(self, rows: Sequence[Row | RowError], *, prompts: bool) -> Result[Encoded]:
        """See Encoding."""
        return self._threads.submit(self._ask, "rows", rows, prompts=prompts).result

    def submit_text(self, row: Row | RowError) -> Result[NDArray[np.int64]]:
        """See Encoding."""
        return self._threads.submit(self._ask, "text", row).result

    def _ask(self, method: str, *args: Any, **keywords: Any) -> Any:
        worker = self._idle.get()
        try:
            return worker.ask(method, *args, **keywords)
        finally:
            self._idle.put(worker)


def processes_for(sources: Sequence[str]) -> int:
    """One process for little data, else one a core: an own process costs seconds before its first row.

    What a hub's data set holds is not known before it is there: it counts as much.
    """
    size = 0
    for written in sources:
        source = parse_source(written)
        files = files_of_source(source)
        own = HUB_BYTES if files is None else sum(path.stat().st_size for path, _ in files)
        size += own if source.limit is None else min(own, source.limit * ROW_BYTES)
    if size < MANY_BYTES:
        return 1
    return max(1, min(_cores(), size // BYTES_EACH))


def _cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextmanager
def encoding(encoder: Encoder, *, processes: int) -> Iterator[Encoding]:
    """Encodes rows in this process, or in several beside it."""
    if processes == 1:
        yield InProcess(encoder)
        return
    written = pickle.dumps(encoder, pickle.HIGHEST_PROTOCOL)
    threads = ThreadPoolExecutor(processes)
    workers: list[_Worker] = []
    try:
        workers += [_Worker(written) for _ in range(processes)]
        yield _Pool(workers, threads)
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.end()
        threads.shutdown()


def serve() -> None:
    """What a worker process does, until its parent closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its workers
    requests = sys.stdin.buffer
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints is no answer
    encoder: Encoder = pickle.load(requests)
    while _answer(encoder, requests, answers):
        pass


def _answer(encoder: Encoder, requests: IO[bytes], answers: IO[bytes]) -> bool:
    try:
        method, args, keywords = pickle.load(requests)
    except EOFError:
        return False
    answer: Any
    try:
        answer = getattr(encoder, method)(*args, **keywords)
    except UserError as error:
        answer = error
    except Exception:
        answer = RuntimeError(f"in a worker process:\n{traceback.format_exc()}")
    pickle.dump(answer, answers, pickle.HIGHEST_PROTOCOL)
    answers.flush()
    return True
