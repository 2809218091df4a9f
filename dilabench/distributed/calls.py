"""Ranks in different calls: found through the store of their group, whatever carries their messages.

Every rank numbers its calls and keeps a running hash of what they ask for, which costs no message. A thread writes the
last number and hash into the store twice a second and compares them with both neighbours' in the order of ranks. Two
hashes with one number differ if any call so far differed. Ranks that compare what a new call asks for compare number
and hash with it. So a difference is found at the next new call, or within about a second of the call that differs, and
every later use of the group raises the error.

gloo's messages carry the running hash as their tag, so that messages of ranks that differ never meet. The ranks wait
until they know of the disagreement; each then lets a receive time out, which closes gloo's connections, and ends the
call with the error. NCCL's messages have no tag. Equal sizes are exchanged, and the results of such calls
must not be used; unequal ones wait until the timeout of their group, while the text is logged on all ranks. Waits of a
GPU for messages by copy engines are ended (`ends`).
"""

from __future__ import annotations

import atexit
import json
import logging
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol, Self
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from dilabench.distributed.failures import RanksDisagreeError
from dilabench.distributed.groups import is_alive

logger = logging.getLogger(__name__)

PERIOD_S = 0.5
# Earlier calls that a rank remembers: more than it makes until peers have read its number.
REMEMBERED = 4096
# Tags of gloo: outside of calls, and one that no message has. Those of calls are larger, and less than 2^31.
NO_CALL, NO_MESSAGE = 0, 1
_TAGS = 2**31 - 2
# Of a value in the text of a request: bounds of many documents are long.
MOST_CHARACTERS = 200
# The running hash is a polynomial in an odd factor, modulo 2^64.
_FACTOR, _MASK = 0x9E3779B97F4A7C15, 2**64 - 1


@dataclass(frozen=True, slots=True)
class Request:
    """What all ranks must ask for alike in a call: by name as JSON, with the beginning of long values, and a hash of it
    all, the same in every process.
    """

    text: str
    hash: int

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Request:
        """The fields can be written as JSON."""
        return cls("{}", 0).with_fields(fields)

    def with_fields(self, fields: Mapping[str, Any]) -> Request:
        """The same request with further fields."""
        known, texts = self.hash, [self.text[1:-1]] if self.text != "{}" else []
        for name, value in sorted(fields.items()):
            text = json.dumps(value, sort_keys=True)
            known = _hash(f"{known} {name} {text}")
            if len(text) > MOST_CHARACTERS:
                text = json.dumps(f"{text[:MOST_CHARACTERS]} ... ({_hash(text):x})")
            texts.append(f"{json.dumps(name)}: {text}")
        return Request(f"{{{', '.join(texts)}}}", known)


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest())


class Count(NamedTuple):
    """How many calls a rank has made since its last call that failed, how many failed, and the hash of the first."""

    failed: int
    number: int
    hash: int


Remembered = tuple[Count, str]
"""A call, and the text of its request."""


class Fact(NamedTuple):
    """What ranks exchange at a new call."""

    token: str
    made: Count


class _Shares(Protocol):
    """Ranks that exchange small facts."""

    def share(self, fact: Any) -> list[Any]: ...


def disagreement(requests: Mapping[int, str]) -> str | None:
    """The fields in which the requests of ranks differ, as a sentence; None if their texts are equal."""
    if len({*requests.values()}) == 1:
        return None
    by_rank: dict[int, dict[str, Any]] = {rank: json.loads(text) for rank, text in requests.items()}
    first, *others = by_rank.values()
    names = [name for name in first if any(request.get(name) != first[name] for request in others)]
    return _disagree(
        f"rank {rank} has " + ", ".join(f"{name} {json.dumps(request.get(name))}" for name in names)
        for rank, request in by_rank.items()
    )


def first_disagreement(calls: Mapping[int, Sequence[Remembered]]) -> str | None:
    """How the first calls that differ do, as a sentence; None if all calls that ranks have in common are equal.

    calls: by rank, the calls that it remembers.
    """
    by_rank = {rank: {count[:2]: (count.hash, text) for count, text in several} for rank, several in calls.items()}
    for number in sorted(set.intersection(*map(set, by_rank.values()))):
        if text := disagreement({rank: known[number][1] for rank, known in by_rank.items()}):
            return text
        hashes = {rank: known[number][0] for rank, known in by_rank.items()}
        if len({*hashes.values()}) > 1:
            return _disagree(f"rank {rank} made calls of hash {known:x}" for rank, known in hashes.items())
    return None


def _disagree(by_rank: Iterable[str]) -> str:
    return f"ranks disagree on the workload: {'; '.join(by_rank)}; give every rank the same request"


class Calls:
    """The calls of this rank in one group, in the order made. group: gloo's, or the gloo group beside NCCL's.

    ends: by device, what ends the waits of this rank's messages there, given the reason. tag: of gloo's messages now.

    `with calls.numbered(request)` is around each call. Ranks that compare requests exchange a `Fact`. The token of rank
    0 names the group in the store, which may hold entries of an earlier group with the same name.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, size: int) -> None:
        self._token = secrets.token_hex(8)
        self._group, self._rank = ref(group), rank
        self._neighbours = {(rank + 1) % size, (rank - 1) % size}
        self._peers = [peer for peer in range(size) if peer != rank]
        self._group_store = group.get_group_store()
        self._store: PrefixStore | None = None
        self.tag = NO_CALL
        # The `Count` of this rank, and of earlier calls with their requests, in parts.
        self._failed = self._number = self._hash = 0
        self._history: deque[tuple[int, int, int, Request]] = deque(maxlen=REMEMBERED)
        self._written = Count(0, 0, 0)
        self.ends: dict[torch.device, Callable[[str], None]] = {}
        self._disagreement = ""

    def check(self) -> None:
        """Raise RanksDisagreeError after ranks were found in different calls."""
        if self._disagreement:
            raise RanksDisagreeError(self._disagreement)

    def numbered(self, request: Request) -> Self:
        """Count a call, which begins now. Raises RanksDisagreeError as `check`."""
        if self._disagreement:
            raise RanksDisagreeError(self._disagreement)
        self._number = number = self._number + 1
        self._hash = known = (self._hash * _FACTOR + request.hash) & _MASK
        self._history.append((self._failed, number, known, request))
        self.tag = NO_MESSAGE + 1 + known % _TAGS
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self.tag = NO_CALL
        if error is None:
            return
        if not isinstance(error, (ValueError, RanksDisagreeError)):
            # If memory runs out on all ranks, one of them may be in its backward pass already: all count from here on.
            self._failed += 1
            self._number = self._hash = 0
            self._history.clear()
        if isinstance(error, RuntimeError) and (text := self._found()):
            raise RanksDisagreeError(text) from error

    @property
    def fact(self) -> Fact:
        """What this rank gives its peers at a new call."""
        return Fact(self._token, Count(self._failed, self._number, self._hash))

    def met(self, facts: Sequence[Fact]) -> bool:
        """Compare counts in the background from now on, given the facts of all ranks; True if they differ already."""
        if self._store is None:
            self._store = PrefixStore(f"dilabench/{facts[0].token}", self._group_store)
            _watch(self)
        return len({fact.made for fact in facts}) > 1

    def differ(self, world: _Shares) -> str:
        """How the calls of ranks differ, on all of them; every later use of the group raises it. All ranks call it."""
        by_rank = dict(enumerate(world.share((self.fact.made, self._remembered()))))
        text = first_disagreement({rank: calls for rank, (_, calls) in by_rank.items()}) or _disagree(
            f"rank {rank} has made {count.number} calls after {count.failed} that failed"
            for rank, (count, _) in by_rank.items()
        )
        self._end(text)
        return text

    def _remembered(self) -> list[Remembered]:
        return [(Count(*count), request.text) for *count, request in self._history.copy()]

    def _end(self, text: str) -> None:
        """Let every later use of the group raise this disagreement, and end the waits of devices."""
        self._disagreement = text
        logger.error("rank %d: %s", self._rank, text)
        for end in self.ends.values():
            end(text)

    def look(self) -> None:
        """Write this rank's count and compare it with those of its neighbours."""
        group, store = self._group(), self._store
        if store is None or self._disagreement:
            return
        try:
            if group is None or not is_alive(group):
                self._store = None
            elif text := self._compared(store):
                self._end(text)
                self._end_waits(group)
        except RuntimeError:
            # The process that serves the store has ended.
            self._store = None

    def _found(self) -> str | None:
        """The disagreement that a rank has found."""
        with suppress(RuntimeError):
            if self._store is not None and self._store.check(["disagreement"]):
                return self._store.get("disagreement").decode()
        return None

    def _compared(self, store: PrefixStore) -> str | None:
        """The disagreement with a peer, which is written into the store."""
        history = self._history.copy()
        count = Count(*history[-1][:3]) if history else self._written
        if count != self._written:
            store.set(f"count {self._rank}", json.dumps(count))
            self._written = count
        if not store.check(["differ"]):
            if not any(self._differs(theirs, history) for theirs in self._counts_of_neighbours(store)):
                return None
            store.set("differ", "")
        if text := self._found():
            return text
        mine = self._remembered()
        store.set(f"calls {self._rank}", _written(mine))
        for peer in self._peers:
            if store.check([f"calls {peer}"]):
                text = first_disagreement({self._rank: mine, peer: _read(store.get(f"calls {peer}"))})
                if text:
                    store.set("disagreement", text)
                    return text
        return None

    def _counts_of_neighbours(self, store: PrefixStore) -> Iterator[Count]:
        for peer in self._neighbours:
            if store.check([f"count {peer}"]):
                yield Count(*json.loads(store.get(f"count {peer}")))

    @staticmethod
    def _differs(theirs: Count, history: Sequence[tuple[int, int, int, Request]]) -> bool:
        """Return True if the count of the same number has another hash in this rank's history."""
        place = theirs.number - history[0][1] if history else -1
        return 0 <= place < len(history) and history[place][:2] == theirs[:2] and history[place][2] != theirs.hash

    def _end_waits(self, group: dist.ProcessGroup) -> None:
        """Let a receive from each peer time out, after which gloo closes all connections of this rank.

        A receive from a peer that has closed its connections fails immediately, and closes no others.
        """
        for peer in self._peers:
            inbox = torch.empty(1, device="cpu", dtype=torch.float32)
            with suppress(RuntimeError):
                work = dist.irecv(inbox, group=group, group_src=peer, tag=NO_MESSAGE)
                assert work is not None
                work.wait(timedelta(milliseconds=1))


def _written(calls: Sequence[Remembered]) -> str:
    """Calls as text, with each request once."""
    places = {text: place for place, text in enumerate(dict.fromkeys(text for _, text in calls))}
    return json.dumps([[*places], [(count, places[text]) for count, text in calls]])


def _read(text: bytes) -> list[Remembered]:
    requests, calls = json.loads(text)
    return [(Count(*count), requests[place]) for count, place in calls]


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
def _stop() -> None:
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
