"""The transport of a process group's messages: the GPUs' copy engines if all ranks reach each other, else NCCL.

The benchmark's ranks and a program's (`sequence_shards`) are served by this one function, so that a measured time is
one that a program gets.
"""

from __future__ import annotations

import logging
import os
import platform
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary, finalize

import torch
import torch.distributed as dist

from dilabench.distributed.transport.copies import Copies
from dilabench.errors import first_line

logger = logging.getLogger(__name__)

# "nccl" does not use the copy engines; any other value uses them if they work.
TRANSPORT_VARIABLE = "DILABENCH_TRANSPORT"
TRIAL_TIMEOUT_S = 20.0


class Transport(NamedTuple):
    """The transport as text, and the copy engines if it is these."""

    name: str
    copies: Copies | None = None


class Ranks(Protocol):
    """The part of a `World` that a selection needs."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def group(self) -> dist.ProcessGroup | None: ...
    @property
    def timeout_s(self) -> float: ...
    def share(self, fact: Any) -> list[Any]: ...


# By group and device: ring buffers take memory, and all ranks must agree.
_of_groups: WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, Transport]] = WeakKeyDictionary()


def transport_of(ranks: Ranks) -> Transport:
    """The transport of a group for tensors on a CUDA device, selected at the first call, which all ranks make."""
    group = ranks.group
    if group is None or ranks.size == 1:
        return Transport("no messages")
    known = _of_groups.setdefault(group, {})
    if ranks.device not in known:
        selected = known[ranks.device] = _selected(ranks, group)
        if selected.copies is not None:
            finalize(group, selected.copies.close)
        logger.info("messages between %d ranks, rank %d on %s: %s", ranks.size, ranks.rank, ranks.device, selected.name)
    return known[ranks.device]


def _selected(ranks: Ranks, group: dist.ProcessGroup) -> Transport:
    """Copy engines if they work on all ranks; else NCCL, with the reason in its name."""
    copies, why = None, _hindrance(ranks)
    if not why:
        try:
            region = min(ranks.share(Copies.most_bytes(ranks.device, ranks.size)))
            copies = Copies(ranks.rank, ranks.device, group, region, TRIAL_TIMEOUT_S)
            copies.try_out()
            copies.timeout_s = ranks.timeout_s
        # An older torch has no symmetric memory, or has it under other names.
        except (ImportError, AttributeError, RuntimeError) as error:
            why = f"rank {ranks.rank}: {first_line(error)}"
    why = next(filter(None, ranks.share(why)), "")
    if copies is not None and why:
        copies.close()
    return Transport(f"nccl ({why})") if why else Transport("copy engines", copies)


def _hindrance(ranks: Ranks) -> str:
    """Return a known reason against copy engines, without trying them; the same on all ranks."""
    asked_for_nccl = os.environ.get(TRANSPORT_VARIABLE) == "nccl"
    facts = ranks.share((platform.node(), ranks.device.index, asked_for_nccl))
    if any(asked for _, _, asked in facts):
        return f"{TRANSPORT_VARIABLE}=nccl"
    if len({host for host, _, _ in facts}) > 1:
        return "ranks on several hosts"
    others = [index for _, index, _ in facts if index != ranks.device.index]
    unreachable = [index for index in others if not torch.cuda.can_device_access_peer(ranks.device, index)]
    obstacle = f"GPU {ranks.device.index} cannot reach the memory of GPU {unreachable[0]}" if unreachable else ""
    return next(filter(None, ranks.share(obstacle)), "")
