"""GPUs and the links between them, through NVIDIA's management library (nvidia-ml-py, an optional package).

This is the only file that speaks to it; everything else takes the facts that are read here.
Source: https://docs.nvidia.com/deploy/nvml-api/
"""

from __future__ import annotations

from ctypes import byref
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from itertools import combinations
from typing import Any

# NVML's names of the nearest place that two GPUs share, in the words of `nvidia-smi topo -m`.
PATHS = {0: "same board", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
FABRIC = {1: "not started", 2: "in progress", 3: "completed"}
SWITCH = 2  # NVML_NVLINK_DEVICE_TYPE_SWITCH


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    Args:
        capability: as (9, 0).
        memory, memory_used: bytes.
        nvlinks: links that are up; `nvlinks_down` those that should be.
        nvlink_generation: 4 on Hopper; None without links.
        to_switch: links that end in an NVSwitch.
        pcie: generation and width that the slot gives, and that the card could take.
        uncorrected: memory errors since the driver was loaded that ECC could not mend; None without ECC.
        mig: whether the GPU is cut into instances.
        fabric: the state of the NVSwitch fabric; None where there is none.
    """

    index: int
    name: str
    capability: tuple[int, int]
    memory: int
    memory_used: int
    nvlinks: int = 0
    nvlinks_down: int = 0
    nvlink_generation: int | None = None
    to_switch: int = 0
    pcie: tuple[int, int] | None = None
    pcie_best: tuple[int, int] | None = None
    uncorrected: int | None = None
    mig: bool = False
    fabric: str | None = None


@dataclass(frozen=True)
class Pair:
    """Two GPUs.

    Args:
        nvlinks: direct links; through switches, the fewer of the two GPUs'.
        path: the nearest place in the PCIe tree that both share.
        peer: whether one can read the other's memory.
    """

    a: int
    b: int
    nvlinks: int
    path: str
    peer: bool


@dataclass(frozen=True)
class Nvml:
    """All that was read; `error` says why nothing was."""

    driver: str | None = None
    cuda: tuple[int, int] | None = None
    gpus: tuple[Gpu, ...] = ()
    pairs: tuple[Pair, ...] = ()
    error: str | None = None


def read_nvml() -> Nvml:
    """Every GPU that the driver knows, whatever CUDA_VISIBLE_DEVICES says."""
    if find_spec("pynvml") is None:
        return Nvml(error="nvidia-ml-py is not installed")
    nvml = import_module("pynvml")  # nvidia-ml-py's name inside; it has no types

    try:
        nvml.nvmlInit()
    except nvml.NVMLError as failure:
        return Nvml(error=str(failure))
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        cuda = nvml.nvmlSystemGetCudaDriverVersion()  # 12040 is 12.4
        return Nvml(
            driver=_text(nvml.nvmlSystemGetDriverVersion()),
            cuda=(cuda // 1000, cuda % 1000 // 10),
            gpus=tuple(_gpu(nvml, index, handle) for index, handle in enumerate(handles)),
            pairs=tuple(_pairs(nvml, handles)),
        )
    except nvml.NVMLError as failure:
        return Nvml(error=str(failure))
    finally:
        nvml.nvmlShutdown()


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)  # older bindings give bytes


def _asked(nvml: Any, question: Any, *arguments: Any) -> Any:
    """The answer, or None where this GPU or driver has no such thing."""
    try:
        return question(*arguments)
    except nvml.NVMLError:
        return None


def _gpu(nvml: Any, index: int, handle: Any) -> Gpu:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    links = [
        _asked(nvml, nvml.nvmlDeviceGetNvLinkState, handle, n) for n in range(nvml.NVML_NVLINK_MAX_LINKS)
    ]
    up = [number for number, state in enumerate(links) if state]
    ends = [_asked(nvml, nvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, number) for number in up]
    generation = _asked(nvml, nvml.nvmlDeviceGetNvLinkVersion, handle, up[0]) if up else None
    mig = _asked(nvml, nvml.nvmlDeviceGetMigMode, handle)
    return Gpu(
        index=index,
        name=_text(nvml.nvmlDeviceGetName(handle)),
        capability=tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle)),
        memory=memory.total,
        memory_used=memory.used,
        nvlinks=len(up),
        nvlinks_down=sum(state == 0 for state in links),
        nvlink_generation=generation,
        to_switch=sum(end == SWITCH for end in ends),
        pcie=_pcie(nvml, handle, "Curr"),
        pcie_best=_pcie(nvml, handle, "Max"),
        uncorrected=_asked(
            nvml,
            nvml.nvmlDeviceGetTotalEccErrors,
            handle,
            nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
            nvml.NVML_VOLATILE_ECC,
        ),
        mig=bool(mig and mig[0]),
        fabric=_fabric(nvml, handle),
    )


def _pcie(nvml: Any, handle: Any, which: str) -> tuple[int, int] | None:
    generation = _asked(nvml, getattr(nvml, f"nvmlDeviceGet{which}PcieLinkGeneration"), handle)
    width = _asked(nvml, getattr(nvml, f"nvmlDeviceGet{which}PcieLinkWidth"), handle)
    return (generation, width) if generation and width else None


def _fabric(nvml: Any, handle: Any) -> str | None:
    """The state of the NVSwitch fabric, which the fabric manager sets up before CUDA can start."""
    info = nvml.c_nvmlGpuFabricInfoV_t()
    answer = _asked(nvml, nvml.nvmlDeviceGetGpuFabricInfoV, handle, byref(info))
    return None if answer is None else FABRIC.get(info.state)


def _pairs(nvml: Any, handles: list[Any]) -> list[Pair]:
    ends = [_ends(nvml, handle) for handle in handles]
    addresses = [_address(nvml.nvmlDeviceGetPciInfo(handle)) for handle in handles]
    found = []
    for a, b in combinations(range(len(handles)), 2):
        path = _asked(nvml, nvml.nvmlDeviceGetTopologyCommonAncestor, handles[a], handles[b])
        peer = _asked(
            nvml, nvml.nvmlDeviceGetP2PStatus, handles[a], handles[b], nvml.NVML_P2P_CAPS_INDEX_WRITE
        )
        direct = ends[a].get(addresses[b], 0)
        switched = min(ends[a].get("switch", 0), ends[b].get("switch", 0))
        found.append(
            Pair(a, b, direct or switched, PATHS.get(path, "unknown"), peer == nvml.NVML_P2P_STATUS_OK)
        )
    return found


def _ends(nvml: Any, handle: Any) -> dict[str, int]:
    """Where a GPU's links end: at addresses of other GPUs, or at switches."""
    found: dict[str, int] = {}
    for number in range(nvml.NVML_NVLINK_MAX_LINKS):
        if not _asked(nvml, nvml.nvmlDeviceGetNvLinkState, handle, number):
            continue
        if _asked(nvml, nvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, number) == SWITCH:
            end = "switch"
        else:
            remote = _asked(nvml, nvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, number)
            end = "unknown" if remote is None else _address(remote)
        found[end] = found.get(end, 0) + 1
    return found


def _address(info: Any) -> str:
    return f"{info.domain:08x}:{info.bus:02x}:{info.device:02x}"
