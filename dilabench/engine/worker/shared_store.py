"""Messages between the ranks of torchrun, through the store that torch.distributed keeps for them. Opens no socket.

A message is stored under a key until its reader has taken it. Each rank stores a sign of life every second: a rank
whose sign stays the same is lost. The store is asked again and again, because its own waits neither end on a signal
nor time out without a warning.
"""

import itertools
import threading
import time
from typing import TypeVar

from pydantic import TypeAdapter
from torch._C._distributed_c10d import PrefixStore

from dilabench.distributed.launch import store_from_environment
from dilabench.engine.worker.torchrun import MEETING_TIMEOUT_S, Rank
from dilabench.validation import Model

BEAT_S = 1.0
SILENT_S = 8.0
# Seconds between two looks into the store, at first and at most: a rank that waits leaves the cores to others.
POLL_S, LONGEST_POLL_S = 0.005, 0.1

MessageT = TypeVar("MessageT")


class SharedStore:
    """The store as one rank uses it. Raises EnvironmentNotReady when it cannot be reached."""

    def __init__(self, rank: Rank) -> None:
        # If torchrun's agent has opened no store, rank 0 does so here.
        opened = store_from_environment(rank.rank, rank.size, MEETING_TIMEOUT_S, wait=False)
        self._store = PrefixStore(rank.store_name, opened)
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._why_gone: str | None = None
        self._closed = threading.Event()
        threading.Thread(target=self._beat, args=(f"beat/{rank.rank}",), daemon=True).start()

    def put(self, key: str, message: Model) -> None:
        """Leave a message; nothing happens if the store is gone, which `lost` reports."""
        try:
            self._store.set(key, message.model_dump_json())
        except RuntimeError as error:
            self._gone(error)

    def arrived(self, key: str, within_s: float = 0.0) -> bool:
        """Whether a message is there, or comes within some seconds; False if the store is gone."""
        deadline, pause_s = time.monotonic() + within_s, POLL_S
        try:
            while not self._store.check([key]):
                if (left_s := deadline - time.monotonic()) <= 0:
                    return False
                time.sleep(min(pause_s, left_s))
                pause_s = min(1.5 * pause_s, LONGEST_POLL_S)
        except RuntimeError as error:
            self._gone(error)
            return False
        return True

    def take(self, key: str, kind: TypeAdapter[MessageT]) -> MessageT:
        """Remove a message that has arrived, and return it. Raises RuntimeError if the store is gone."""
        message = kind.validate_json(self._store.get(key))
        self._store.delete_key(key)
        return message

    def lost(self, peer: int) -> str | None:
        """Why a rank cannot be reached any more; None while it can."""
        now, key = time.monotonic(), f"beat/{peer}"
        sign, since = self._seen.get(peer, (b"", now))
        try:
            latest = self._store.get(key) if self._store.check([key]) else b""
        except RuntimeError as error:
            self._gone(error)
            return self._why_gone
        self._seen[peer] = (sign, since) if latest == sign else (latest, now)
        return f"no sign of life for {SILENT_S:g} s" if now - self._seen[peer][1] > SILENT_S else None

    def close(self) -> None:
        """Show no sign of life any more."""
        self._closed.set()

    def _gone(self, error: RuntimeError) -> None:
        self._why_gone = f"torch's store is gone ({str(error).splitlines()[0]})"

    def _beat(self, key: str) -> None:
        for number in itertools.count(1):
            try:
                self._store.set(key, str(number))
            except RuntimeError as error:
                self._gone(error)
                return
            if self._closed.wait(BEAT_S):
                return
