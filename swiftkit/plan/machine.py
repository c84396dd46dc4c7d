"""What a node is: its GPUs, how fast they compute, the links between them, and where each number is from."""

from __future__ import annotations

from dataclasses import dataclass, replace

NVLINK_GENERATION_BYTES = {1: 20e9, 2: 25e9, 3: 25e9, 4: 25e9, 5: 50e9}
"""Bytes/s of one NVLink in one direction, by generation.

Source: https://www.nvidia.com/en-us/data-center/nvlink/ (Hopper: 18 links, 900 GB/s, both ways counted).
"""
PCIE_LANE_BYTES = {3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""Bytes/s of one PCIe lane in one direction, by generation: line rate and coding, https://pcisig.com."""


@dataclass(frozen=True)
class Machine:
    """One node, many times.

    Rates are those that are reached, not those of a datasheet, but for the two links: of their published
    rates `attained` is assumed, until `swiftkit doctor --bench` has measured them.

    Args:
        gpus: of a node.
        memory: bytes of a GPU that a process can have.
        bf16, fp8: matrix products, FLOP/s.
        attention_forward, attention_backward: causal attention, FLOP/s of the unmasked half.
        hbm: copies on the device, bytes read plus bytes written a second.
        nvlink: from one GPU to all others of its node, bytes/s in one direction; published.
        nic: from one GPU to other nodes, bytes/s in one direction; published.
        attained: share of the published link rates that collectives reach.
        nvlink_latency, nic_latency: of a collective, seconds for each step of its ring or tree.
    """

    name: str
    gpus: int
    memory: float
    bf16: float
    fp8: float
    attention_forward: float
    attention_backward: float
    hbm: float
    nvlink: float
    nic: float
    attained: float = 0.8
    nvlink_latency: float = 3e-6
    nic_latency: float = 10e-6

    def with_links(self, *, nvlink: float, nic: float) -> Machine:
        """The same node with link rates that were measured, of which everything is attained."""
        return replace(self, nvlink=nvlink, nic=nic, attained=1.0)


H200_NODE = Machine(
    name="8 x H200 SXM",
    gpus=8,
    # 143,771 MiB as nvidia-smi says; CUDA's context and NCCL's buffers take about 2 GiB (an assumption).
    memory=143_771 * 2**20 - 2 * 2**30,
    # The middle of what one H200 read at the shapes of an 8B model and 16,384 rows: 635-750 and 1,295-1,335.
    bf16=690e12,
    fp8=1315e12,
    # The same card, sequences of 4,096, heads of 128, cuDNN.
    attention_forward=596e12,
    attention_backward=421e12,
    hbm=4.06e12,
    # NVLink 4: 900 GB/s, both directions counted. https://www.nvidia.com/en-us/data-center/h200/
    nvlink=450e9,
    # One 400 Gbit/s ConnectX-7 a GPU, as in a DGX. https://docs.nvidia.com/dgx/dgxh100-user-guide/
    nic=50e9,
)

# Of the H100, no rate was measured by us. It is the same processor with less and slower memory: 80 GB at
# 3.35 TB/s for 141 GB at 4.8 TB/s (https://www.nvidia.com/en-us/data-center/h100/). So matrix rates are those
# of the H200, and copies are scaled.
H100_NODE = replace(
    H200_NODE,
    name="8 x H100 SXM",
    memory=81_559 * 2**20 - 2 * 2**30,  # as nvidia-smi says of an 80 GB card, likewise
    hbm=H200_NODE.hbm * 3.35 / 4.8,
)

MACHINES = {"h100": H100_NODE, "h200": H200_NODE}
