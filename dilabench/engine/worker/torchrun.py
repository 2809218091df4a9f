"""The ranks that torchrun started, from its environment variables. No torch.

Every process runs the same `dilabench run`. Rank 0 is the one that plans, prints and writes; the others are agents.
"""

import contextlib
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dilabench.errors import EnvironmentNotReady, ExitCode

if TYPE_CHECKING:
    from dilabench.engine.worker.nodes import Nodes

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
MEETING_TIMEOUT_S = 180.0
MOST_RANKS = 2**20
LOOPBACK = ("localhost", "127.0.0.1", "::1")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Rank:
    """This process among those that torchrun started, and the store that they share.

    attempt: how often torchrun has started them anew; the store may still hold what earlier ones wrote.
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
        """What our keys at the store begin with."""
        return f"dilabench/{self.attempt}"

    @property
    def store_address(self) -> str:
        """'tcp://host:port/name' as `dilabench.distributed.launch.meeting_store` takes it."""
        return f"tcp://{self.store_host}:{self.store_port}/{self.store_name}"


def machine_id() -> str:
    """The same for all processes of one machine, whatever network it shows them."""
    with contextlib.suppress(OSError):
        return BOOT_ID.read_text().strip()
    return socket.gethostname()


def on_ranks(work: Callable[["Nodes | None"], ExitCode]) -> ExitCode:
    """Do the command's work on rank 0 with the ranks of torchrun, or with None when torchrun did not start us.

    Any other rank serves until rank 0 has ended.
    """
    rank = Rank.from_environment()
    if rank is None:
        return work(None)
    if rank.store_host in LOOPBACK:
        # gloo would otherwise look the host's name up, which not every machine can.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if rank.rank > 0:
        from dilabench.engine.worker.node_agent import serve

        # It waits inside of torch, where Python sees no signal, and has nothing to save.
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        return serve(rank)
    from dilabench.engine.worker.nodes import gathered

    with gathered(rank) as nodes:
        return work(nodes)
