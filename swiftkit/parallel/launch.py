"""Several processes for one run, started through torchrun's own interface."""

from __future__ import annotations

import logging
import os
import shlex
import signal
import socket
import sys
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from swiftkit.config import Auto
from swiftkit.errors import UserError
from swiftkit.parallel.worker import FOLDER, RESULT, Failure, failures, process_ids

MASTER_PORT = 29500  # torchrun's own, for several nodes
SAVES = 1800  # seconds that workers have to save and end after a signal
MEET = 900  # seconds that nodes wait for each other
TAIL = 20  # lines of a worker's own words, when it could not tell what happened


class WorkerError(Exception):
    """A worker failed, and not by a user's mistake.

    Args:
        message: one line: rank, error, file and line.
        trace: the worker's.
    """

    def __init__(self, message: str, trace: str = ""):
        super().__init__(message)
        self.trace = trace


@dataclass(frozen=True)
class Launch:
    """What is started on this node.

    Args:
        processes: here.
        nodes: machines in all.
        node_rank: of this one.
        address, port: where the nodes meet; port 0 is any free one, on a single node.
        device: cuda or cpu.
    """

    processes: int
    nodes: int
    node_rank: int
    address: str
    port: int
    device: Literal["cpu", "cuda"]

    @property
    def several(self) -> bool:
        """Whether there is more than the process that runs already."""
        return self.processes * self.nodes > 1

    def describe(self, command: list[str]) -> str:
        """What would start, for people."""
        kind = "GPU" if self.device == "cuda" else "CPU"
        if not self.several:
            return f"one process on a {kind}: this one"
        backend = "nccl" if self.device == "cuda" else "gloo"
        where = "a free port of this machine" if not self.port else f"{self.address}:{self.port}"
        ranks = range(self.node_rank * self.processes, (self.node_rank + 1) * self.processes)
        lines = [
            f"{self.processes * self.nodes} processes, {self.processes} on each of {self.nodes} node"
            f"{'s' if self.nodes > 1 else ''}, over {backend}, meeting at {where}",
            *(f"rank {rank}: {kind} {local}: {shlex.join(command)}" for local, rank in enumerate(ranks)),
        ]
        return "\n".join(lines)


def plan_launch(
    asked: int | Auto, device: str, *, environment: Mapping[str, str], gpus: int, cuda_build: bool = True
) -> Launch | None:
    """How many processes a run gets on this node; None where torchrun started this one.

    Args:
        asked: `--nproc_per_node`.
        device: auto, cpu or cuda.
        environment: NPROC_PER_NODE, NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT, CUDA_VISIBLE_DEVICES.
        gpus: that torch sees.
        cuda_build: whether torch could see any.

    Raises:
        UserError: for numbers that are none, more processes than GPUs, a list of GPUs that are not there.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return None
    place: Literal["cpu", "cuda"] = "cuda" if gpus and device != "cpu" else "cpu"
    if device != "cpu" and cuda_build:
        _check_list(environment.get("CUDA_VISIBLE_DEVICES"), gpus)
    usual = gpus if place == "cuda" else 1
    name = "--nproc_per_node" if asked != "auto" else "NPROC_PER_NODE"
    processes = asked if asked != "auto" else _number(environment, "NPROC_PER_NODE", usual)
    if processes < 1 or (place == "cuda" and processes > gpus):
        here = f"1 to {gpus}, the GPUs that torch sees here" if place == "cuda" else "at least 1"
        raise UserError(f"{name} {processes}: give {here}")
    nodes, rank = _number(environment, "NNODES", 1), _number(environment, "NODE_RANK", 0)
    if nodes < 1 or not 0 <= rank < nodes:
        raise UserError(f"NODE_RANK {rank} of NNODES {nodes}: nodes count from 0")
    address = environment.get("MASTER_ADDR", "")
    if nodes > 1 and not address:
        raise UserError(f"NNODES {nodes}: give MASTER_ADDR, the address of node 0, to every node")
    port = _number(environment, "MASTER_PORT", MASTER_PORT if nodes > 1 else 0)
    return Launch(processes, nodes, rank, address or "localhost", port, place)


def _check_list(visible: str | None, gpus: int) -> None:
    """Refuse a list that names GPUs which are not there; CUDA itself leaves them out without a word."""
    named = [word for word in (visible or "").split(",") if word.strip() not in ("", "-1")]
    if len(named) > gpus:
        raise UserError(
            f"CUDA_VISIBLE_DEVICES={visible} names {len(named)} GPU{'s' if len(named) > 1 else ''}, and "
            f"torch sees {gpus} of them; name those that `nvidia-smi -L` lists, or give --device cpu"
        )


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    written = environment.get(name) or str(default)
    try:
        return int(written)
    except ValueError:
        raise UserError(f"{name} is a number, not {written!r}") from None


def plan_here(asked: int | Auto, device: str) -> Launch | None:
    """`plan_launch` on this machine."""
    import torch

    built = torch.version.cuda is not None
    return plan_launch(
        asked, device, environment=os.environ, gpus=torch.cuda.device_count(), cuda_build=built
    )


def describe_here(asked: int | Auto, device: str, command: list[str]) -> str:
    """What would start on this machine; nothing does."""
    launch = plan_here(asked, device)
    if launch is None:
        return "one process: this one, which torchrun started"
    command = [word for word in command if word not in ("--dry_run", "--dry-run")]
    return launch.describe(command)


def command_of(verb: str, config: Path) -> list[str]:
    """What a worker runs: the same command line, over a file with the same config."""
    return [sys.executable, "-m", "swiftkit", verb, str(config)]


def start(launch: Launch, verb: str, config: str) -> Path:
    """Run a verb in worker processes until they end.

    Args:
        launch: how many, and where they meet.
        verb: sft, ...
        config: JSON of what was asked for, as `args.json` has it.

    Raises:
        UserError: a worker's, with its rank; a port that is taken; a worker that was killed.
        WorkerError: any other error of a worker.
        KeyboardInterrupt, SystemExit: the signal that stopped the run, when the workers have saved and ended.

    Returns:
        The run's folder.
    """
    _check_port(launch)
    with TemporaryDirectory(prefix="swiftkit-launch-") as name:
        folder = Path(name)
        file = folder / "config.json"
        file.write_text(config, encoding="utf-8")
        with _environment(launch, folder), _no_process_left(folder):
            _run(launch, command_of(verb, file), folder)
        result = folder / RESULT
        return Path(result.read_text(encoding="utf-8")) if result.is_file() else Path()


def _run(launch: Launch, command: list[str], folder: Path) -> None:
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    quiet = {local: Std.ALL for local in range(launch.processes) if local or launch.node_rank}
    config = LaunchConfig(
        min_nodes=launch.nodes,
        max_nodes=launch.nodes,
        nproc_per_node=launch.processes,
        # The same on every node: they meet under this name.
        run_id=f"swiftkit-{launch.port}" if launch.port else f"swiftkit-{uuid.uuid4().hex}",
        max_restarts=0,
        signals_to_handle="SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        shutdown_timeout=SAVES,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "logs"), redirects=quiet),
        **_rendezvous(launch),
    )
    _quieten()
    try:
        elastic_launch(config, command[0])(*command[1:])
    except SignalException as stopped:
        if stopped.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise SystemExit(128 + stopped.sigval) from None
    except ChildFailedError as failed:
        codes = {rank: failure.exitcode for rank, failure in failed.failures.items()}
        raise _what_failed(codes, failures(folder), folder, processes=launch.processes) from None
    except RuntimeError as failure:  # torch's word for a store that cannot be opened or reached
        words = (str(failure).strip().splitlines() or ["no reason given"])[0]
        raise UserError(f"the nodes cannot meet at {launch.address}:{launch.port}: {words}") from failure


def _rendezvous(launch: Launch) -> dict[str, Any]:
    if not launch.port:
        return {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "local_addr": "localhost"}
    return {
        "rdzv_backend": "static",
        "rdzv_endpoint": f"{launch.address}:{launch.port}",
        "rdzv_configs": {"rank": launch.node_rank, "timeout": MEET},
    }


def _what_failed(
    codes: Mapping[int, int], told: list[Failure], folder: Path, *, processes: int
) -> BaseException:
    """The error that the others followed from.

    Args:
        codes: exit codes by rank, of workers that torchrun saw fail.
        told: what workers wrote.
        folder: the launcher's.
        processes: on this node.
    """
    followed = {failure.rank for failure in told}
    killed = {rank: -code for rank, code in codes.items() if code < 0 and rank not in followed}
    first = next((failure for failure in told if not failure.follows), None)
    if first is not None:
        everyone = any(other.rank == 0 and other.message == first.message for other in told)
        whose = "" if everyone and not first.trace else f"rank {first.rank}: "
        message = f"{whose}{first.message}"
        return WorkerError(message, first.trace) if first.trace else UserError(message)
    stops = {128 + signal.SIGINT: KeyboardInterrupt(), 128 + signal.SIGTERM: SystemExit(143)}
    stopped = next((stops[code] for code in codes.values() if code in stops), None)
    # torchrun ends the others by SIGTERM, as soon as one has ended.
    if stopped is not None and all(number == signal.SIGTERM for number in killed.values()):
        return stopped
    if killed:
        rank, number = min(killed.items(), key=lambda item: (item[1] == signal.SIGTERM, item[0]))
        hint = "; is the host's memory full (dmesg)?" if number == signal.SIGKILL else ""
        words = _last_words(folder, rank % processes)
        return WorkerError(
            f"rank {rank}: its process was killed by {signal.Signals(number).name}{hint}", words
        )
    if told:
        return WorkerError(f"rank {told[0].rank}: {told[0].message}", told[0].trace)
    rank, code = min(codes.items())
    return WorkerError(f"rank {rank}: its process ended with {code}", _last_words(folder, rank % processes))


def _last_words(folder: Path, local_rank: int) -> str:
    """The end of what a worker wrote, where it did not go to the terminal."""
    files = sorted(folder.glob(f"logs/**/{local_rank}/stderr.log"))
    lines = files[-1].read_text(encoding="utf-8", errors="replace").splitlines() if files else []
    return "\n".join(lines[-TAIL:])


def _check_port(launch: Launch) -> None:
    """Refuse a port of this machine that somebody listens on, before anybody waits for it."""
    if not launch.port or launch.node_rank:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", launch.port))
        except OSError as failure:
            raise UserError(
                f"MASTER_PORT {launch.port}: {failure.strerror}; give a free port, or on one node none"
            ) from None


@contextmanager
def _environment(launch: Launch, folder: Path) -> Iterator[None]:
    """What workers inherit."""
    package = str(Path(__file__).resolve().parents[2])
    path = os.environ.get("PYTHONPATH")
    threads = max(1, (os.cpu_count() or 1) // launch.processes)
    changes = {
        FOLDER: str(folder),
        "PYTHONPATH": f"{package}{os.pathsep}{path}" if path else package,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
    }
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _no_process_left(folder: Path) -> Iterator[None]:
    """End workers that still run when the launcher ends, after a second Ctrl-C say; each leads a group."""
    try:
        yield
    finally:
        for number in process_ids(folder).values():
            with suppress(ProcessLookupError):
                os.killpg(number, signal.SIGKILL)


def _quieten() -> None:
    """torchrun's own log would stand before the error that matters."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
