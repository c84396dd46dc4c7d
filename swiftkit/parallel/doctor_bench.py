"""`swiftkit doctor --bench`: what the machine really gives, beside what its links should.

Bandwidth is that of the bus, as nccl-tests count it: of an all-reduce 2 (n - 1) / n of the message over the
time, of an all-gather (n - 1) / n of the result. So it can be put beside the speed of a link, whatever n is.
Source: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from swiftkit.errors import UserError
from swiftkit.parallel.doctor_facts import Facts
from swiftkit.parallel.doctor_gpus import link_rate, pcie_rate
from swiftkit.parallel.doctor_line import Line, Verdict, size
from swiftkit.parallel.doctor_nccl import NcclLog, read_log
from swiftkit.parallel.doctor_rates import Rate, read_rates
from swiftkit.parallel.options import DoctorConfig
from swiftkit.plan.machine import H200_NODE

GB = 1e9
GOOD, WEAK = 0.7, 0.4  # shares of a link's published rate
DEADLINE = 240.0  # seconds for all processes together
LARGEST_MIB = {"cuda": 1024, "cpu": 16}
NAMES = {"all_reduce": "all-reduce", "all_gather": "all-gather", "point_to_point": "point to point"}


@dataclass(frozen=True)
class Bench:
    """All that was measured.

    Args:
        device: cpu or cuda.
        rates: of one device alone.
        processes: that exchanged data.
        bandwidth: by collective, bytes of the message and bytes/s of the bus.
        log: what NCCL said it took.
    """

    device: str
    rates: tuple[Rate, ...]
    processes: int
    bandwidth: dict[str, list[tuple[int, float]]]
    log: NcclLog

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return asdict(self)

    def table(self) -> list[str]:
        """Bandwidth by size, as text."""
        if not self.bandwidth:
            return []
        columns = list(self.bandwidth)
        backend = "NCCL" if self.device == "cuda" else "gloo"
        rows = [f"GB/s of the bus, {self.processes} processes, {backend}"]
        rows.append("message".rjust(12) + "".join(NAMES[name].rjust(16) for name in columns))
        for at, (bytes_of, _) in enumerate(self.bandwidth[columns[0]]):
            cells = (f"{self.bandwidth[name][at][1] / GB:,.2f}".rjust(16) for name in columns)
            rows.append(size(bytes_of).rjust(12) + "".join(cells))
        return rows


def measure(config: DoctorConfig, facts: Facts) -> Bench:
    """Measure one device, then the links between several.

    Args:
        config: on what, with how many processes, up to which size.
        facts: of this machine.

    Raises:
        UserError: for more processes than GPUs, or where a process fails.
    """
    gpus = facts.torch.sees
    device = config.device if config.device != "auto" else "cuda" if gpus else "cpu"
    if device == "cuda" and not gpus:
        raise UserError("--device cuda: torch sees no GPU here; the lines above say why")
    processes = config.nproc if config.nproc != "auto" else gpus if device == "cuda" else 2
    if device == "cuda" and processes > gpus:
        raise UserError(f"--nproc {processes}: torch sees {gpus} GPUs, and each process needs one of its own")
    largest = 2**20 * (config.max_mib if config.max_mib != "auto" else LARGEST_MIB[device])
    rates = tuple(read_rates(device))
    seconds, log = exchange(device, processes, largest) if processes > 1 else ({}, "")
    bandwidth = {
        name: [(bytes_of, bus_bandwidth(name, bytes_of, taken, processes)) for bytes_of, taken in samples]
        for name, samples in seconds.items()
    }
    found = Bench(device, rates, processes, bandwidth, read_log(log))
    if bandwidth and config.plot != "none":
        draw(found, Path(config.plot), expected(facts, device))
    return found


def bus_bandwidth(collective: str, message: int, seconds: float, processes: int) -> float:
    """Bytes/s that a link carried.

    Args:
        collective: all_reduce, all_gather or point_to_point.
        message: bytes; of a gather, of its result.
        seconds: of one call.
        processes: that took part.
    """
    share = {
        "all_reduce": 2 * (processes - 1) / processes,
        "all_gather": (processes - 1) / processes,
        "point_to_point": 1.0,
    }
    return share[collective] * message / seconds


def exchange(device: str, processes: int, largest: int) -> tuple[dict[str, list[tuple[int, float]]], str]:
    """Start processes that talk to each other, and read what they measured.

    Args:
        device: cpu (gloo) or cuda (NCCL, one GPU each).
        processes: how many.
        largest: bytes of the largest message.

    Returns:
        Seconds by collective and size, and NCCL's log.

    Raises:
        UserError: where a process fails or all of them hang; it names the rank and what it said.
    """
    with tempfile.TemporaryDirectory(prefix="swiftkit-doctor-") as name:
        folder = Path(name)
        command = [sys.executable, "-m", "swiftkit.parallel.doctor_worker", "--device", device]
        command += ["--largest", str(largest), "--folder", name]
        running = []
        for rank in range(processes):
            with (folder / f"{rank}.log").open("wb") as log:
                running.append(
                    subprocess.Popen(
                        command, env=_environment(rank, processes, folder), stdout=log, stderr=log
                    )
                )
        try:
            _wait(running, folder)
        finally:
            for process in running:
                process.kill()
                process.wait()
        seconds = json.loads((folder / "seconds.json").read_text(encoding="utf-8"))
        spoken = "\n".join(
            file.read_text(encoding="utf-8", errors="replace") for file in folder.glob("nccl.*")
        )
        return {key: [(int(a), float(b)) for a, b in samples] for key, samples in seconds.items()}, spoken


def _environment(rank: int, processes: int, folder: Path) -> dict[str, str]:
    told = {
        "RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "OMP_NUM_THREADS": "1",
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,GRAPH,P2P,SHM,NET",
        "NCCL_DEBUG_FILE": str(folder / f"nccl.{rank}.log"),
    }
    # NVLink multicast is left out: training does not depend on it, so what counts is the speed without.
    return {"NCCL_NVLS_ENABLE": "0", **os.environ, **told}


def _wait(running: list[subprocess.Popen[bytes]], folder: Path) -> None:
    """Until all have ended well; the first that fails ends the wait."""
    begin = time.monotonic()
    while any(process.poll() is None for process in running):
        failed = [rank for rank, process in enumerate(running) if process.poll()]
        if failed or time.monotonic() - begin > DEADLINE:
            break
        time.sleep(0.05)
    failed = [rank for rank, process in enumerate(running) if process.poll()]
    if failed:
        said = (folder / f"{failed[0]}.log").read_text(encoding="utf-8", errors="replace").strip()
        last = said.splitlines()[-1] if said else f"exit code {running[failed[0]].returncode}"
        raise UserError(f"--bench: process {failed[0]} of {len(running)} failed: {last}")
    if any(process.poll() is None for process in running):
        raise UserError(
            f"--bench: {len(running)} processes did not end within {DEADLINE:.0f} s; a link may hang: try "
            "--nproc 2, and NCCL_P2P_DISABLE=1 to see whether it is a link between GPUs"
        )


def expected(facts: Facts, device: str, collective: str = "all_reduce") -> tuple[str, float] | None:
    """The published speed of the slowest link, in one direction; None where nothing is known.

    Args:
        facts: of this machine.
        device: cpu or cuda.
        collective: one between two GPUs has the links of that pair, others all of a GPU's.
    """
    gpus, pairs = facts.nvml.gpus, facts.nvml.pairs
    if device == "cpu" or not pairs:
        return None
    rates = [rate for gpu in gpus if (rate := link_rate(gpu))]
    if all(pair.nvlinks for pair in pairs) and len(rates) == len(gpus):
        share = 1.0
        if collective == "point_to_point":
            share = min(pair.nvlinks / max(gpus[pair.a].nvlinks, gpus[pair.b].nvlinks) for pair in pairs)
        return "NVLink", share * min(rates)
    slots = [pcie_rate(gpu) for gpu in gpus]
    return ("PCIe", min(rate for rate in slots if rate)) if all(slots) else None


def verdicts(bench: Bench, facts: Facts) -> list[Line]:
    """What was measured, judged."""
    return [*_rates(bench), *_bandwidths(bench, facts), *_transport(bench, facts)]


def _rates(bench: Bench) -> Iterator[Line]:
    """One device alone; of Hopper cards it is known what they should give."""
    known = {"bf16 products": H200_NODE.bf16, "FP8 products": H200_NODE.fp8}
    for rate in bench.rates:
        hopper = any(word in rate.device for word in ("H100", "H200"))
        slower = any(word in rate.device for word in ("PCIe", "NVL"))  # the same chip with less power
        should = known.get(rate.name) if hopper and not slower else None
        found = f"{rate.shown()}" + (f", {rate.value / should:.2f} of what an H200 read" if should else "")
        if should and rate.value < GOOD * should:
            mend = (
                "nvidia-smi -q -d PERFORMANCE,CLOCK,POWER: a limit, or heat, or another program on the card"
            )
            yield Line(rate.name, "weak", found, mend)
        else:
            yield Line(rate.name, "good", found)


def _bandwidths(bench: Bench, facts: Facts) -> Iterator[Line]:
    if not bench.bandwidth:
        yield Line("links", "good", f"one {bench.device}: there is no link to measure")
        return
    for name, samples in bench.bandwidth.items():
        should = expected(facts, bench.device, name)
        rate = max(bandwidth for _, bandwidth in samples)
        found = f"{rate / GB:,.1f} GB/s at best"
        if should is None:
            yield Line(
                NAMES[name], "good", f"{found}, between {bench.processes} processes on the {bench.device}"
            )
            continue
        link, published = should
        share = rate / published
        found += f", {share:.2f} of {published / GB:,.0f} GB/s ({link})"
        yield Line(NAMES[name], *_share(share, found))


def _share(share: float, found: str) -> tuple[Verdict, str, str]:
    if share >= GOOD:
        return "good", found, ""
    mend = "see which transport was taken below; nvidia-smi nvlink -s, nvidia-smi topo -m"
    return ("weak" if share >= WEAK else "broken"), found, mend


def _transport(bench: Bench, facts: Facts) -> Iterator[Line]:
    """Whether NCCL took NVLink where there is one."""
    log = bench.log
    if bench.device == "cpu" or not bench.bandwidth:
        return
    taken = ", ".join(f"{count} connections by {kind}" for kind, count in log.transports.items())
    paths = f" (paths {', '.join(log.paths)})" if log.paths else ""
    pairs = facts.nvml.pairs
    linked = bool(pairs) and all(pair.nvlinks for pair in pairs)
    if not log.transports:
        yield Line(
            "NCCL took", "weak", "its log names no connection", "NCCL_DEBUG may be set elsewhere; unset it"
        )
    elif linked and set(log.transports) != {"P2P"}:
        mend = "unset NCCL_P2P_DISABLE; check peer access above, and nvidia-smi topo -p2p n"
        yield Line("NCCL took", "broken", f"{taken}, and not NVLink only{paths}", mend)
    elif linked:
        yield Line("NCCL took", "good", f"NVLink: {taken}{paths}")
    else:
        yield Line("NCCL took", "good", f"{taken}{paths}")


def draw(bench: Bench, file: Path, should: tuple[str, float] | None) -> None:
    """The curve of bandwidth by size.

    Args:
        bench: what was measured.
        file: the image.
        should: name and bytes/s of the link, drawn as a line.

    Raises:
        UserError: where the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for name, samples in bench.bandwidth.items():
        axes.plot(
            *zip(*((a / 2**20, b / GB) for a, b in samples), strict=True), marker="o", label=NAMES[name]
        )
    if should is not None:
        axes.axhline(should[1] / GB, linestyle="--", color="grey", label=f"{should[0]}, published")
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="message, MiB",
        ylabel="bandwidth of the bus, GB/s",
        title=f"{bench.processes} processes on the {bench.device}",
    )
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(file, dpi=120)
    except OSError as failure:
        raise UserError(f"--plot {file}: {failure.strerror}") from None
