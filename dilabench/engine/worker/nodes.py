"""The ranks that torchrun started, on one machine or several, as rank 0 sees them.

Each other rank has an agent that starts workers on its machine and passes commands on to them. An agent without a sign
of life counts as lost: every later request to it fails immediately, with this reason.
"""

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from dilabench.engine.device.lock import DEFAULT_WAIT_S
from dilabench.engine.worker.client import START_TIMEOUT_S, Worker, WorkerFailure
from dilabench.engine.worker.launcher import ThisMachine
from dilabench.engine.worker.node_agent import AgentCommand, facts_of, serve
from dilabench.engine.worker.protocol import CommandName, Hello, RankState, Reply, WorkerSettings
from dilabench.engine.worker.store_channel import BEAT_S, StoreChannel
from dilabench.engine.worker.torchrun import MEETING_TIMEOUT_S, Rank, machine_id
from dilabench.errors import EnvironmentNotReady, ExitCode
from dilabench.machine import Machine
from dilabench.record import GpuInfo

# Ending a process that holds a GPU's whole memory takes seconds.
REQUEST_TIMEOUT_S = 60.0
# torchrun kills rank 0 if it is still there 30 s after another rank has died.
END_TIMEOUT_S = 5.0
# A dead agent never answers; a live one needs seconds to end a process that holds a GPU's whole memory.
KILL_TIMEOUT_S = 6.0
LOOPBACK = ("localhost", "127.0.0.1", "::1")


@contextlib.contextmanager
def gathered(rank: Rank) -> Iterator["Nodes"]:
    """All ranks, until the block ends; then their agents end, too.

    Raises EnvironmentNotReady when the ranks do not meet.
    """
    nodes = Nodes(rank)
    try:
        nodes.meet()
        yield nodes
    finally:
        nodes.close()


class RemoteAgent:
    """The agent of another rank, as rank 0 sees it."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.channel: StoreChannel
        self.facts: dict[str, Any] = {}
        self._lost: str | None = None
        self._numbers = itertools.count(1)
        # It describes itself unasked.
        self._waiting: dict[int, Future[dict[str, Any]]] = {0: Future()}

    @property
    def host(self) -> str:
        """The name of the agent's machine."""
        return str(self.facts.get("host", "its machine"))

    def ask(self, do: AgentCommand, *, timeout_s: float = REQUEST_TIMEOUT_S, **arguments: Any) -> dict[str, Any]:
        """Send a request and return the answer. Raises WorkerFailure when it fails or the agent is lost."""
        number = self._send(do, arguments)
        answer = self.wait(number, f"no answer to {do.value!r} within {timeout_s:g} s", timeout_s)
        if "failure" in answer:
            state = answer["failure"].pop("state", None)
            raise WorkerFailure(**answer["failure"], state=None if state is None else RankState.model_validate(state))
        return answer

    def kill(self, worker: str) -> None:
        """End a worker. A rank that does not answer soon may be dead, or only slow: it is not lost yet."""
        number = self._send(AgentCommand.KILL, {"name": worker})
        with contextlib.suppress(TimeoutError):
            self._waiting[number].result(KILL_TIMEOUT_S if self._lost is None else 0)
        del self._waiting[number]

    def _send(self, do: AgentCommand, arguments: dict[str, Any]) -> int:
        """Send a request, unless the agent is lost, and return its number."""
        number = next(self._numbers)
        self._waiting[number] = Future()
        if self._lost is None:
            self.channel.send(self.rank, {"number": number, "do": do, "arguments": arguments})
        return number

    def wait(self, number: int, why_late: str, timeout_s: float) -> dict[str, Any]:
        """The answer to request `number`. Raises WorkerFailure when the agent is lost, or late and so lost from now."""
        deadline = time.monotonic() + timeout_s
        try:
            while self._lost is None:
                with contextlib.suppress(TimeoutError):
                    return self._waiting[number].result(BEAT_S)
                how = self.channel.lost(self.rank) or (why_late if time.monotonic() > deadline else None)
                if how is not None:
                    self._lost = f"the process that torchrun started for rank {self.rank} on {self.host} is gone: {how}"
            raise WorkerFailure("crash", self._lost, died=True)
        finally:
            del self._waiting[number]

    def take(self, number: int, answer: dict[str, Any]) -> None:
        """An answer has arrived."""
        if (waiting := self._waiting.get(number)) is not None:
            waiting.set_result(answer)


class RemoteWorker(Worker):
    """`Worker` on another rank's machine, started and asked through the agent there."""

    def __init__(self, key: str, settings: WorkerSettings, agent: RemoteAgent, name: str) -> None:
        self.key = key
        self._agent, self._name = agent, name
        self._killed = False
        timeout_s = START_TIMEOUT_S + REQUEST_TIMEOUT_S
        started = agent.ask(
            AgentCommand.START, timeout_s=timeout_s, name=name, settings=settings.model_dump(mode="json")
        )
        self.hello = Hello.model_validate(started["hello"])

    @property
    def alive(self) -> bool:
        """Whether the process runs and its machine can be reached."""
        try:
            return not self._killed and bool(self._agent.ask(AgentCommand.ALIVE, name=self._name)["alive"])
        except WorkerFailure:
            return False

    def ask(self, name: CommandName, handle: str = "", *, timeout_s: float, **arguments: Any) -> Reply:
        """Send a command and wait for its answer. Raises WorkerFailure as `Worker.ask` does, or for a lost machine."""
        asked = {"name": self._name, "command": name, "handle": handle, "arguments": arguments}
        # Its agent knows better than this process when the time is over.
        found = self._agent.ask(
            AgentCommand.ASK, timeout_s=timeout_s + REQUEST_TIMEOUT_S, own_timeout_s=timeout_s, **asked
        )
        return Reply.model_validate(found["reply"])

    def kill(self) -> None:
        """End the process, if its machine can still be reached."""
        self._killed = True
        self._agent.kill(self._name)


class Nodes:
    """`launcher.Launcher` over the ranks of torchrun: rank r of a group is torchrun's rank r."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._names = itertools.count()
        self._locked = False
        self._here = ThisMachine()
        self._agents = {other: RemoteAgent(other) for other in range(1, rank.size)}
        self._channel = StoreChannel(rank, self._deliver, peers=self._agents)
        for agent in self._agents.values():
            agent.channel = self._channel

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self._rank.size

    def meet(self) -> None:
        """Wait until every rank has described itself. Raises EnvironmentNotReady when one does not come in time."""
        deadline = time.monotonic() + MEETING_TIMEOUT_S
        for rank, agent in self._agents.items():
            try:
                agent.facts = agent.wait(0, "it did not come", max(0.0, deadline - time.monotonic()))
            except WorkerFailure:
                raise EnvironmentNotReady(
                    f"rank {rank} of {self.size} did not come within {MEETING_TIMEOUT_S:g} s; start the same "
                    "`dilabench run` with torchrun on every machine, and let them reach each other over TCP"
                ) from None

    def machine(self, machine: Machine) -> Machine:
        """This machine with the GPUs of all ranks, one each.

        Raises EnvironmentNotReady when a rank has no GPU or other versions than rank 0.
        """
        everyone = {0: facts_of(self._rank, machine)} | {rank: agent.facts for rank, agent in self._agents.items()}
        for rank, facts in everyone.items():
            if facts["versions"] != everyone[0]["versions"]:
                raise EnvironmentNotReady(
                    f"rank {rank} on {facts['host']} has {facts['versions']}, rank 0 {everyone[0]['versions']}; "
                    "install the same on every machine"
                )
        if machine.device == "cpu":
            return machine
        gpus = tuple(_gpu_of(rank, facts) for rank, facts in everyone.items())
        return Machine(device="cuda", gpus=gpus)

    def gpus_here(self, ranks: int) -> Sequence[int]:
        """The GPUs of the ranks on rank 0's machine; the agents of other machines lock their own."""
        others = [rank for rank, agent in self._agents.items() if agent.facts["machine"] == machine_id()]
        return [rank for rank in (0, *others) if rank < ranks]

    def open_store(self) -> str:
        """A file, if all ranks are on this machine; else a new name at the store that torchrun's ranks share."""
        self._lock_machines()
        if all(agent.facts["machine"] == machine_id() for agent in self._agents.values()):
            return self._here.open_store()
        return f"{self._rank.store_address}/world/{next(self._names)}"

    def close_store(self, store: str) -> None:
        """Remove a file; names are not used again."""
        self._here.close_store(store)

    def start(self, key: str, settings: WorkerSettings) -> Worker:
        """Start the worker of a rank on that rank's machine."""
        if settings.rank == 0:
            return Worker(key, settings.model_copy(update={"gpu": self._rank.local_rank}))
        return RemoteWorker(key, settings, self._agents[settings.rank], f"{key} {next(self._names)}")

    def close(self) -> None:
        """Tell all agents that the run is over. They would end without it, too: dead ones are not waited for long."""
        deadline = time.monotonic() + END_TIMEOUT_S
        for agent in self._agents.values():
            with contextlib.suppress(WorkerFailure):
                agent.ask(AgentCommand.END, timeout_s=max(0.0, deadline - time.monotonic()))
        self._channel.close()

    def _deliver(self, sender: int, message: dict[str, Any]) -> None:
        self._agents[sender].take(**message)

    def _lock_machines(self) -> None:
        if not self._locked:
            machines: dict[str, list[RemoteAgent]] = {}
            for agent in self._agents.values():
                machines.setdefault(agent.facts["machine"], []).append(agent)
            # Rank 0 has locked its own machine already.
            machines.pop(machine_id(), None)
            for _, agents in sorted(machines.items()):
                gpus = [agent.facts["local_rank"] for agent in agents]
                wait_s = DEFAULT_WAIT_S + REQUEST_TIMEOUT_S
                agents[0].ask(AgentCommand.LOCK, timeout_s=wait_s, run=self._rank.store_address, gpus=gpus)
            self._locked = True


def _gpu_of(rank: int, facts: Mapping[str, Any]) -> GpuInfo:
    if facts["gpu"] is None:
        raise EnvironmentNotReady(
            f"rank {rank} on {facts['host']} needs GPU {facts['local_rank']}, {facts['gpus']} visible; start at most "
            "as many ranks per node as it has GPUs (torchrun --nproc-per-node)"
        )
    return GpuInfo.model_validate(facts["gpu"])


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
        # It waits inside torch, where Python handles no signal, and has no results to save.
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        return serve(rank)
    with gathered(rank) as nodes:
        return work(nodes)
