"""The ranks that torchrun started, from its environment variables, and how they find rank 0's listener.

Every process runs the same `dilabench run`. Rank 0 is the one that plans, prints and writes; the others are agents.
"""

import contextlib
import json
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from dilabench.engine.worker.listener import RankListener, address_towards
from dilabench.errors import EnvironmentNotReady

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
MEETING = "dilabench/meeting"
MEETING_TIMEOUT_S = 180.0
MOST_RANKS = 2**20
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Rank:
    """This process among those that torchrun started, and the store that they share."""

    rank: int
    size: int
    local_rank: int
    store_host: str
    store_port: int

    @classmethod
    def from_environment(cls) -> "Rank | None":
        """None when torchrun did not start this process, or started no other.

        Raises EnvironmentNotReady for values that make no sense.
        """
        if any(name not in os.environ for name in VARIABLES) or os.environ["WORLD_SIZE"] == "1":
            return None
        try:
            rank, size, local_rank, port = (
                int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
            )
        except ValueError as error:
            raise EnvironmentNotReady(f"RANK, WORLD_SIZE, LOCAL_RANK, MASTER_PORT: {error}; use torchrun") from None
        if not 0 < port < 2**16:
            raise EnvironmentNotReady(f"MASTER_PORT={port} is no port (1 to 65535); start the ranks with torchrun")
        if not 0 <= local_rank < size <= MOST_RANKS:
            raise EnvironmentNotReady(
                f"LOCAL_RANK={local_rank} with WORLD_SIZE={size} makes no sense; start the ranks with torchrun"
            )
        if not 0 <= rank < size:
            raise EnvironmentNotReady(f"RANK={rank} is not below WORLD_SIZE={size}; start the ranks with torchrun")
        return cls(rank, size, local_rank, os.environ["MASTER_ADDR"], port)

    @property
    def store_address(self) -> str:
        """'tcp://host:port' as `dilabench.distributed.launch.meeting_store` takes it, without a name."""
        return f"tcp://{self.store_host}:{self.store_port}"


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where rank 0's listener is, and the key to it."""

    address: tuple[str, int]
    key: bytes

    @classmethod
    def announce(cls, rank: Rank, store: object, listener: RankListener) -> "Meeting":
        """Write address and key of the listener into the store for the other ranks."""
        host = address_towards(rank.store_host, rank.store_port)
        meeting = cls((host, listener.port), listener.key)
        content = {"address": meeting.address, "key": meeting.key.hex()}
        store.set(MEETING, json.dumps(content))  # type: ignore[attr-defined]
        return meeting

    @classmethod
    def find(cls, rank: Rank, store: object) -> "Meeting":
        """Read what rank 0 has announced. Raises EnvironmentNotReady when it announces nothing in time."""
        try:
            content = json.loads(store.get(MEETING))  # type: ignore[attr-defined]
        except RuntimeError as error:
            raise EnvironmentNotReady(
                f"rank {rank.rank} heard nothing of rank 0 within {MEETING_TIMEOUT_S:g} s: {str(error).splitlines()[0]}"
            ) from None
        host, port = content["address"]
        return cls((host, port), bytes.fromhex(content["key"]))


def machine_id() -> str:
    """The same for all processes of one machine, whatever network it shows them."""
    with contextlib.suppress(OSError):
        return BOOT_ID.read_text().strip()
    return socket.gethostname()
