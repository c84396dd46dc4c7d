"""The seam to NVML: a stand-in for the library answers as real ones do, with an error for what a card lacks.

Where there is a GPU, `test_nvml_really_read` reads the library itself.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from ctypes import Structure, c_uint
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from swiftkit.parallel import doctor_nvml
from swiftkit.parallel.doctor_nvml import Pair, read_nvml

SWITCHED, BRIDGED = "switched", "bridged"


class NVMLError(Exception):
    """What the library raises for everything."""


class Fabric(Structure):
    _fields_ = [("version", c_uint), ("state", c_uint)]


def library(kind: str, *, count: int = 2, down: tuple[int, ...] = ()) -> ModuleType:
    """NVML of a machine whose GPUs are linked through switches, or each with its neighbour."""
    links = 18 if kind == SWITCHED else 4

    def state(gpu: int, link: int) -> int:
        if link >= links:
            raise NVMLError("Invalid Argument")
        return int(not (gpu == 0 and link in down))

    def address(gpu: int) -> SimpleNamespace:
        return SimpleNamespace(domain=0, bus=16 + gpu, device=0)

    def refuse(*_: object) -> Any:
        raise NVMLError("Not Supported")

    answers: dict[str, Callable[..., Any]] = {
        "Init": lambda: None,
        "Shutdown": lambda: None,
        "SystemGetDriverVersion": lambda: b"580.95.05",
        "SystemGetCudaDriverVersion": lambda: 13010,
        "DeviceGetCount": lambda: count,
        "DeviceGetHandleByIndex": lambda index: index,
        "DeviceGetName": lambda gpu: "NVIDIA H100 80GB HBM3",
        "DeviceGetMemoryInfo": lambda gpu: SimpleNamespace(total=80 * 2**30, used=2**30),
        "DeviceGetCudaComputeCapability": lambda gpu: (9, 0),
        "DeviceGetNvLinkState": state,
        "DeviceGetNvLinkRemoteDeviceType": lambda gpu, link: 2 if kind == SWITCHED else 0,
        "DeviceGetNvLinkRemotePciInfo": lambda gpu, link: address(gpu ^ 1),
        "DeviceGetNvLinkVersion": lambda gpu, link: 4,
        "DeviceGetPciInfo": address,
        "DeviceGetMigMode": refuse if kind == BRIDGED else lambda gpu: [0, 0],
        "DeviceGetTotalEccErrors": refuse if kind == BRIDGED else lambda gpu, kind, counter: 0,
        "DeviceGetCurrPcieLinkGeneration": lambda gpu: 1,
        "DeviceGetMaxPcieLinkGeneration": lambda gpu: 5,
        "DeviceGetCurrPcieLinkWidth": lambda gpu: 16,
        "DeviceGetMaxPcieLinkWidth": lambda gpu: 16,
        "DeviceGetTopologyCommonAncestor": lambda a, b: 50,
        "DeviceGetP2PStatus": lambda a, b, index: 0 if kind == SWITCHED or a ^ 1 == b else 5,
        "DeviceGetGpuFabricInfoV": _fabric if kind == SWITCHED else refuse,
    }
    module = ModuleType("pynvml")
    module.__spec__ = ModuleSpec("pynvml", None)
    constants = {"NVML_NVLINK_MAX_LINKS": 36, "NVML_P2P_STATUS_OK": 0, "NVML_P2P_CAPS_INDEX_WRITE": 1}
    constants |= {"NVML_MEMORY_ERROR_TYPE_UNCORRECTED": 1, "NVML_VOLATILE_ECC": 0}
    module.__dict__.update({f"nvml{name}": answer for name, answer in answers.items()} | constants)
    module.__dict__.update(NVMLError=NVMLError, c_nvmlGpuFabricInfoV_t=Fabric)
    return module


def _fabric(gpu: int, info: Any) -> int:
    info._obj.state = 3
    return 0


def test_through_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", library(SWITCHED, count=8))
    found = read_nvml()
    assert (found.error, found.driver, found.cuda) == (None, "580.95.05", (13, 1))
    assert [gpu.index for gpu in found.gpus] == list(range(8))
    gpu = found.gpus[5]
    assert (gpu.nvlinks, gpu.nvlinks_down, gpu.to_switch, gpu.nvlink_generation) == (18, 0, 18, 4)
    assert (gpu.pcie, gpu.pcie_best, gpu.uncorrected, gpu.mig, gpu.fabric) == (
        (1, 16), (5, 16), 0, False, "completed",
    )  # fmt: skip
    assert len(found.pairs) == 28
    assert found.pairs[0] == Pair(0, 1, 18, "SYS", True)


def test_bridges_between_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", library(BRIDGED, count=4, down=(3,)))
    found = read_nvml()
    gpu = found.gpus[0]
    assert (gpu.nvlinks, gpu.nvlinks_down, gpu.to_switch) == (3, 1, 0)
    assert (gpu.uncorrected, gpu.mig, gpu.fabric) == (None, False, None)
    assert {(pair.a, pair.b): (pair.nvlinks, pair.peer) for pair in found.pairs} == {
        (0, 1): (3, True), (0, 2): (0, False), (0, 3): (0, False),
        (1, 2): (0, False), (1, 3): (0, False), (2, 3): (4, True),
    }  # fmt: skip


def test_a_library_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    module = library(SWITCHED)

    def refuse() -> None:
        raise NVMLError("Driver Not Loaded")

    monkeypatch.setattr(module, "nvmlInit", refuse, raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", module)
    assert read_nvml().error == "Driver Not Loaded"


def test_every_name_is_one_of_the_library() -> None:
    """Where the library is installed, all that the seam asks it for is there."""
    real = pytest.importorskip("pynvml")
    source = Path(doctor_nvml.__file__).read_text(encoding="utf-8")
    names = set(re.findall(r"\bnvml\.(\w+)", source))
    names |= {
        f"nvmlDeviceGet{which}PcieLink{what}" for which in ("Curr", "Max") for what in ("Generation", "Width")
    }
    assert {name for name in names if not hasattr(real, name)} == set()
