"""The doctor: its judgement on the facts of many machines, its collectors on real files, its command."""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from swiftkit.cli import main
from swiftkit.parallel import doctor_host
from swiftkit.parallel.doctor import healthy, judge, run, show
from swiftkit.parallel.doctor_bench import expected
from swiftkit.parallel.doctor_facts import (
    Disk,
    Facts,
    Port,
    Torch,
    collect,
    host_memory,
    read_disk,
    read_ports,
)
from swiftkit.parallel.doctor_gpus import link_map, link_rate
from swiftkit.parallel.doctor_line import Line, numbers, size
from swiftkit.parallel.doctor_nvml import Nvml, read_nvml
from swiftkit.parallel.options import DoctorConfig
from tests.machines import GIB, H100, LAPTOP, PACKAGES, node

ROOT = Path(__file__).resolve().parents[1]


def changed(facts: Facts, number: int, **fields: object) -> Facts:
    """One GPU of a node otherwise."""
    gpus = list(facts.nvml.gpus)
    gpus[number] = replace(gpus[number], **fields)  # type: ignore[arg-type]
    return replace(facts, nvml=replace(facts.nvml, gpus=tuple(gpus)))


def line(facts: Facts, name: str) -> Line:
    (found,) = [line for line in judge(facts) if line.name == name]
    return found


def test_a_good_node_is_good() -> None:
    lines = judge(node())
    assert {line.verdict for line in lines} == {"good"}
    assert all(not line.mend for line in lines)
    assert line(node(), "GPUs").found == "8 x NVIDIA H100 80GB HBM3, 80 GiB"
    assert line(node(), "links").found == (
        "every pair has 18 NVLinks through NVSwitch, 450 GB/s a GPU in each direction"
    )
    assert line(node(), "network").found == "8 ports of InfiniBand, 3,200 Gbit/s together"


def test_a_laptop_is_weak_and_healthy() -> None:
    lines = judge(LAPTOP)
    assert healthy(lines)
    assert line(LAPTOP, "GPUs").verdict == "weak"
    assert "on the CPU" in line(LAPTOP, "GPUs").found
    assert not {"NCCL", "CUDA", "links", "peer access", "driver", "network"} & {line.name for line in lines}


BROKEN_LINKS = changed(node(), 3, nvlinks=14, nvlinks_down=4)
CASES: dict[str, tuple[Facts, str, str, str, str]] = {
    "old python": (replace(LAPTOP, python=(3, 10)), "Python", "broken", "3.10", "3.11 or newer"),
    "old torch": (
        replace(LAPTOP, packages={**PACKAGES, "torch": "2.4.1"}), "torch", "broken", "2.4.1", "torch>=2.11",
    ),
    "no transformers": (
        replace(LAPTOP, packages={**PACKAGES, "transformers": None}), "transformers", "broken",
        "not installed", "transformers>=5.17",
    ),
    "torch does not load": (
        replace(LAPTOP, torch=Torch(error="libcudart.so.13: cannot open")), "torch starts", "broken",
        "libcudart", "reinstall",
    ),
    "cpu torch on gpus": (
        replace(node(), torch=Torch("2.13.0+cpu")), "CUDA", "broken", "built for CPUs", "CUDA build",
    ),
    "old driver": (
        replace(
            node(), torch=Torch("2.13.0", "13.0", None, 0, (), "The NVIDIA driver on your system is too old"),
            nvml=replace(node().nvml, cuda=(12, 4)),
        ), "CUDA", "broken", "too old", "for CUDA 12.4",
    ),
    "fabric manager": (
        replace(
            changed(node(), 0, fabric="in progress"),
            torch=Torch("2.13.0", "13.0", (2, 27, 3), 0, (), "Error 802: system not yet initialized"),
        ), "CUDA", "broken", "802", "nvidia-fabricmanager",
    ),
    "a gpu fell off": (
        replace(node(), torch=Torch("2.13.0", "13.0", (2, 27, 3), 7)), "CUDA", "broken", "7 of 8", "Xid",
    ),
    "some hidden": (
        replace(
            node(), torch=Torch("2.13.0", "13.0", (2, 27, 3), 2), environment={"CUDA_VISIBLE_DEVICES": "0,1"}
        ), "CUDA", "weak", "2 of 8", "CUDA_VISIBLE_DEVICES is 0,1",
    ),
    "old nccl": (
        replace(node(), torch=replace(node().torch, nccl=(2, 14, 3))), "NCCL", "broken", "2.14.3", "2.18",
    ),
    "no nccl": (
        replace(node(), torch=replace(node().torch, nccl=None)), "NCCL", "broken", "none", "CUDA build",
    ),
    "p2p off": (
        replace(node(), environment={"NCCL_P2P_DISABLE": "1"}), "NCCL's environment", "weak",
        "NCCL_P2P_DISABLE", "unset",
    ),
    "links down": (BROKEN_LINKS, "GPU 3", "broken", "14 of 18", "nvlink -s -i 3"),
    "pcie only": (
        node(replace(H100, nvlinks=0, nvlink_generation=None, to_switch=0), links=0, path="NODE"),
        "links", "weak", "worst NODE, 63 GB/s", "PCIe",
    ),
    "no peer access": (node(peer=False), "peer access", "broken", "0-1", "iommu=pt"),
    "no peer access over pcie": (
        node(replace(H100, nvlinks=0), links=0, peer=False), "peer access", "weak", "host memory", "ACS",
    ),
    "memory errors": (changed(node(), 5, uncorrected=3), "GPU 5", "broken", "3 memory errors", "-i 5"),
    "instances": (changed(node(), 1, mig=True), "GPU 1", "weak", "MIG", "-mig 0"),
    "in use": (changed(node(), 2, memory_used=60 * GIB), "GPU 2", "weak", "60 of 80 GiB", "nvidia-smi"),
    "half a slot": (changed(node(), 0, pcie=(5, 8)), "GPU 0", "weak", "x8 where x16", "reseat"),
    "old gpu": (
        node(replace(H100, name="Tesla T4", capability=(7, 5)), 1), "GPU 0", "weak", "7.5 has no bf16",
        "fp32",
    ),
    "unlike gpus": (
        changed(node(), 7, name="NVIDIA A100"), "GPUs", "weak", "1 x NVIDIA A100",
        "the slowest sets the pace",
    ),
    "ports down": (
        replace(node(), ports=(*node().ports[:7], Port("mlx5_7", 1, "InfiniBand", "DOWN", 10.0))),
        "network", "weak", "mlx5_7/1 is DOWN", "NCCL_IB_HCA=mlx5_0,",
    ),
    "no port up": (
        replace(node(), ports=(Port("mlx5_0", 1, "Ethernet", "DOWN", 40.0),)), "network", "weak",
        "no port is active", "cables",
    ),
    "container's shm": (
        replace(node(), shm=64 * 2**20, shm_free=64 * 2**20), "shared memory", "broken", "64 MiB",
        "--shm-size",
    ),
    "laptop's shm": (
        replace(LAPTOP, shm=2**26, shm_free=2**26), "shared memory", "weak", "64 MiB", "--shm-size",
    ),
    "little host memory": (replace(node(), memory=256 * GIB), "host memory", "weak", "640", "LoRA"),
    "no host memory": (replace(LAPTOP, memory_free=GIB), "host memory", "broken", "1 of 16", "end other"),
    "full disk": (
        replace(LAPTOP, disk=Disk("out", 100 * 2**20, 1e9)), "checkpoint disk", "broken", "0 GiB",
        "make room",
    ),
    "small disk": (
        replace(LAPTOP, disk=Disk("out", 5 * GIB, 1e9)), "checkpoint disk", "weak", "5 GiB", "adapters",
    ),
    "slow disk": (
        replace(LAPTOP, disk=Disk("out", 900 * GIB, 40e6)), "checkpoint disk", "weak", "40 MB/s",
        "local disk",
    ),
    "read-only disk": (
        replace(LAPTOP, disk=Disk("out", 900 * GIB, error="Read-only file system")), "checkpoint disk",
        "broken", "Read-only", "another --output_dir",
    ),
    "driver without gpus": (
        replace(LAPTOP, driver_loaded=True, torch=Torch("2.13.0", "13.0", error="no CUDA-capable device")),
        "GPUs", "broken", "no CUDA-capable device", "nvidia-smi",
    ),
    "no nvml": (
        replace(node(), nvml=Nvml(error="nvidia-ml-py is not installed")), "driver", "weak",
        "8 GPUs, but their links", "swiftkit[doctor]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_verdicts(case: str) -> None:
    facts, name, verdict, found, mend = CASES[case]
    judged = line(facts, name)
    assert judged.verdict == verdict, judged
    assert found in judged.found
    assert mend in judged.mend
    assert healthy(judge(facts)) == all(line.verdict != "broken" for line in judge(facts))


def test_whatever_is_not_good_has_a_mend() -> None:
    for facts, *_ in CASES.values():
        for judged in judge(facts):
            assert bool(judged.mend) == (judged.verdict != "good"), judged


def test_nvlink_bridges_between_some() -> None:
    """Four cards, bridged in pairs: what is linked, and what is not."""
    bridged = node(replace(H100, nvlinks=12, nvlink_generation=4, to_switch=0), 4)
    pairs = tuple(replace(p, nvlinks=12 if (p.a, p.b) in ((0, 1), (2, 3)) else 0) for p in bridged.nvml.pairs)
    facts = replace(bridged, nvml=replace(bridged.nvml, pairs=pairs))
    judged = line(facts, "links")
    assert judged.verdict == "weak"
    assert judged.found == "NVLink between 2 of 6 pairs; PCIe between 0-2, 0-3, 1-2, 1-3"
    assert judged.mend.endswith("0-1, 2-3")
    assert [row.split() for row in link_map(facts)] == [
        ["GPU0", "GPU1", "GPU2", "GPU3"],
        ["GPU0", "X", "NV12", "SYS", "SYS"],
        ["GPU1", "NV12", "X", "SYS", "SYS"],
        ["GPU2", "SYS", "SYS", "X", "NV12"],
        ["GPU3", "SYS", "SYS", "NV12", "X"],
    ]
    assert expected(facts, "cuda") == ("PCIe", pytest.approx(63.008e9))


def test_four_gpus_linked_directly() -> None:
    """Four links to each of the others: a ring has all twelve, a pair has four."""
    facts = node(replace(H100, nvlinks=12, nvlink_generation=3, to_switch=0), 4, links=4)
    assert line(facts, "links").found.startswith("every pair has 4 NVLinks directly, 300 GB/s")
    assert expected(facts, "cuda") == ("NVLink", 300e9)
    assert expected(facts, "cuda", "point_to_point") == ("NVLink", pytest.approx(100e9))
    assert expected(node(), "cuda", "point_to_point") == ("NVLink", 450e9)
    assert expected(facts, "cpu") is None


def test_a_fabric_matters_where_there_is_one() -> None:
    """One GPU of a switched node, alone in a virtual machine, needs no fabric; several do."""
    alone = node(replace(H100, fabric="in progress"), 1)
    assert {judged.verdict for judged in judge(alone)} == {"good"}
    assert line(changed(node(), 2, fabric="in progress"), "GPU 2").verdict == "weak"
    dead = replace(changed(node(), 2, fabric="not started"), torch=Torch("2.13.0", "13.0", (2, 27, 3)))
    assert line(dead, "GPU 2").verdict == "broken"


def test_link_rates() -> None:
    assert link_rate(H100) == 450e9
    assert link_rate(replace(H100, nvlinks=12, nvlink_generation=3)) == 300e9  # A100
    assert link_rate(replace(H100, nvlink_generation=5)) == 900e9  # B200
    assert link_rate(replace(H100, nvlinks=0)) is None
    assert link_map(LAPTOP) == []


def test_what_is_supported_is_what_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for name, oldest in doctor_host.OLDEST.items():
        assert f"{name}>={oldest}" in project["dependencies"]
    assert project["requires-python"] == f">={'.'.join(map(str, doctor_host.OLDEST_PYTHON))}"
    assert any(wanted.startswith("nvidia-ml-py") for wanted in project["optional-dependencies"]["doctor"])


def test_numbers_and_sizes() -> None:
    assert numbers("2.13.0+cu130") == (2, 13, 0)
    assert numbers("2.12.0a0+git123") == (2, 12, 0)
    assert numbers("5.24.0.dev0") == (5, 24, 0)
    assert [size(n) for n in (12, 4096, 2**20, 3 * GIB)] == ["12 bytes", "4 KiB", "1 MiB", "3 GiB"]


# ---- collectors ----------------------------------------------------------------------------------------


def test_ports_from_sysfs(tmp_path: Path) -> None:
    for device, state, rate, layer in (
        ("mlx5_0", "4: ACTIVE", "400 Gb/sec (4X NDR)", "InfiniBand"),
        ("mlx5_1", "1: DOWN", "10 Gb/sec (4X SDR)", "Ethernet"),
    ):
        port = tmp_path / device / "ports" / "1"
        port.mkdir(parents=True)
        for name, text in (("state", state), ("rate", rate), ("link_layer", layer)):
            (port / name).write_text(text + "\n", encoding="utf-8")
    (tmp_path / "mlx5_1" / "ports" / "1" / "rate").unlink()
    assert read_ports(tmp_path) == [
        Port("mlx5_0", 1, "InfiniBand", "ACTIVE", 400.0),
        Port("mlx5_1", 1, "Ethernet", "DOWN", 0.0),
    ]
    assert read_ports(tmp_path / "nothing") == []


def test_host_memory_within_a_container(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 600 kB\n")
    assert host_memory(tmp_path) == (1000 * 1024, 600 * 1024)
    group = tmp_path / "sys" / "fs" / "cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    assert host_memory(tmp_path) == (1000 * 1024, 600 * 1024)
    (group / "memory.max").write_text("300000\n")
    (group / "memory.current").write_text("100000\n")
    assert host_memory(tmp_path) == (300_000, 200_000)
    assert host_memory(tmp_path / "windows") == (None, None)


def test_disk_is_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swiftkit.parallel.doctor_facts.WRITTEN", 2**24)
    found = read_disk(str(tmp_path / "not" / "yet"))
    assert found.error is None and found.rate is not None and found.rate > 0
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    assert read_disk(str(tmp_path / "file")).error == f"{tmp_path / 'file'} is a file"


def test_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real facts of whatever runs the tests, which has all that is needed."""
    monkeypatch.setattr("swiftkit.parallel.doctor_facts.WRITTEN", 2**24)
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    facts = collect(".")
    assert facts.python == sys.version_info[:2]
    assert facts.packages["torch"] == importlib.import_module("torch").__version__
    assert facts.environment["NCCL_DEBUG"] == "WARN"
    assert line(facts, "torch").verdict == "good"
    json.dumps(facts.__dict__, default=str)


@pytest.mark.gpu
def test_nvml_really_read() -> None:
    """What NVML says agrees with what torch says of the same GPUs."""
    pytest.importorskip("pynvml")
    import torch

    found = read_nvml()
    assert found.error is None and found.driver and found.cuda
    assert len(found.gpus) >= torch.cuda.device_count() > 0
    properties = torch.cuda.get_device_properties(0)
    assert any(gpu.name == properties.name for gpu in found.gpus)
    assert all(gpu.memory >= 0.9 * properties.total_memory for gpu in found.gpus)
    assert found.gpus[0].pcie is None or found.gpus[0].pcie[0] >= 1
    assert len(found.pairs) == len(found.gpus) * (len(found.gpus) - 1) // 2


def test_without_nvml_nothing_breaks() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    found = read_nvml()
    assert found.gpus == () and found.error


# ---- the command ---------------------------------------------------------------------------------------


def test_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    show(judge(BROKEN_LINKS), Console(width=60))
    said = capsys.readouterr().out
    assert re.search(r"^broken  GPU 3 +14 of 18 NVLinks are up$", said, flags=re.MULTILINE)
    assert re.search(r"^ +-> nvidia-smi nvlink -s -i 3", said, flags=re.MULTILINE)


@pytest.mark.parametrize(("facts", "code"), [(LAPTOP, 0), (BROKEN_LINKS, 1)], ids=["laptop", "broken"])
def test_exit_code(
    facts: Facts, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("swiftkit.parallel.doctor.collect", lambda output_dir: facts)
    with pytest.raises(SystemExit) as end:
        main(["doctor", "--json"])
    assert end.value.code == code
    said = json.loads(capsys.readouterr().out)
    assert said["healthy"] == (code == 0)
    assert [check["name"] for check in said["checks"]] == [line.name for line in judge(facts)]
    assert said["facts"]["cores"] == facts.cores
    assert run(DoctorConfig(), Console(file=open(os.devnull, "w"))) == (code == 0)  # noqa: SIM115


def test_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    for words, sentence in (
        (["--plot", "curve.txt"], "--plot: a file that ends in .png, .svg or .pdf, or none, not curve.txt"),
        (["--nproc", "0"], "--nproc takes at least 1 or auto, not 0"),
        (["--jsn"], "unknown name --jsn"),
    ):
        with pytest.raises(SystemExit) as end:
            main(["doctor", *words])
        assert end.value.code == 2
        assert sentence in capsys.readouterr().err
