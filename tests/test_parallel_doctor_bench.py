"""`swiftkit doctor --bench`: measured for real over gloo, its verdicts, and what is read from NCCL's log."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from swiftkit.errors import UserError
from swiftkit.parallel import doctor_bench
from swiftkit.parallel.doctor import healthy
from swiftkit.parallel.doctor_bench import Bench, bus_bandwidth, exchange, measure, verdicts
from swiftkit.parallel.doctor_facts import collect
from swiftkit.parallel.doctor_nccl import NcclLog, read_log
from swiftkit.parallel.doctor_rates import Rate
from swiftkit.parallel.doctor_worker import sizes
from swiftkit.parallel.options import DoctorConfig
from tests.machines import H100, LAPTOP, node

LOG = """
n1:71:71 [0] NCCL INFO NCCL version 2.27.3+cuda12.9
n1:71:90 [0] NCCL INFO Pattern 4, crossNic 0, nChannels 12, bw 40.00/40.00, type NVL/PIX, sameChannels 1
n1:71:90 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM
n1:72:91 [1] NCCL INFO Channel 01/0 : 1[1] -> 0[0] via P2P/CUMEM/read
"""


def test_nccl_log_over_nvlink() -> None:
    assert read_log(LOG) == NcclLog("2.27.3+cuda12.9", {"P2P": 2}, ("NVL",), nvls=False)


@pytest.mark.parametrize(
    ("spoken", "transports"),
    [
        ("h:1:2 [0] NCCL INFO Channel 00 : 0[0] -> 1[1] via SHM/direct/direct", {"SHM": 1}),
        ("h:1:2 [1] NCCL INFO Channel 03/0 : 1[1] -> 8[0] [send] via NET/IB/0/GDRDMA", {"NET/IB": 1}),
        ("h:1:2 [1] NCCL INFO Channel 03/0 : 9[1] -> 0[0] [receive] via NET/Socket/0", {"NET/Socket": 1}),
        ("h:1:2 [0] NCCL INFO Ring 00 : 12[41000] -> 11[2d000] via P2P/IPC", {"P2P": 1}),
        ("h:1:2 [0] NCCL INFO NVLS multicast support is not available on dev 0", {}),
        ("no log at all", {}),
    ],
)
def test_nccl_transports(spoken: str, transports: dict[str, int]) -> None:
    found = read_log(spoken)
    assert found.transports == transports
    assert not found.nvls


def test_nvls_is_seen() -> None:
    assert read_log("h:1:2 [0] NCCL INFO Connected NVLS tree").nvls
    assert read_log("h:1:2 [0] NCCL INFO 16 coll channels, 16 collnet channels, 8 nvls channels").nvls
    assert not read_log("h:1:2 [0] NCCL INFO 24 coll channels, 0 collnet channels, 0 nvls channels").nvls


def test_bus_bandwidth_by_hand() -> None:
    """A ring of four moves 1.5 of an all-reduced message over each link, 0.75 of a gathered one."""
    assert bus_bandwidth("all_reduce", 100, 2.0, 4) == 75
    assert bus_bandwidth("all_gather", 100, 2.0, 4) == 37.5
    assert bus_bandwidth("point_to_point", 100, 2.0, 4) == 50
    assert sizes(4096) == [4096]
    assert sizes(2**20) == [4096, 16384, 65536, 262144, 2**20]


def bench(rate: float, log: NcclLog, bf16: float = 700e12) -> Bench:
    rates = (Rate("bf16 products", bf16, H100.name), Rate("copies on the GPU", 2.9e12, H100.name))
    return Bench("cuda", rates, 8, {"all_reduce": [(4096, 1e9), (2**30, rate)]}, log)


@pytest.mark.parametrize(
    ("measured", "name", "verdict", "found"),
    [
        (bench(370e9, read_log(LOG)), "all-reduce", "good", "370.0 GB/s at best, 0.82 of 450 GB/s (NVLink)"),
        (bench(370e9, read_log(LOG)), "NCCL took", "good", "NVLink: 2 connections by P2P (paths NVL)"),
        (bench(250e9, read_log(LOG)), "all-reduce", "weak", "0.56"),
        (bench(20e9, NcclLog(transports={"SHM": 8})), "all-reduce", "broken", "0.04"),
        (bench(20e9, NcclLog(transports={"SHM": 8})), "NCCL took", "broken", "8 connections by SHM"),
        (bench(370e9, NcclLog()), "NCCL took", "weak", "names no connection"),
        (bench(370e9, read_log(LOG)), "bf16 products", "good", "700 TFLOP/s"),
        (bench(370e9, read_log(LOG), bf16=300e12), "bf16 products", "weak", "300 TFLOP/s"),
    ],
)
def test_bench_verdicts(measured: Bench, name: str, verdict: str, found: str) -> None:
    (judged,) = [line for line in verdicts(measured, node()) if line.name == name]
    assert (judged.verdict, bool(judged.mend)) == (verdict, verdict != "good")
    assert found in judged.found


def test_bench_for_real_over_gloo(tmp_path: Path) -> None:
    """Two processes of their own, small messages; every collective at every size, a table and a curve."""
    plot = tmp_path / "curve.png"
    found = measure(DoctorConfig(bench=True, device="cpu", nproc=2, max_mib=1, plot=str(plot)), LAPTOP)
    assert {name: [s for s, _ in samples] for name, samples in found.bandwidth.items()} == {
        name: sizes(2**20) for name in ("all_reduce", "all_gather", "point_to_point")
    }
    assert all(rate > 0 for samples in found.bandwidth.values() for _, rate in samples)
    assert {rate.name for rate in found.rates} == {"fp32 products", "copies"}
    assert len(found.table()) == 2 + len(sizes(2**20))
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert healthy(verdicts(found, LAPTOP))
    json.dumps(found.as_dict())


def test_bench_refuses_what_it_cannot() -> None:
    with pytest.raises(UserError, match="torch sees no GPU"):
        measure(DoctorConfig(device="cuda"), LAPTOP)
    with pytest.raises(UserError, match="--nproc 9: torch sees 8 GPUs"):
        measure(DoctorConfig(device="cuda", nproc=9), node())


def test_a_failed_process_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two cannot start; the first, which would wait for it, is ended too."""
    started: list[subprocess.Popen[bytes]] = []
    begin = subprocess.Popen

    def start(command: list[str], **knobs: object) -> subprocess.Popen[bytes]:
        if started:
            command = [sys.executable, "-c", "raise SystemExit('no such luck')"]
        started.append(begin(command, **knobs))  # type: ignore[call-overload]
        return started[-1]

    monkeypatch.setattr(doctor_bench.subprocess, "Popen", start)
    with pytest.raises(UserError, match="process 1 of 2 failed: no such luck"):
        exchange("cpu", 2, 4096)
    assert all(process.poll() is not None for process in started)


@pytest.mark.gpu
def test_rates_of_a_gpu() -> None:
    found = measure(DoctorConfig(device="cuda", nproc=1, plot="none"), collect("."))
    assert found.bandwidth == {}
    names = {rate.name for rate in found.rates}
    assert {"bf16 products", "copies on the GPU", "copies to the GPU", "copies from the GPU"} <= names
    assert all(rate.value > 0 for rate in found.rates)


@pytest.mark.multigpu
def test_links_between_gpus(tmp_path: Path) -> None:
    facts = collect(".")
    found = measure(DoctorConfig(device="cuda", plot=str(tmp_path / "curve.png"), max_mib=64), facts)
    assert found.processes == facts.torch.sees
    assert found.log.transports and not found.log.nvls
    assert all(rate > 0 for samples in found.bandwidth.values() for _, rate in samples)
