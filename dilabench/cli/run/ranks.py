"""`dilabench run` under torchrun: rank 0 is the command, every other rank serves it."""

import os
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING

from dilabench.engine.worker.torchrun import Rank
from dilabench.errors import ConfigError, ExitCode
from dilabench.request import RunRequest

if TYPE_CHECKING:
    from dilabench.engine.worker.nodes import Nodes

LOOPBACK = ("localhost", "127.0.0.1", "::1")


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
        for one in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(one, signal.SIG_DFL)
        return serve(rank)
    from dilabench.engine.worker.nodes import gathered

    with gathered(rank) as nodes:
        return work(nodes)


def asking_all(request: RunRequest, nodes: "Nodes | None") -> RunRequest:
    """The request for all ranks of torchrun unless it names a number. Raises ConfigError for more than there are."""
    if nodes is None:
        return request
    if request.nproc > nodes.size:
        raise ConfigError(
            f"--nproc {request.nproc} asks for more ranks than torchrun started ({nodes.size}); leave --nproc out"
        )
    return request if request.nproc > 1 else request.model_copy(update={"nproc": nodes.size})
