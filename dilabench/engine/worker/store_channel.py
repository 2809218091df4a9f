"""Messages between the ranks of torchrun, through the store that torch.distributed keeps for them. Opens no socket.

Message n to rank r is stored under 'r/n' until r has read it. Each rank sends its peers an empty message every second:
a rank that stops is lost.
"""

import contextlib
import itertools
import json
import queue
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from dilabench.distributed.launch import meeting_store, store_from_environment
from dilabench.engine.worker.torchrun import MEETING_TIMEOUT_S, Rank

BEAT_S = 1.0
SILENT_S = 60.0
CLOSE_TIMEOUT_S = 5.0


class StoreChannel:
    """One rank's end. `deliver(sender, message)` is called in the thread that reads, which must not be kept.

    Raises EnvironmentNotReady when the store cannot be reached.
    """

    def __init__(self, rank: Rank, deliver: Callable[[int, dict[str, Any]], None], peers: Iterable[int]) -> None:
        self._own, self._deliver = rank.rank, deliver
        # If torchrun's agent has opened no store, rank 0 does so here.
        store = store_from_environment(rank.rank, rank.size, MEETING_TIMEOUT_S)
        self._outbox = PrefixStore(f"{rank.store_name}/messages", store)
        # A client that waits keeps its connection busy.
        self._inbox = meeting_store(f"{rank.store_address}/messages", rank.size)
        self._due = dict.fromkeys(peers, time.monotonic() + MEETING_TIMEOUT_S)
        self._outgoing: queue.Queue[tuple[int, dict[str, Any]]] = queue.Queue()
        self._why_gone: str | None = None
        work = self._write, self._read
        self._threads = [threading.Thread(target=self._until_gone, args=(target,), daemon=True) for target in work]
        for thread in self._threads:
            thread.start()

    def send(self, to: int, message: dict[str, Any]) -> None:
        """Leave a message for a rank, without waiting for a store that may be gone, which `lost` reports."""
        self._outgoing.put((to, message))

    def lost(self, peer: int) -> str | None:
        """Why a rank cannot be reached any more; None while it can."""
        silent = time.monotonic() > self._due[peer]
        return self._why_gone or (f"no sign of life for {SILENT_S:g} s" if silent else None)

    def close(self) -> None:
        """Send the remaining messages, and stop reading."""
        self.send(self._own, {})
        for thread in self._threads:
            thread.join(CLOSE_TIMEOUT_S)

    def _until_gone(self, work: Callable[[], None]) -> None:
        try:
            work()
        except RuntimeError as error:
            self._why_gone = f"torch's store is gone ({str(error).splitlines()[0]})"

    def _write(self) -> None:
        to, beat_at = None, 0.0
        while to != self._own:
            if time.monotonic() >= beat_at:
                beat_at = time.monotonic() + BEAT_S
                for peer in self._due:
                    self._put(peer, {})
            with contextlib.suppress(queue.Empty):
                to, message = self._outgoing.get(timeout=max(0.0, beat_at - time.monotonic()))
                self._put(to, message)

    def _put(self, to: int, message: dict[str, Any]) -> None:
        self._outbox.set(f"{to}/{self._outbox.add(str(to), 1)}", json.dumps([self._own, message]))

    def _read(self) -> None:
        for number in itertools.count(1):
            key = f"{self._own}/{number}"
            while not self._arrived(key):
                pass
            sender, message = json.loads(self._inbox.get(key))
            self._inbox.delete_key(key)
            if sender == self._own:
                return
            self._due[sender] = time.monotonic() + SILENT_S
            if message:
                self._deliver(sender, message)

    def _arrived(self, key: str) -> bool:
        with contextlib.suppress(dist.DistStoreError):
            self._inbox.wait([key], timedelta(seconds=SILENT_S))
            return True
        return False
