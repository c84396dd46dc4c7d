"""What a machine has, as plain facts. They are collected here and judged in `doctor.py`."""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from swiftkit.parallel.doctor_nvml import Nvml, read_nvml

REQUIRED = ("torch", "transformers", "tokenizers", "safetensors")
OPTIONAL = {
    "nvidia-ml-py": "swiftkit doctor on GPUs",
    "bitsandbytes": "--optim adamw_8bit",
    "datasets": "data sets of a hub",
    "modelscope": "ModelScope's hub",
    "pyarrow": "parquet files",
    "wandb": "--report_to wandb",
    "lm_eval": "swiftkit eval --tasks",
}
"""Packages of the extras, and what each is for."""
WRITTEN = 256 * 2**20  # bytes that the disk is timed with, at most
BLOCK = 8 * 2**20
WRITING_SECONDS = 3.0


@dataclass(frozen=True)
class Torch:
    """What PyTorch says of itself.

    Args:
        cuda: the CUDA it was built with; None is a build for CPUs.
        nccl: the NCCL it comes with, as (2, 27, 3).
        sees: GPUs that it can use.
        names: of these.
        error: what it said where it failed to start or to see them.
    """

    version: str | None = None
    cuda: str | None = None
    nccl: tuple[int, ...] | None = None
    sees: int = 0
    names: tuple[str, ...] = ()
    error: str | None = None


@dataclass(frozen=True)
class Port:
    """One port of an InfiniBand or RoCE device.

    Args:
        layer: InfiniBand, or Ethernet for RoCE.
        state: ACTIVE, DOWN, INIT, ARMED.
        gbits: its rate in Gbit/s.
    """

    device: str
    number: int
    layer: str
    state: str
    gbits: float


@dataclass(frozen=True)
class Disk:
    """Where checkpoints go.

    Args:
        path: the folder asked about.
        free: bytes.
        rate: bytes/s of writing down to the disk; None where nothing could be written.
        error: why nothing could.
    """

    path: str
    free: int
    rate: float | None = None
    error: str | None = None


@dataclass(frozen=True)
class Facts:
    """All that the doctor judges. Sizes in bytes.

    Args:
        python: as (3, 11, 7).
        packages: versions of required and optional ones, None for one that is not there.
        memory, memory_free: of the host; the limit of a container counts.
        shm, shm_free: /dev/shm; None on systems that have none.
        environment: the variables of NCCL and CUDA that are set.
        driver_loaded: whether the kernel has NVIDIA's driver, which it has for GPUs only.
    """

    system: str
    python: tuple[int, ...]
    cores: int
    memory: int | None
    memory_free: int | None
    shm: int | None
    shm_free: int | None
    packages: dict[str, str | None]
    torch: Torch
    nvml: Nvml
    ports: tuple[Port, ...]
    disk: Disk
    environment: dict[str, str]
    driver_loaded: bool = False


def collect(output_dir: str) -> Facts:
    """Look at this machine; a few seconds, most of them for torch and the disk.

    Args:
        output_dir: where checkpoints will go.
    """
    memory, memory_free = host_memory()
    shm, shm_free = shared_memory()
    kept = ("NCCL_", "CUDA_", "GLOO_")
    return Facts(
        system=f"{platform.system()} {platform.release()}",
        python=tuple(int(part) for part in platform.python_version_tuple()[:2]),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory=memory,
        memory_free=memory_free,
        shm=shm,
        shm_free=shm_free,
        packages={name: _version(name) for name in (*REQUIRED, *OPTIONAL)},
        torch=read_torch(),
        nvml=read_nvml(),
        ports=tuple(read_ports(Path("/sys/class/infiniband"))),
        disk=read_disk(output_dir),
        environment={name: value for name, value in sorted(os.environ.items()) if name.startswith(kept)},
        driver_loaded=Path("/proc/driver/nvidia/version").exists(),
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def read_torch() -> Torch:
    """What torch was built with, and how many GPUs it can use."""
    try:
        import torch
    except (ImportError, OSError) as failure:  # OSError: one of its libraries does not load
        return Torch(error=" ".join(str(failure).split()) or type(failure).__name__)
    cuda = torch.version.cuda
    nccl = None
    if cuda is not None and torch.distributed.is_nccl_available():
        nccl = tuple(int(part) for part in torch.cuda.nccl.version()[:3])
    error, names = None, tuple[str, ...]()
    if cuda is not None:
        try:
            torch.cuda.init()
            names = tuple(torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count()))
        except (RuntimeError, AssertionError) as failure:  # no driver, a driver too old, a fabric not started
            error = str(failure).splitlines()[0]
    return Torch(version=torch.__version__, cuda=cuda, nccl=nccl, sees=len(names), names=names, error=error)


def host_memory(root: Path = Path("/")) -> tuple[int | None, int | None]:
    """Bytes of the host's memory and of what is free of it; in a container at most its limit."""
    meminfo = root / "proc" / "meminfo"
    if not meminfo.is_file():
        return None, None
    lines = (line.split() for line in meminfo.read_text(encoding="utf-8").splitlines())
    kibibytes = {words[0].rstrip(":"): int(words[1]) for words in lines if len(words) > 1}
    total = kibibytes["MemTotal"] * 1024
    free = kibibytes.get("MemAvailable", kibibytes["MemFree"]) * 1024
    limit = _number(root / "sys/fs/cgroup/memory.max")  # cgroup 2; "max" is no limit
    used = _number(root / "sys/fs/cgroup/memory.current")
    if limit is None or limit >= total:
        return total, free
    return limit, min(free, limit - used) if used is not None else min(free, limit)


def _number(file: Path) -> int | None:
    try:
        text = file.read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def shared_memory(folder: str = "/dev/shm") -> tuple[int | None, int | None]:
    """Bytes of the shared memory that processes exchange data through, and of what is free of it."""
    if not os.path.isdir(folder):
        return None, None
    usage = shutil.disk_usage(folder)
    return usage.total, usage.free


def read_ports(folder: Path) -> list[Port]:
    """InfiniBand and RoCE ports, as the kernel lists them in /sys/class/infiniband.

    Source: https://docs.kernel.org/infiniband/sysfs.html
    """
    found = []
    for port in sorted(folder.glob("*/ports/*")):
        text = {name: _line(port / name) for name in ("state", "rate", "link_layer")}
        rate = text["rate"].split()  # "400 Gb/sec (4X NDR)"
        found.append(
            Port(
                device=port.parent.parent.name,
                number=int(port.name),
                layer=text["link_layer"] or "InfiniBand",
                state=text["state"].rpartition(":")[2].strip() or "unknown",  # "4: ACTIVE"
                gbits=float(rate[0]) if rate else 0.0,
            )
        )
    return found


def _line(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:  # a port of which the driver gives no rate
        return ""


def read_disk(output_dir: str) -> Disk:
    """Room and speed of the disk below a folder, which need not be there yet; what is written is removed."""
    folder = Path(output_dir).expanduser().absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if not folder.is_dir():
        return Disk(output_dir, free, error=f"{folder} is a file")
    block, written = os.urandom(BLOCK), 0
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            begin = time.perf_counter()
            while written < min(WRITTEN, free // 4) and time.perf_counter() - begin < WRITING_SECONDS:
                written += file.write(block)
            file.flush()
            os.fsync(file.fileno())
            seconds = time.perf_counter() - begin
    except OSError as failure:
        return Disk(output_dir, free, error=failure.strerror or str(failure))
    return Disk(output_dir, free, rate=written / seconds if written else None)
