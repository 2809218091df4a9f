"""The ranks that torchrun started, on one machine or several.

Rank 0 plans, prints and writes. Each other rank carries out rank 0's requests, one after the other: start a worker
process, pass a command on to it, end it. Request n to rank r is stored under 'r/n', its answer under 'r/n/answer'. When
rank 0 is gone, the others end; a rank without a sign of life counts as lost, and every later request to it fails.
"""

import contextlib
import itertools
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from typing import Any, Literal, cast

from pydantic import TypeAdapter

from dilabench.engine.device.lock import device_lock
from dilabench.engine.progress import Progress
from dilabench.engine.worker.client import (
    LOOK_S,
    START_TIMEOUT_S,
    RankProcess,
    WorkerFailure,
    WorkerProcess,
    answered,
    no_answer,
)
from dilabench.engine.worker.process import warm_server
from dilabench.engine.worker.protocol import REPLY, AnyCommand, Command, WorkerSettings
from dilabench.engine.worker.replies import Released, Reply, Trouble
from dilabench.engine.worker.shared_store import SharedStore
from dilabench.engine.worker.torchrun import MEETING_TIMEOUT_S, Rank, machine_id
from dilabench.errors import EnvironmentNotReady, ExitCode, said
from dilabench.machine import Machine, detect
from dilabench.record import GpuInfo
from dilabench.validation import Model
from dilabench.version import __version__

# torchrun kills rank 0 if it is still there 30 s after another rank has died.
END_TIMEOUT_S = 3.0
LOOPBACK = ("localhost", "127.0.0.1", "::1")


class RankFacts(Model):
    """The facts of a rank that rank 0 needs: its machine, its GPU or None, the versions that must agree."""

    host: str
    machine: str
    gpus: int
    local_rank: int
    gpu: GpuInfo | None
    versions: dict[str, str]


class Request(Model):
    """A request of rank 0 to another rank.

    worker: the name of the worker process that is started, gets the command, or is ended. locks: the GPUs of its
    machine that it locks first, until the run is over.
    """

    do: Literal["start", "ask", "kill", "end"]
    worker: str = ""
    settings: WorkerSettings | None = None
    locks: tuple[int, ...] = ()
    command: AnyCommand | None = None


FACTS, REQUEST = TypeAdapter(RankFacts), TypeAdapter(Request)


def facts_of(rank: Rank, machine: Machine) -> RankFacts:
    """The facts of this process."""
    return RankFacts(
        host=socket.gethostname(),
        machine=machine_id(),
        gpus=len(machine.gpus),
        local_rank=rank.local_rank,
        gpu=machine.gpus[rank.local_rank] if rank.local_rank < len(machine.gpus) else None,
        versions={"dilabench": __version__, "torch": version("torch")},
    )


class Serving:
    """A rank other than 0: its worker processes by name."""

    def __init__(self, rank: Rank, machine: Machine, store: SharedStore) -> None:
        self._rank, self._machine, self._store = rank, machine, store
        self._workers: dict[str, WorkerProcess] = {}
        self._held = contextlib.ExitStack()
        self._locked = False

    def until_the_end(self) -> ExitCode:
        """Carry out requests until rank 0 ends the run or is gone."""
        try:
            for number in itertools.count(1):
                while not self._store.arrived(self._key(number), LOOK_S):
                    if (lost := self._store.lost(0)) is not None:
                        text = f"rank {self._rank.rank}: rank 0 is gone ({lost}); its workers here were ended"
                        print(text, file=sys.stderr)  # noqa: T201
                        return ExitCode.INTERRUPTED
                request = self._store.take(self._key(number), REQUEST)
                answer = self._carried_out(request, number)
                if answer is not None:
                    self._store.put(f"{self._key(number)}/answer", answer)
                if request.do == "end":
                    break
        finally:
            for worker in self._workers.values():
                worker.kill()
            self._held.close()
        return ExitCode.OK

    def _key(self, number: int) -> str:
        return f"{self._rank.rank}/{number}"

    def _carried_out(self, request: Request, number: int) -> Reply | None:
        """The answer to a request; None if rank 0 waits for none."""
        if request.do == "end":
            return Released()
        if request.do == "kill":
            if (ended := self._workers.pop(request.worker, None)) is not None:
                ended.kill()
            return None
        try:
            return self._worker_answer(request, number)
        except (WorkerFailure, EnvironmentNotReady) as error:
            failure = error if isinstance(error, WorkerFailure) else WorkerFailure("crash", said(error), died=True)
            return Trouble(
                code=failure.code,
                why=failure.why,
                traceback=failure.traceback,
                fatal=failure.died,
                state=failure.state,
            )

    def _worker_answer(self, request: Request, number: int) -> Reply | None:
        """The answer of a worker process; None if it is to be ended instead."""
        doing = "start" if request.command is None else request.command.name
        if request.settings is not None:
            if request.locks and not self._locked:
                lock = device_lock(
                    self._machine, self._rank.store_address, Progress(), gpus=request.locks, wait_s=START_TIMEOUT_S / 2
                )
                self._held.enter_context(lock)
                self._locked = True
            own = request.settings.model_copy(update={"gpu": self._rank.local_rank})
            self._workers[request.worker] = WorkerProcess(own)
        if (worker := self._workers.get(request.worker)) is None:
            raise WorkerFailure("crash", f"there is no worker {request.worker!r}", died=True)
        if request.command is not None:
            worker.send(request.command)
        while not worker.arrived(LOOK_S):
            # A further request can only be to end this one.
            if self._store.arrived(self._key(number + 1)) or self._store.lost(0) is not None:
                return None
        return worker.take(doing)


class Peer:
    """Another rank, as rank 0 sees it: its facts, and the requests that it carries out."""

    def __init__(self, rank: int, store: SharedStore) -> None:
        self.rank, self._store = rank, store
        self.facts: RankFacts
        self._numbers = itertools.count(1)
        self._lost: str | None = None

    def meet(self, within_s: float) -> bool:
        """Whether the rank has described itself, or does within some seconds."""
        key = f"facts/{self.rank}"
        if not self._store.arrived(key, within_s):
            return False
        self.facts = self._store.take(key, FACTS)
        return True

    def post(self, request: Request) -> str:
        """Send a request, and return the key of its answer."""
        key = f"{self.rank}/{next(self._numbers)}"
        self._store.put(key, request)
        return f"{key}/answer"

    def lost(self) -> str | None:
        """Why the rank cannot be reached, now and from now on; None while it can."""
        if self._lost is None and (how := self._store.lost(self.rank)) is not None:
            self._lost = f"the process that torchrun started for rank {self.rank} on {self.facts.host} is gone: {how}"
        return self._lost

    def arrived(self, key: str, within_s: float) -> bool:
        """Whether an answer is there, or comes within some seconds; True if none will come, for the rank is lost."""
        deadline = time.monotonic() + within_s
        while not self._store.arrived(key, min(LOOK_S, deadline - time.monotonic())):
            if self.lost() is not None:
                return True
            if time.monotonic() >= deadline:
                return False
        return True

    def take(self, key: str) -> Reply:
        """The answer that has arrived. Raises WorkerFailure for one that tells of trouble, and for a lost rank."""
        if self._store.arrived(key):
            return answered(self._store.take(key, REPLY))
        raise WorkerFailure("crash", self.lost() or "it gave no answer", died=True)


class PeerProcess:
    """A worker process that another rank has started (`client.RankProcess`)."""

    def __init__(self, peer: Peer, name: str, settings: WorkerSettings, locks: tuple[int, ...]) -> None:
        if (lost := peer.lost()) is not None:
            raise WorkerFailure("crash", lost, died=True)
        self._peer, self._name, self._over = peer, name, False
        self._answer = peer.post(Request(do="start", worker=name, settings=settings, locks=locks))

    @property
    def alive(self) -> bool:
        """Whether the process was not ended and its machine can be reached."""
        return not self._over and self._peer.lost() is None

    def send(self, command: Command[Any]) -> None:
        """Send a command."""
        self._answer = self._peer.post(Request(do="ask", worker=self._name, command=cast("AnyCommand", command)))

    def arrived(self, within_s: float = 0.0) -> bool:
        """Whether an answer is there, or comes within some seconds, or none will come."""
        return self._peer.arrived(self._answer, within_s)

    def take(self, doing: str) -> Reply:  # noqa: ARG002 - its own rank says what it was doing
        """The answer that has arrived. Raises WorkerFailure as `WorkerProcess.take` does, or for a lost rank."""
        try:
            return self._peer.take(self._answer)
        except WorkerFailure as failure:
            self._over |= failure.died
            raise

    def late(self, doing: str, timeout_s: float) -> WorkerFailure:
        """End a process that has not answered, and return the failure."""
        self.kill()
        return WorkerFailure("timeout", no_answer(doing, timeout_s), died=True)

    def kill(self) -> None:
        """Have the process ended, without waiting for it: its rank starts no other before."""
        if not self._over:
            self._peer.post(Request(do="kill", worker=self._name))
        self._over = True


class Nodes:
    """`client.Launcher` over the ranks of torchrun: rank r of a group is torchrun's rank r."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._names = itertools.count()
        self._store = SharedStore(rank)
        self._peers = {other: Peer(other, self._store) for other in range(1, rank.size)}

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self._rank.size

    def meet(self) -> None:
        """Wait until every rank has described itself. Raises EnvironmentNotReady when one does not come in time."""
        deadline = time.monotonic() + MEETING_TIMEOUT_S
        for rank, peer in self._peers.items():
            if not peer.meet(deadline - time.monotonic()):
                raise EnvironmentNotReady(
                    f"rank {rank} of {self.size} did not come within {MEETING_TIMEOUT_S:g} s; start the same "
                    "`dilabench run` with torchrun on every machine, and let them reach each other over TCP"
                )

    def machine(self, machine: Machine) -> Machine:
        """This machine with the GPUs of all ranks, one each.

        Raises EnvironmentNotReady when a rank has no GPU or other versions than rank 0.
        """
        everyone = {0: facts_of(self._rank, machine)} | {rank: peer.facts for rank, peer in self._peers.items()}
        for rank, facts in everyone.items():
            if facts.versions != everyone[0].versions:
                raise EnvironmentNotReady(
                    f"rank {rank} on {facts.host} has {facts.versions}, rank 0 {everyone[0].versions}; "
                    "install the same on every machine"
                )
        if machine.device == "cpu":
            return machine
        return Machine(device="cuda", gpus=tuple(_gpu_of(rank, facts) for rank, facts in everyone.items()))

    def gpus_here(self, ranks: int) -> Sequence[int]:
        """The GPUs of the ranks on rank 0's machine; the first rank of each other machine locks those of its own."""
        others = [rank for rank, peer in self._peers.items() if peer.facts.machine == machine_id()]
        return [rank for rank in (0, *others) if rank < ranks]

    def open_store(self) -> str:
        """A new name at the store that the ranks share."""
        return f"{self._rank.store_address}/world/{next(self._names)}"

    def close_store(self, store: str) -> None:
        """Does nothing: names are not used again."""

    def start(self, settings: WorkerSettings) -> RankProcess:
        """Start the worker process of a rank on that rank's machine. Raises WorkerFailure for a lost rank."""
        if settings.rank == 0:
            return WorkerProcess(settings.model_copy(update={"gpu": self._rank.local_rank}))
        peer = self._peers[settings.rank]
        return PeerProcess(peer, str(next(self._names)), settings, self._locks(settings.rank))

    def close(self) -> None:
        """Tell all ranks that the run is over. They would end without it, too: dead ones are not waited for long."""
        deadline = time.monotonic() + END_TIMEOUT_S
        answers = [(peer, peer.post(Request(do="end"))) for peer in self._peers.values() if peer.lost() is None]
        for peer, answer in answers:
            peer.arrived(answer, deadline - time.monotonic())
        self._store.close()

    def _locks(self, rank: int) -> tuple[int, ...]:
        """The GPUs that a rank locks: those of all ranks of its machine, if it is the first there.

        Rank 0 locks its own machine itself.
        """
        machine = self._peers[rank].facts.machine
        there = [peer for peer in self._peers.values() if peer.facts.machine == machine]
        if machine == machine_id() or there[0].rank != rank:
            return ()
        return tuple(peer.facts.local_rank for peer in there)


def _gpu_of(rank: int, facts: RankFacts) -> GpuInfo:
    if facts.gpu is None:
        raise EnvironmentNotReady(
            f"rank {rank} on {facts.host} needs GPU {facts.local_rank}, {facts.gpus} visible; start at most "
            "as many ranks per node as it has GPUs (torchrun --nproc-per-node)"
        )
    return facts.gpu


@contextlib.contextmanager
def gathered(rank: Rank) -> Iterator[Nodes]:
    """All ranks, until the block ends; then the other ranks end, too.

    Raises EnvironmentNotReady when the ranks do not meet.
    """
    nodes = Nodes(rank)
    try:
        nodes.meet()
        yield nodes
    finally:
        nodes.close()


def serve(rank: Rank) -> ExitCode:
    """Serve rank 0 until it ends the run or is gone. Raises EnvironmentNotReady when the store cannot be reached."""
    # Ctrl-C reaches every rank; rank 0 says when to end. Other signals end a rank, which has no results to save.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    warm_server()
    machine, store = detect(), SharedStore(rank)
    with contextlib.closing(store):
        store.put(f"facts/{rank.rank}", facts_of(rank, machine))
        return Serving(rank, machine, store).until_the_end()


def on_ranks(work: Callable[[Nodes | None], ExitCode]) -> ExitCode:
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
        return serve(rank)
    with gathered(rank) as nodes:
        return work(nodes)
