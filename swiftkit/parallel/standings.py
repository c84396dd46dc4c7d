"""Where every rank of a run stands, in the key-value store through which they met.

A rank that waits in a collective cannot say for whom. So each one's watchdog, a thread, puts down where the
main thread is, over a connection of its own: that of the main thread may be waiting as well.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

ANSWERS = timedelta(seconds=10)  # a store that takes longer is not asked again
OURS = f"{Path(__file__).resolve().parents[1]}{os.sep}"
WAITING = ("parallel/collectives.py", "parallel/world.py")  # from where ranks are waited for
RECORDER = "TORCH_FR_BUFFER_SIZE"  # entries of torch's flight recorder of collective calls
ENTRIES = "2000"


@dataclass(frozen=True)
class Standing:
    """Where a rank's main thread was.

    Args:
        rank: its number.
        doing: a part of a step, and for how long.
        place: the line of ours that it was at.
        waits: whether that was a call that waits for other ranks.
        call: the last collective call it began, as torch's flight recorder has it; empty where that has none.
        time: when this was, seconds since 1970.
    """

    rank: int
    doing: str
    place: str
    waits: bool
    call: str
    time: float

    def words(self, now: float) -> str:
        """One line."""
        known = f" ({now - self.time:.0f} s ago)" if now - self.time > ANSWERS.total_seconds() else ""
        return f"rank {self.rank}: {self.doing}, at {self.place}{self.call and f', {self.call}'}{known}"


class Standings:
    """The ranks' standings, as one of them puts down its own and reads the others'.

    Args:
        rank, size: its place among all, and how many there are.
    """

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size
        self._store: Any = None
        self._lost = False

    def put(self, doing: str, frame: FrameType | None) -> None:
        """Put down what the main thread does; where the store does not answer, nothing."""
        place, waits = place_of(frame)
        own = Standing(self.rank, doing, place, waits, last_call(), time.time())
        store = self._connected()
        if store is not None:
            try:
                store.set(_key(self.rank), json.dumps(asdict(own)))
            except RuntimeError:
                self._lost = True

    def report(self) -> list[str]:
        """A line for each rank, and one that says for whom the others wait."""
        found = self._read()
        if not found:
            return ["where the other ranks are is not known: the store that they met at does not answer"]
        now = time.time()
        silent = [rank for rank in range(self.size) if rank not in {standing.rank for standing in found}]
        lines = [standing.words(now) for standing in found]
        if silent:
            lines.append(f"{_ranks(silent)}: nothing was ever heard")
        busy = [standing.rank for standing in found if not standing.waits]
        if busy and len(busy) < len(found):
            lines.append(f"the others wait for {_ranks(busy)}")
        return lines

    def _read(self) -> list[Standing]:
        found = []
        store = self._connected()
        for rank in range(self.size if store is not None else 0):
            try:
                if store.check([_key(rank)]):
                    found.append(Standing(**json.loads(store.get(_key(rank)))))
            except RuntimeError:
                self._lost = True
                break
        return found

    def _connected(self) -> Any:
        if self._store is None and not self._lost:
            host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
            try:
                if host is not None and port is not None:
                    self._store = TCPStore(
                        host, int(port), is_master=False, timeout=ANSWERS, wait_for_workers=False
                    )
            except RuntimeError:
                self._lost = True
        return None if self._lost else self._store


def record_calls() -> None:
    """Have torch's flight recorder keep the last collective calls; before the first group is made."""
    os.environ.setdefault(RECORDER, ENTRIES)


def last_call() -> str:
    """The newest collective call of this process; empty where torch has not recorded any."""
    entries = [entry for record in recorded().values() for entry in record.get("entries", [])]
    if not entries:
        return ""
    last = max(entries, key=lambda entry: entry["time_created_ns"])
    sizes = " and ".join("x".join(map(str, size)) or "one number" for size in last["input_sizes"][:3])
    name, group = last["profiling_name"], last["process_group"][1]
    return f"last call {name} of {sizes} in {group}, its {last['collective_seq_id']}th"


def recorded() -> dict[str, Any]:
    """What torch's flight recorders have of NCCL's calls and of others'; empty where this torch has none."""
    module = getattr(torch._C, "_distributed_c10d", None)
    dumps = {name: getattr(module, f"_dump_{name}_trace_json", None) for name in ("nccl", "fr")}
    found = {name: json.loads(dump() or "{}") for name, dump in dumps.items() if dump is not None}
    return {name: record for name, record in found.items() if record.get("entries")}


def place_of(frame: FrameType | None) -> tuple[str, bool]:
    """The innermost line of ours in a stack, or its innermost one, and whether ranks are waited for there."""
    innermost = frame
    waits = False
    while frame is not None:
        file = frame.f_code.co_filename
        waits = waits or f"{os.sep}torch{os.sep}distributed{os.sep}" in file
        if file.startswith(OURS):
            waits = waits or file.removeprefix(OURS).replace(os.sep, "/") in WAITING
            if frame.f_code.co_name != "_call":  # which says nothing of what is called
                return _line(frame, file.removeprefix(str(Path(OURS).parent) + os.sep)), waits
        frame = frame.f_back
    where = "no line" if innermost is None else _line(innermost, innermost.f_code.co_filename)
    return where, waits


def frame_of(thread: int) -> FrameType | None:
    """What a thread is at."""
    return sys._current_frames().get(thread)


def _line(frame: FrameType, file: str) -> str:
    return f"{file}:{frame.f_lineno} in {frame.f_code.co_name}"


def _key(rank: int) -> str:
    return f"swiftkit/standing/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{rank}"


def _ranks(numbers: Iterable[int]) -> str:
    listed = [str(number) for number in numbers]
    return f"rank {listed[0]}" if len(listed) == 1 else f"ranks {', '.join(listed)}"
