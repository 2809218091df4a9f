"""The ranks that torchrun started, from its environment variables. No torch.

Every process runs the same `dilabench run`. Rank 0 is the one that plans, prints and writes; the others are agents.
"""

import contextlib
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from dilabench.errors import EnvironmentNotReady

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
MEETING_TIMEOUT_S = 180.0
MOST_RANKS = 2**20
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Rank:
    """This process among those that torchrun started, and the store that they share.

    attempt: number of restarts by torchrun; the store may still hold messages of earlier ones.
    """

    rank: int
    size: int
    local_rank: int
    store_host: str
    store_port: int
    attempt: int = 0

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
            attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
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
        return cls(rank, size, local_rank, os.environ["MASTER_ADDR"], port, attempt)

    @property
    def store_name(self) -> str:
        """The prefix of dilabench's keys at the store."""
        return f"dilabench/{self.attempt}"

    @property
    def store_address(self) -> str:
        """'tcp://host:port/name' as `dilabench.distributed.launch.meeting_store` takes it."""
        return f"tcp://{self.store_host}:{self.store_port}/{self.store_name}"


def machine_id() -> str:
    """An id that all processes of one machine share, in any network namespace."""
    with contextlib.suppress(OSError):
        return BOOT_ID.read_text().strip()
    return socket.gethostname()
