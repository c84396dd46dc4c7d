"""Checks of the GPUs and of what is between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from swiftkit.parallel.doctor_facts import Facts
from swiftkit.parallel.doctor_line import GIB, Line, dotted, few
from swiftkit.parallel.doctor_nvml import Gpu
from swiftkit.plan.machine import NVLINK_GENERATION_BYTES, PCIE_LANE_BYTES

OLDEST_CAPABILITY = (8, 0)  # the first with bf16 products
GB = 1e9


def driver(facts: Facts) -> Iterator[Line]:
    """Its version, and the CUDA it is for."""
    nvml = facts.nvml
    if nvml.driver is not None:
        cuda = f", for CUDA {dotted(nvml.cuda)}" if nvml.cuda else ""
        yield Line("driver", "good", nvml.driver + cuda)
    elif facts.torch.sees:
        found = f"{facts.torch.sees} GPUs, but their links cannot be read: {nvml.error}"
        yield Line("driver", "weak", found, "pip install 'swiftkit[doctor]'")


def gpus(facts: Facts) -> Iterator[Line]:
    """Which there are, and what is wrong with each."""
    cards = [f"{gpu.name}, {gpu.memory / GIB:.0f} GiB" for gpu in facts.nvml.gpus] or facts.torch.names
    counts = Counter(cards)
    found = "; ".join(f"{count} x {name}" for name, count in counts.items())
    if not counts and facts.driver_loaded:
        reason = facts.torch.error or facts.nvml.error
        yield Line(
            "GPUs", "broken", f"the driver is loaded, and no GPU can be used: {reason}", "run nvidia-smi"
        )
    elif not counts:
        mend = "nothing, for models below about 1B; larger ones want an NVIDIA GPU"
        yield Line("GPUs", "weak", "none: everything runs on the CPU, with small models", mend)
    elif len(counts) > 1:
        yield Line("GPUs", "weak", found, "the slowest sets the pace: CUDA_VISIBLE_DEVICES picks equal ones")
    else:
        yield Line("GPUs", "good", found)
    for gpu in facts.nvml.gpus:
        yield from _gpu(gpu)
        yield from _fabric(gpu, works=facts.torch.sees > 0, alone=len(facts.nvml.gpus) == 1)


def _fabric(gpu: Gpu, *, works: bool, alone: bool) -> Iterator[Line]:
    """An NVSwitch fabric that is not ready: CUDA does not start then, or GPUs have no links."""
    if gpu.fabric in ("not started", "in progress") and not (works and alone):
        mend = "systemctl start nvidia-fabricmanager, of the driver's own version"
        found = f"the NVSwitch fabric is {gpu.fabric}"
        yield Line(f"GPU {gpu.index}", "weak" if works else "broken", found, mend)


def _gpu(gpu: Gpu) -> Iterator[Line]:
    """What is wrong with one GPU; nothing where nothing is."""
    name = f"GPU {gpu.index}"
    if gpu.capability < OLDEST_CAPABILITY:
        found = f"compute capability {dotted(gpu.capability)} has no bf16"
        yield Line(name, "weak", found, "train with --base_precision fp32, or on an A100, RTX 30 or newer")
    if gpu.uncorrected:
        found = f"{gpu.uncorrected} memory errors that ECC could not mend"
        yield Line(
            name, "broken", found, f"nvidia-smi -q -i {gpu.index} -d ECC; reset it, then have it replaced"
        )
    if gpu.mig:
        found = "cut into instances (MIG), which have no links to each other"
        yield Line(name, "weak", found, f"nvidia-smi -i {gpu.index} -mig 0, by an administrator")
    if gpu.memory_used > 0.1 * gpu.memory:
        found = f"{gpu.memory_used / GIB:.0f} of {gpu.memory / GIB:.0f} GiB are in use already"
        yield Line(name, "weak", found, "nvidia-smi lists the processes; end those you do not need")
    # An idle card lowers its generation to save power, never its width.
    if gpu.pcie and gpu.pcie_best and gpu.pcie[1] < gpu.pcie_best[1]:
        found = f"PCIe x{gpu.pcie[1]} where x{gpu.pcie_best[1]} would go"
        yield Line(name, "weak", found, "reseat the card, or take a slot with all lanes")


def link_rate(gpu: Gpu) -> float | None:
    """Bytes/s that a GPU's NVLinks give in one direction, as published; None where it has none."""
    if not gpu.nvlinks or gpu.nvlink_generation not in NVLINK_GENERATION_BYTES:
        return None
    return gpu.nvlinks * NVLINK_GENERATION_BYTES[gpu.nvlink_generation]


def pcie_rate(gpu: Gpu) -> float | None:
    """Bytes/s of a GPU's slot in one direction, as published."""
    if gpu.pcie_best is None or gpu.pcie_best[0] not in PCIE_LANE_BYTES:
        return None
    return PCIE_LANE_BYTES[gpu.pcie_best[0]] * (gpu.pcie or gpu.pcie_best)[1]


def links(facts: Facts) -> Iterator[Line]:
    """NVLink, NVSwitch or PCIe between them."""
    cards, pairs = facts.nvml.gpus, facts.nvml.pairs
    if len(cards) < 2:
        return
    for gpu in cards:
        if gpu.nvlinks and gpu.nvlinks_down:
            found = f"{gpu.nvlinks} of {gpu.nvlinks + gpu.nvlinks_down} NVLinks are up"
            mend = f"nvidia-smi nvlink -s -i {gpu.index}; restart the fabric manager, then the node"
            yield Line(f"GPU {gpu.index}", "broken", found, mend)
    linked = [pair for pair in pairs if pair.nvlinks]
    if not linked:
        worst = max((pair.path for pair in pairs), key=_far)
        rate = pcie_rate(cards[0])
        speed = f", {rate / GB:.0f} GB/s a slot" if rate else ""
        mend = "--layout ddp with LoRA moves little; tensor parallelism and fsdp will wait for PCIe"
        yield Line("links", "weak", f"no NVLink; PCIe, at worst {worst}{speed}", mend)
    elif len(linked) < len(pairs):
        missing = [f"{pair.a}-{pair.b}" for pair in pairs if not pair.nvlinks]
        found = f"NVLink between {len(linked)} of {len(pairs)} pairs; PCIe between {few(missing)}"
        yield Line(
            "links", "weak", found, "keep --tensor_parallel_size to GPUs that are linked: " + _linked(facts)
        )
    else:
        rate = min((link_rate(gpu) or 0.0) for gpu in cards)
        how = "through NVSwitch" if all(gpu.to_switch for gpu in cards) else "directly"
        fewest = min(pair.nvlinks for pair in pairs)
        found = f"every pair has {fewest} NVLinks {how}, {rate / GB:.0f} GB/s a GPU in each direction"
        yield Line("links", "good", found)


def _far(path: str) -> int:
    order = ["same board", "PIX", "PXB", "PHB", "NODE", "SYS"]
    return order.index(path) if path in order else len(order)


def _linked(facts: Facts) -> str:
    """Pairs with NVLink, as 0-1, 2-3."""
    return few([f"{pair.a}-{pair.b}" for pair in facts.nvml.pairs if pair.nvlinks])


def peers(facts: Facts) -> Iterator[Line]:
    """Whether GPUs reach each other's memory."""
    pairs = facts.nvml.pairs
    if not pairs:
        return
    without = [f"{pair.a}-{pair.b}" for pair in pairs if not pair.peer]
    if not without:
        yield Line("peer access", "good", "every GPU reaches every other's memory")
        return
    linked = any(pair.nvlinks and not pair.peer for pair in pairs)
    found = f"none between {few(without)}: copies go through host memory"
    mend = (
        "set IOMMU to passthrough (iommu=pt) and switch ACS off; in a container or a virtual machine, ask "
        "for GPUs of one partition"
    )
    yield Line("peer access", "broken" if linked else "weak", found, mend)


def link_map(facts: Facts) -> list[str]:
    """The map of `nvidia-smi topo -m`, from the facts: NV18 is 18 NVLinks, PIX to SYS ever farther PCIe."""
    count = len(facts.nvml.gpus)
    if count < 2:
        return []
    cells = {
        (pair.a, pair.b): f"NV{pair.nvlinks}" if pair.nvlinks else pair.path for pair in facts.nvml.pairs
    }
    width = max(map(len, [*cells.values(), "GPU0"])) + 2
    rows = ["".join(f"GPU{b}".rjust(width) for b in range(count))]
    for a in range(count):
        names = ("X" if a == b else cells[min(a, b), max(a, b)] for b in range(count))
        rows.append("".join(name.rjust(width) for name in names))
    return [f"{'' if at == 0 else f'GPU{at - 1}':<6}{row}" for at, row in enumerate(rows)]
