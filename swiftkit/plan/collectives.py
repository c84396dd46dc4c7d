"""Bytes that a collective sends, link by link, and the time that takes.

Rings, and rings of rings where a group spans nodes: each byte enters a node once, over as many network cards
as the group has GPUs there, and is passed on inside. This is what NCCL's rings reach at best; NVLink
multicast would send less, and nothing here depends on it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, log2

from swiftkit.plan.layout import Group
from swiftkit.plan.machine import Machine


@dataclass(frozen=True)
class Traffic:
    """What one GPU sends (it receives as much).

    Args:
        nvlink: bytes inside the node.
        nic: bytes to other nodes.
        nvlink_steps, nic_steps: messages that wait for each other, for the latency.
    """

    nvlink: float = 0.0
    nic: float = 0.0
    nvlink_steps: float = 0.0
    nic_steps: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.nvlink + other.nvlink,
            self.nic + other.nic,
            self.nvlink_steps + other.nvlink_steps,
            self.nic_steps + other.nic_steps,
        )

    def __mul__(self, times: float) -> Traffic:
        return Traffic(
            self.nvlink * times, self.nic * times, self.nvlink_steps * times, self.nic_steps * times
        )

    @property
    def total(self) -> float:
        """Bytes over all links."""
        return self.nvlink + self.nic

    def seconds(self, machine: Machine) -> float:
        """The slower of the two links, which work at once, and the steps' latency."""
        nvlink = self.nvlink / (machine.nvlink * machine.attained)
        nic = self.nic / (machine.nic * machine.attained)
        latency = self.nvlink_steps * machine.nvlink_latency + self.nic_steps * machine.nic_latency
        return max(nvlink, nic) + latency


NOTHING = Traffic()


def all_gather(whole: float, group: Group) -> Traffic:
    """Every GPU of the group gets the whole of which it has a part.

    Args:
        whole: bytes of the result.
        group: who takes part.
    """
    n, inside, nodes = group.size, group.inside, group.nodes
    nic = whole * (nodes - 1) / nodes / inside
    return Traffic(nvlink=whole * (n - 1) / n - nic, nic=nic, nvlink_steps=inside - 1, nic_steps=nodes - 1)


def reduce_scatter(whole: float, group: Group) -> Traffic:
    """Every GPU of the group gets its part of the sum: an all-gather backwards.

    Args:
        whole: bytes of what is summed.
        group: who takes part.
    """
    return all_gather(whole, group)


def all_reduce(whole: float, group: Group) -> Traffic:
    """Every GPU gets the whole sum: a reduce-scatter and an all-gather, 2 (n - 1) / n of it sent by each.

    Args:
        whole: bytes of what is summed.
        group: who takes part.
    """
    sent = reduce_scatter(whole, group) + all_gather(whole, group)
    # Between nodes NCCL goes up and down a tree: the same bytes, and fewer steps.
    return replace(sent, nic_steps=2 * ceil(log2(group.nodes)))
