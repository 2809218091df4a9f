"""Ranks that wait for each other in different calls: found through the store of their group, and ended.

A call that is new to all ranks compares what they ask for before it sends anything. If it is new to one of them only,
that rank waits for facts while the others wait for messages. Every rank therefore numbers its calls, which costs no
message. A rank that has been in one call for `PATIENCE_S` seconds, or whose GPU has not come to the end of its last
call for that long, writes its recent numbers and requests into the store, and reads what waiting peers wrote. Two
requests with one number can never pair, however long the ranks wait.

Waits for gloo's messages end only by an error of their connections. The rank that finds the disagreement writes it into
the store and lets a receive time out, which closes its connections, and all ranks end with the text in the store. Waits
of a GPU for messages by copy engines are ended by these: what it computes from then on is wrong, and every later use of
the group raises the error. NCCL's kernels wait until the timeout of their group, although another rank may have ended
with the error, whose text is logged on all.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Self
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from dilabench.distributed.failures import RanksDisagreeError
from dilabench.distributed.transport.copies import let_others_capture
from dilabench.kernels.streams import current_stream

logger = logging.getLogger(__name__)

PATIENCE_S, PERIOD_S = 2.0, 0.5
# Earlier calls that a rank remembers: one that only sends may be that far ahead of one that waits.
REMEMBERED = 64
# A tag of gloo that no message has.
NO_MESSAGE = 0x0D11AB
MOST_CHARACTERS = 200


def disagreement(requests: Mapping[int, Mapping[str, Any]]) -> str | None:
    """The fields in which the requests of ranks differ, as a sentence; None if they are equal.

    `algorithm` alone is no disagreement: a rank without rows has another one.
    """
    first, *others = requests.values()
    fields = [name for name in first if any(request.get(name) != first[name] for request in others)]
    if not {*fields} - {"algorithm"}:
        return None
    texts = {
        rank: ", ".join(f"{name} {json.dumps(request.get(name))[:MOST_CHARACTERS]}" for name in fields)
        for rank, request in requests.items()
    }
    by_rank = "; ".join(f"rank {rank} has {text}" for rank, text in texts.items())
    return f"ranks disagree on the workload: {by_rank}; give every rank the same request"


class Calls:
    """The calls of this rank in one group, in the order made. group: gloo's, or the gloo group beside NCCL's.

    ends: by device, what ends the waits of this rank's messages there, given the reason.

    `with calls.numbered(request)` is around each call. `token`: exchanged by ranks that compare requests; rank 0's
    names the group in the store, which may hold entries of an earlier group with the same name.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, size: int) -> None:
        self.token = secrets.token_hex(8)
        self._group, self._rank = ref(group), rank
        self._peers = [peer for peer in range(size) if peer != rank]
        self._group_store = group.get_group_store()
        self._store: PrefixStore | None = None
        self._number = self._written = 0
        self._recent: deque[tuple[int, Mapping[str, Any]]] = deque(maxlen=REMEMBERED)
        self._began_s: float | None = None
        self.ends: dict[torch.device, Callable[[str], None]] = {}
        self._disagreement = ""
        # On a GPU: the end of the last call, and when the host was there.
        self._device: torch.device | None = None
        self._last: torch.cuda.Event | None = None
        self._ended_s = 0.0

    def met(self, token: str) -> None:
        """The ranks have compared requests; `token` is rank 0's. From now on waits are watched."""
        if self._store is None:
            self._store = PrefixStore(f"dilabench/{token}", self._group_store)
            _watch(self)

    def check(self) -> None:
        """Raise RanksDisagreeError after ranks were found in different calls."""
        if self._disagreement:
            raise RanksDisagreeError(self._disagreement)

    def numbered(self, request: Mapping[str, Any], device: torch.device) -> Self:
        """Count a call, which begins now. Raises RanksDisagreeError as `check`."""
        self.check()
        self._device = device
        self._number += 1
        self._recent.append((self._number, request))
        self._began_s = time.monotonic()
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self._began_s = None
        if self._device is not None and self._device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            self._ended_s = time.monotonic()
            self._last = self._last or torch.cuda.Event()
            self._last.record(current_stream(self._device))
        if isinstance(error, RuntimeError) and (text := self._found()):
            raise RanksDisagreeError(text) from error

    def _found(self) -> str | None:
        """The disagreement that a rank has found."""
        # Without its store the group is gone.
        with contextlib.suppress(RuntimeError):
            if self._store is not None and self._store.check(["disagreement"]):
                return self._store.get("disagreement").decode()
        return None

    def look(self) -> None:
        """Compare this rank's calls with those of waiting peers, if it has waited long."""
        if self._store is None or self._disagreement or not self._waits():
            return
        with contextlib.suppress(RuntimeError):
            if text := self._found() or self._compared(self._store):
                self._disagreement = text
                logger.error("rank %d: %s", self._rank, text)
                for end in self.ends.values():
                    end(text)

    def _waits(self) -> bool:
        """Return True if the host has been in a call for long, or the GPU has not come to the end of the last one."""
        now_s, began_s, last = time.monotonic(), self._began_s, self._last
        if began_s is not None and now_s - began_s >= PATIENCE_S:
            return True
        if last is None or now_s - self._ended_s < PATIENCE_S:
            return False
        # A thread begins on the first GPU, where this process may have nothing.
        torch.cuda.set_device(self._device)
        return not last.query()

    def _compared(self, store: PrefixStore) -> str | None:
        """The disagreement with a waiting peer; it is then told, and its waits end."""
        recent = list(self._recent)
        if self._written != recent[-1][0]:
            store.set(f"waits {self._rank}", json.dumps(recent))
            self._written = recent[-1][0]
        for peer in self._peers:
            if not store.check([f"waits {peer}"]):
                continue
            theirs = dict(json.loads(store.get(f"waits {peer}")))
            for number, mine in recent:
                request = theirs.get(number)
                if request and (text := disagreement({self._rank: _as_read(mine), peer: request})):
                    store.set("disagreement", text)
                    self._end_waits(peer)
                    return text
        return None

    def _end_waits(self, peer: int) -> None:
        if (group := self._group()) is not None:
            inbox = torch.empty(1, device="cpu", dtype=torch.float32)
            with contextlib.suppress(RuntimeError):
                work = dist.irecv(inbox, group=group, group_src=peer, tag=NO_MESSAGE)
                assert work is not None
                work.wait(timedelta(milliseconds=1))


def _as_read(request: Mapping[str, Any]) -> Any:
    """A request as a peer reads it."""
    return json.loads(json.dumps(request))


# The calls of each group, which its worlds share, and those that the thread looks at.
_calls: WeakKeyDictionary[dist.ProcessGroup, Calls] = WeakKeyDictionary()
_watched: WeakSet[Calls] = WeakSet()
_lock, _ends = threading.Lock(), threading.Event()
_thread: threading.Thread | None = None


def calls_of(group: dist.ProcessGroup, rank: int, size: int) -> Calls:
    """The calls of a gloo group."""
    calls = _calls.get(group)
    if calls is None:
        calls = _calls[group] = Calls(group, rank, size)
    return calls


def _watch(calls: Calls) -> None:
    global _thread
    with _lock:
        _watched.add(calls)
        if _thread is None or not _thread.is_alive():
            _thread = threading.Thread(target=_look_at_all, name="dilabench-calls", daemon=True)
            _thread.start()


@atexit.register
def _end() -> None:
    """End the thread before Python does: one that returns from torch meanwhile aborts the process."""
    _ends.set()
    if _thread is not None:
        _thread.join()


def _look_at_all() -> None:
    """Look at the calls of all groups from time to time."""
    if torch.cuda.is_available():
        let_others_capture()
    while not _ends.wait(PERIOD_S):
        with _lock:
            several = list(_watched)
        for calls in several:
            calls.look()
        several.clear()
