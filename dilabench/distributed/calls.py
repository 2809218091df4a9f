"""Ranks that wait for each other in different calls: found through the store of their group, and ended.

A call that is new to all ranks compares what they ask for before it sends anything. If it is new to one of them only,
that rank waits for facts while the others wait for messages. Every rank therefore numbers its calls, which costs no
message. A rank that has been in one call for `PATIENCE_S` seconds writes the number and the request into the store,
and reads what waiting peers wrote. Two requests with one number can never pair, however long the ranks wait.

Waits for gloo's messages end only by an error of their connections. The rank that finds the disagreement writes it into
the store and lets a receive time out, which closes its connections, and all ranks end with the text in the store. With
NCCL the host does not wait in a call, so nothing is watched.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import secrets
import threading
import time
from collections import deque
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Self
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from dilabench.distributed.failures import RanksDisagreeError

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
    """The calls of this rank in one gloo group, in the order made.

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

    def met(self, token: str) -> None:
        """The ranks have compared requests; `token` is rank 0's. From now on waits are watched."""
        if self._store is None:
            self._store = PrefixStore(f"dilabench/{token}", self._group_store)
            _watch(self)

    def numbered(self, request: Mapping[str, Any]) -> Self:
        """Count a call, which begins now."""
        self._number += 1
        self._recent.append((self._number, request))
        self._began_s = time.monotonic()
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self._began_s = None
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
        began_s, store, recent = self._began_s, self._store, list(self._recent)
        if began_s is None or store is None or time.monotonic() - began_s < PATIENCE_S:
            return
        with contextlib.suppress(RuntimeError):
            number, request = recent[-1]
            if self._written != number:
                store.set(f"waits {self._rank}", json.dumps([number, request]))
                self._written = number
            for peer in self._peers:
                if not store.check([f"waits {peer}"]):
                    continue
                number, theirs = json.loads(store.get(f"waits {peer}"))
                mine = dict(recent).get(number)
                if mine is not None and (text := disagreement({self._rank: _as_read(mine), peer: theirs})):
                    store.set("disagreement", text)
                    self._end_waits(peer)
                    return

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


# The calls of each gloo group, which its worlds share, and those that the thread looks at.
_calls: WeakKeyDictionary[dist.ProcessGroup, Calls] = WeakKeyDictionary()
_watched: WeakSet[Calls] = WeakSet()
_lock, _ends = threading.Lock(), threading.Event()
_thread: threading.Thread | None = None


def calls_of(group: dist.ProcessGroup, rank: int, size: int) -> Calls:
    """The calls of a group."""
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
    while not _ends.wait(PERIOD_S):
        with _lock:
            several = list(_watched)
        for calls in several:
            calls.look()
        several.clear()
