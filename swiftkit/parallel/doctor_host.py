"""Checks of the host: Python and its packages, CUDA as torch has it, NCCL, memory, disk, network."""

from __future__ import annotations

from collections.abc import Iterator

from swiftkit.parallel.doctor_facts import OPTIONAL, Facts
from swiftkit.parallel.doctor_line import GIB, Line, dotted, few, numbers, size

OLDEST_PYTHON = (3, 11)
OLDEST = {"torch": "2.11", "transformers": "5.17", "tokenizers": "0.22", "safetensors": "0.8"}
OLDEST_NCCL = (2, 18)
SHM_NEEDED = GIB  # NCCL's rings and the workers of a data loader; a container's usual 64 MiB is not enough
DISK_NEEDED = 20 * GIB
DISK_LEAST = GIB
DISK_RATE = 200e6  # bytes/s; a whole 8B model with its optimizer is 112 GB, nine minutes at this rate
SLOWER_THAN_IT_COULD = {"NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE"}


def python(facts: Facts) -> Iterator[Line]:
    """Whether it is new enough."""
    found = f"{dotted(facts.python)} on {facts.system}, {facts.cores} cores"
    if facts.python < OLDEST_PYTHON:
        yield Line("Python", "broken", found, f"install Python {dotted(OLDEST_PYTHON)} or newer")
    else:
        yield Line("Python", "good", found)


def packages(facts: Facts) -> Iterator[Line]:
    """Versions of what is needed, and which extras are there."""
    for name, oldest in OLDEST.items():
        installed = facts.packages.get(name)
        if installed is None:
            yield Line(name, "broken", "not installed", f"pip install '{name}>={oldest}'")
        elif numbers(installed) < numbers(oldest):
            yield Line(name, "broken", installed, f"pip install '{name}>={oldest}'")
        else:
            yield Line(name, "good", installed)
    there = [f"{name} {facts.packages[name]}" for name in OPTIONAL if facts.packages.get(name)]
    missing = [f"{name} for {use}" for name, use in OPTIONAL.items() if not facts.packages.get(name)]
    found = f"{', '.join(there) or 'none'}" + (f"; not there: {', '.join(missing)}" if missing else "")
    yield Line("optional packages", "good", found)


def cuda(facts: Facts) -> Iterator[Line]:
    """CUDA as torch has it, and whether it reaches the GPUs that the driver has."""
    torch, gpus = facts.torch, facts.nvml.gpus
    if torch.version is None:
        yield Line(
            "torch starts", "broken", torch.error or "no", "reinstall torch: pip install --force torch"
        )
    elif torch.cuda is None:
        if gpus:
            mend = "install torch's CUDA build, as https://pytorch.org/get-started says for your driver"
            yield Line("CUDA", "broken", "torch is built for CPUs, and there are GPUs", mend)
        return
    elif torch.error is not None and gpus:
        yield Line(
            "CUDA", "broken", f"torch has {torch.cuda} and cannot start it: {torch.error}", _start(facts)
        )
    elif torch.sees < len(gpus):
        hidden = facts.environment.get("CUDA_VISIBLE_DEVICES")
        mend = (
            f"CUDA_VISIBLE_DEVICES is {hidden}; unset it to use all" if hidden else "look into dmesg for Xid"
        )
        found = f"torch has {torch.cuda} and sees {torch.sees} of {len(gpus)} GPUs"
        yield Line("CUDA", "weak" if hidden else "broken", found, mend)
    else:
        yield Line("CUDA", "good", f"torch has {torch.cuda} and sees {torch.sees} GPUs")


def _start(facts: Facts) -> str:
    """Why CUDA does not start, the likeliest first."""
    if any(gpu.fabric in ("not started", "in progress") for gpu in facts.nvml.gpus):
        return "start the NVSwitch fabric: systemctl start nvidia-fabricmanager"
    built, driver = numbers(facts.torch.cuda or ""), facts.nvml.cuda
    if driver and built[:1] > driver[:1]:
        return (
            f"the driver is for CUDA {dotted(driver)}: update it, or take a torch built for CUDA {driver[0]}"
        )
    return "reboot, or reload the driver; nvidia-smi and dmesg say more"


def nccl(facts: Facts) -> Iterator[Line]:
    """Its version, and variables that make it slower."""
    torch, several = facts.torch, len(facts.nvml.gpus) > 1 or facts.torch.sees > 1
    if torch.cuda is None or torch.version is None:
        return
    if torch.nccl is None:
        if several:
            yield Line("NCCL", "broken", "this torch has none", "install torch's usual CUDA build for Linux")
    elif torch.nccl < OLDEST_NCCL:
        mend = f"pip install -U nvidia-nccl-cu{torch.cuda.split('.')[0]}, to {dotted(OLDEST_NCCL)} or newer"
        yield Line("NCCL", "broken", dotted(torch.nccl), mend)
    else:
        yield Line("NCCL", "good", dotted(torch.nccl))
    off = sorted(name for name in SLOWER_THAN_IT_COULD if facts.environment.get(name) not in (None, "", "0"))
    if off and several:
        mend = f"unset {' '.join(off)}"
        yield Line("NCCL's environment", "weak", f"{', '.join(off)} set: slower links are taken", mend)


def network(facts: Facts) -> Iterator[Line]:
    """InfiniBand and RoCE ports."""
    if not facts.ports:
        if facts.nvml.gpus or facts.torch.sees:
            found = "no InfiniBand or RoCE device: one node needs none, several would talk over TCP"
            yield Line("network", "good", found)
        return
    active = [port for port in facts.ports if port.state == "ACTIVE"]
    down = [f"{port.device}/{port.number} is {port.state}" for port in facts.ports if port.state != "ACTIVE"]
    kinds = sorted({"InfiniBand" if port.layer == "InfiniBand" else "RoCE" for port in active})
    total = sum(port.gbits for port in active)
    if not active:
        mend = "plug the cables, then ibstat; for InfiniBand a subnet manager must run"
        yield Line("network", "weak", f"no port is active: {few(down)}", mend)
        return
    names = f"{len(active)} ports of {' and '.join(kinds)}, {total:,.0f} Gbit/s together"
    if down:
        mend = (
            f"NCCL_IB_HCA={','.join(port.device for port in active)} leaves them out, if they are not meant"
        )
        yield Line("network", "weak", f"{names}; {few(down)}", mend)
    else:
        yield Line("network", "good", names)


def host_memory(facts: Facts) -> Iterator[Line]:
    """Room on the host, beside that of the GPUs."""
    if facts.memory is None or facts.memory_free is None:
        yield Line("host memory", "good", "cannot be read on this system")
        return
    found = f"{facts.memory_free / GIB:.0f} of {facts.memory / GIB:.0f} GiB free"
    on_gpus = sum(gpu.memory for gpu in facts.nvml.gpus)
    if facts.memory_free < 2 * GIB:
        yield Line("host memory", "broken", found, "end other programs; a model is read through host memory")
    elif facts.memory < on_gpus / 2:
        found += f", less than half of the GPUs' {on_gpus / GIB:.0f}"
        yield Line(
            "host memory", "weak", found, "a whole model's checkpoint may not pass through it; LoRA's will"
        )
    else:
        yield Line("host memory", "good", found)


def shared_memory(facts: Facts) -> Iterator[Line]:
    """Room in /dev/shm, through which processes of a node exchange data."""
    if facts.shm is None or facts.shm_free is None:
        return
    several = max(len(facts.nvml.gpus), facts.torch.sees) > 1
    found = f"{size(facts.shm_free)} of {size(facts.shm)} free in /dev/shm"
    if facts.shm_free >= SHM_NEEDED:
        yield Line("shared memory", "good", found)
    else:
        mend = (
            "docker run --shm-size=16g (or --ipc=host); Kubernetes: an emptyDir of medium Memory at /dev/shm"
        )
        yield Line(
            "shared memory", "broken" if several and facts.shm_free < SHM_NEEDED / 4 else "weak", found, mend
        )


def checkpoint_disk(facts: Facts) -> Iterator[Line]:
    """Room and speed of where checkpoints go."""
    disk = facts.disk
    if disk.error is not None:
        yield Line("checkpoint disk", "broken", f"{disk.path}: {disk.error}", "give another --output_dir")
        return
    speed = "" if disk.rate is None else f", written at {disk.rate / 1e6:,.0f} MB/s"
    found = f"{disk.path}: {disk.free / GIB:,.0f} GiB free{speed}"
    if disk.free < DISK_LEAST:
        yield Line("checkpoint disk", "broken", found, "make room, or give another --output_dir")
    elif disk.free < DISK_NEEDED:
        mend = "enough for adapters; for whole models make room, or give another --output_dir"
        yield Line("checkpoint disk", "weak", found, mend)
    elif disk.rate is not None and disk.rate < DISK_RATE:
        mend = "adapters are small; for whole models give an --output_dir on a local disk"
        yield Line("checkpoint disk", "weak", found, mend)
    else:
        yield Line("checkpoint disk", "good", found)
