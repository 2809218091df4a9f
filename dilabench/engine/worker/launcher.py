"""The place of the ranks of a group, and the store at which they meet. No torch."""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Protocol

from dilabench.engine.temporary_folder import temporary_folder
from dilabench.engine.worker.client import Worker
from dilabench.engine.worker.protocol import WorkerSettings


class Launcher(Protocol):
    """Starts the worker of a rank, and has a store for each group of ranks to meet at.

    `gpus_here`: which of the machine's GPUs (positions in `Machine.gpus`) on this host a group of that size uses.
    """

    def gpus_here(self, ranks: int) -> Sequence[int]: ...
    def open_store(self) -> str: ...
    def close_store(self, store: str) -> None: ...
    def start(self, key: str, settings: WorkerSettings) -> Worker: ...


class ThisMachine:
    """Every rank on this machine, rank r on its GPU r; they meet at a file."""

    def __init__(self) -> None:
        self._folders: dict[str, ExitStack] = {}

    def gpus_here(self, ranks: int) -> Sequence[int]:
        """GPU r for rank r, in order."""
        return range(ranks)

    def open_store(self) -> str:
        """The path of a file in a new temporary folder."""
        # gloo would otherwise look the host's name up, which not every machine can.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        folder = ExitStack()
        store = str(folder.enter_context(temporary_folder("ranks")) / "store")
        self._folders[store] = folder
        return store

    def close_store(self, store: str) -> None:
        """Remove the file and its folder."""
        if store in self._folders:
            self._folders.pop(store).close()

    def start(self, key: str, settings: WorkerSettings) -> Worker:
        """Start a worker process on this machine."""
        return Worker(key, settings.model_copy(update={"gpu": settings.rank}))
