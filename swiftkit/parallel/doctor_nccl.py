"""What NCCL says it took, read from its log (NCCL_DEBUG=INFO)."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

# host:12:34 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM
# ... NCCL INFO Channel 00/0 : 1[1] -> 8[0] [send] via NET/IB/0/GDRDMA
CONNECTION = re.compile(r"(?:Channel|Ring) \d+(?:/\d+)? : \d+\[\w+\] -> \d+\[\w+\](?: \[\w+\])? via (\S+)")
VERSION = re.compile(r"NCCL version (\S+)")
# ... NCCL INFO Pattern 4, crossNic 0, nChannels 24, bw 20.000000/20.000000, type NVL/PIX, sameChannels 1
GRAPH = re.compile(r"Pattern \d+, .*?type (\w+)/(\w+)")
NVLS_TAKEN = re.compile(r"Connected NVLS tree|NVLS comm 0x|[1-9]\d* nvls channels")


@dataclass(frozen=True)
class NcclLog:
    """How GPUs talked.

    Args:
        version: of the library.
        transports: connections by kind: P2P (NVLink or PCIe, between memories of GPUs), SHM (through host
            memory), NET/IB or NET/Socket (through the network).
        paths: what NCCL took for the way between GPUs: NVL, PIX, PHB, SYS.
        nvls: whether NVLink multicast was in use.
    """

    version: str | None = None
    transports: dict[str, int] = field(default_factory=dict)
    paths: tuple[str, ...] = ()
    nvls: bool = False


def read_log(text: str) -> NcclLog:
    """Read the lines of all ranks.

    Args:
        text: of NCCL's log; other lines are passed over.
    """
    version = VERSION.search(text)
    transports = Counter(_kind(found) for found in CONNECTION.findall(text))
    paths = {inside for inside, _ in GRAPH.findall(text) if inside not in ("LOC", "UNK")}
    return NcclLog(
        version=version[1] if version else None,
        transports=dict(transports.most_common()),
        paths=tuple(sorted(paths)),
        nvls=NVLS_TAKEN.search(text) is not None,
    )


def _kind(transport: str) -> str:
    """P2P/CUMEM/read is P2P, SHM/direct/direct is SHM, NET/IB/0/GDRDMA is NET/IB."""
    parts = transport.split("/")
    return "/".join(parts[:2]) if parts[0] == "NET" else parts[0]
