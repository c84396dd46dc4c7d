"""A run's checkpoints: one thread writes them while the training goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed import ProcessGroup

from swiftkit.errors import UserError
from swiftkit.formats.parts import together
from swiftkit.train.artifact import Artifact, read_model
from swiftkit.train.checkpoint import damage, remove_old, write_checkpoint
from swiftkit.train.run import BEST, checkpoints, write_whole
from swiftkit.train.space import check_space, checkpoint_bytes
from swiftkit.train.state import Snapshot, TrainingState


@dataclass(frozen=True)
class Best:
    """The best evaluation so far: what `best.json` says.

    Args:
        step: its checkpoint's.
        metric: what it is best by.
        value: of it.
    """

    step: int
    metric: str
    value: float


@dataclass
class Keeper:
    """Writes, keeps and removes the checkpoints of one run.

    The loop stands still only while a snapshot is copied to the host. One write is under way at a time; what
    goes wrong in it comes out at the next step, or at the end.

    Args:
        folder: the run folder.
        artifact: writes the model part.
        files: what else a checkpoint holds, such as the tokenizer.
        facts: what the run is made of, for a resume to compare.
        keep: checkpoints that stay, besides the best one and the one resumed from; None is all.
        on_error: what follows a write that fails.
        resumed: the checkpoint that this run goes on from.
        say: takes sentences for people.
        writes: whether this process does; of several, the first alone.
        group: the processes that write parts of their own besides; None where there are none, or this is not
            among them.
    """

    folder: Path
    artifact: Artifact
    files: Mapping[str, bytes]
    facts: Mapping[str, Any]
    keep: int | None = None
    on_error: Literal["stop", "continue"] = "stop"
    resumed: Snapshot | None = None
    say: Callable[[str], None] = print
    writes: bool = True
    group: ProcessGroup | None = None
    _writer: ThreadPoolExecutor = field(default_factory=partial(ThreadPoolExecutor, 1, "swiftkit-checkpoint"))
    _pending: Future[None] | None = None
    _step: int | None = None  # of the write that is under way or was the last

    def __enter__(self) -> Keeper:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait for the write under way; its error comes out unless there is one already."""
        try:
            self.wait(final=kind is None)
        finally:
            self._writer.shutdown()

    def check_space(self, state: TrainingState, optimizer: torch.optim.Optimizer, *, saves: int) -> None:
        """Refuse a run whose checkpoints will not fit on the disk.

        Raises:
            UserError: saying what is needed and what is free.
        """
        if not self.writes:
            return
        each = checkpoint_bytes(state, optimizer, self.files)
        check_space(self.folder, each=each, saves=saves, keep=self.keep)

    def save(self, state: TrainingState, *, best: Best | None, log: Mapping[str, Any]) -> None:
        """Write a checkpoint of the state as it is now; returns when the copies are made.

        Raises:
            UserError: as `wait`.
        """
        if not self.writes and self.group is None:
            state.snapshot(whole=False, parts=False)
            return
        self.wait()
        snapshot = state.snapshot(whole=self.writes)  # in any case: other ranks are giving their parts
        if self._stands(state.step):
            self.name_best(best)
            return
        self._step = state.step
        self._pending = self._writer.submit(self._write, snapshot, best, dict(log))

    def check(self) -> None:
        """Let the error of a write that has ended come out; waits for nothing.

        Raises:
            UserError: as `wait`.
        """
        if self._pending is not None and self._pending.done():
            self.wait()

    def wait(self, *, final: bool = False) -> None:
        """Wait for the write under way.

        Args:
            final: nothing will be saved after this one, so that its loss cannot be gone over.

        Raises:
            UserError: when it failed, and that should not be gone over.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            pending.result()
        except OSError as failure:
            sentence = self._sentence(failure)
            if self.on_error == "stop" or final:
                raise UserError(sentence) from failure
            self.say(f"warning   {sentence}; training goes on")

    def name_best(self, best: Best | None) -> None:
        """Make `best.json` say which checkpoint is best; without one it is not there."""
        if not self.writes:
            return
        path = self.folder / BEST
        if best is None:
            path.unlink(missing_ok=True)
            return
        content = {"checkpoint": f"checkpoint-{best.step}", "metric": best.metric, "value": best.value}
        write_whole(path, content)

    def load_best(self, state: TrainingState, step: int) -> None:
        """Set the trained tensors to those of a step's checkpoint."""
        state.set_parameters(read_model(self.folder / f"checkpoint-{step}"))

    def _stands(self, step: int) -> bool:
        """Whether this process wrote the checkpoint already, or goes on from it."""
        if self.resumed is not None and step == self.resumed.step:
            return True
        return step == self._step and (self.folder / f"checkpoint-{step}").is_dir()

    def _write(self, snapshot: Snapshot, best: Best | None, log: Mapping[str, Any]) -> None:
        if snapshot.ready is not None:
            snapshot.ready.synchronize()
        together(self.group, lambda: _check_finite(snapshot))
        write_checkpoint(
            self.folder, snapshot, artifact=self.artifact, files=self.files,
            facts={**self.facts, "log": log}, group=self.group,
        )  # fmt: skip
        if not self.writes:
            return
        if best is not None and best.step == snapshot.step:
            self.name_best(best)
        kept = (None if best is None else best.step, None if self.resumed is None else self.resumed.step)
        remove_old(self.folder, newest=snapshot.step, keep=self.keep, kept=kept)

    def _sentence(self, failure: OSError) -> str:
        sound = [path.name for path in checkpoints(self.folder) if damage(path) is None]
        older = f"{sound[-1]} is the last good one" if sound else "there is no older one"
        reason = failure.strerror or str(failure)
        return f"{self.folder}/checkpoint-{self._step} could not be written: {reason}; {older}"


def _check_finite(snapshot: Snapshot) -> None:
    odd = next((name for name, tensor in snapshot.model.items() if not tensor.isfinite().all()), None)
    if odd is not None:
        raise UserError(f"step {snapshot.step}: {odd} is not finite any more, training has diverged")
