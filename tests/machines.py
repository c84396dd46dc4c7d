"""Facts of machines that nobody has to own: a good node of eight, and a laptop."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

from swiftkit.parallel.doctor_facts import Disk, Facts, Port, Torch
from swiftkit.parallel.doctor_nvml import Gpu, Nvml, Pair

GIB = 2**30
PACKAGES = {"torch": "2.13.0+cu130", "transformers": "5.24.0", "tokenizers": "0.23.3", "safetensors": "0.8.0"}
H100 = Gpu(
    index=0, name="NVIDIA H100 80GB HBM3", capability=(9, 0), memory=80 * GIB, memory_used=GIB, nvlinks=18,
    nvlink_generation=4, to_switch=18, pcie=(5, 16), pcie_best=(5, 16), uncorrected=0, fabric="completed",
)  # fmt: skip

LAPTOP = Facts(
    system="Linux 6.1",
    python=(3, 11),
    cores=8,
    memory=16 * GIB,
    memory_free=9 * GIB,
    shm=8 * GIB,
    shm_free=8 * GIB,
    packages=dict(PACKAGES),
    torch=Torch("2.13.0+cpu"),
    nvml=Nvml(error="nvidia-ml-py is not installed"),
    ports=(),
    disk=Disk("output", 500 * GIB, 2e9),
    environment={},
)


def node(gpu: Gpu = H100, count: int = 8, *, links: int = 18, path: str = "SYS", peer: bool = True) -> Facts:
    """A node of equal GPUs."""
    gpus = tuple(replace(gpu, index=index) for index in range(count))
    pairs = tuple(Pair(a, b, links, path, peer) for a, b in combinations(range(count), 2))
    return replace(
        LAPTOP,
        cores=192,
        memory=2048 * GIB,
        memory_free=2000 * GIB,
        shm=1024 * GIB,
        shm_free=1024 * GIB,
        torch=Torch("2.13.0+cu130", "13.0", (2, 27, 3), count, (gpu.name,) * count),
        nvml=Nvml("580.95.05", (13, 0), gpus, pairs),
        ports=tuple(Port(f"mlx5_{n}", 1, "InfiniBand", "ACTIVE", 400.0) for n in range(count)),
        driver_loaded=True,
    )
