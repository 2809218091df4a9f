"""The ranks that torchrun started, on one machine or several, as rank 0 sees them. No torch.

Each rank has an agent that starts workers on its machine; a worker connects to rank 0 by itself. A machine that does
not answer counts as lost: every later request to it fails at once, with that reason.
"""

import contextlib
import itertools
import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from dilabench.engine.device.lock import DEFAULT_WAIT_S
from dilabench.engine.worker.client import START_TIMEOUT_S, LocalHost, Worker, WorkerFailure
from dilabench.engine.worker.listener import RankListener, disconnect
from dilabench.engine.worker.node_agent import agent_name, facts_of
from dilabench.engine.worker.process import Ending
from dilabench.engine.worker.protocol import TroubleCode, WorkerSettings
from dilabench.engine.worker.torchrun import MEETING_TIMEOUT_S, Meeting, Rank, machine_id
from dilabench.errors import EnvironmentNotReady
from dilabench.machine import Machine
from dilabench.record import GpuInfo

# Ending a process that holds a GPU's whole memory takes seconds.
REQUEST_TIMEOUT_S = 60.0
# Less than what a group waits for the reasons of its other ranks.
LOOK_TIMEOUT_S = 4.0
LOOK_S = 1.0


@contextlib.contextmanager
def gathered(rank: Rank) -> Iterator["Nodes"]:
    """All ranks, until the block ends; then their agents end, too.

    Raises EnvironmentNotReady when the ranks do not meet.
    """
    from dilabench.distributed.launch import store_from_environment

    store = store_from_environment(rank.rank, rank.size, MEETING_TIMEOUT_S)
    listener = RankListener()
    try:
        Meeting.announce(rank, store, listener)
        nodes = Nodes(rank, listener)
        try:
            yield nodes
        finally:
            nodes.close()
    finally:
        listener.close()


class Agent:
    """Rank 0's end of the connection to the agent of another rank."""

    def __init__(self, rank: int, control: Connection) -> None:
        self.rank = rank
        self._control = control
        self._turn = threading.Lock()
        self._lost: str | None = None
        self.facts: dict[str, Any] = {}
        self.facts = self._receive("hello", REQUEST_TIMEOUT_S)

    def ask(self, do: str, *, timeout_s: float = REQUEST_TIMEOUT_S, **arguments: Any) -> dict[str, Any]:
        """Send a request and return the answer. Raises WorkerFailure when it fails or the agent is lost."""
        with self._turn:
            if self._lost is None:
                try:
                    self._control.send_bytes(json.dumps({"do": do, "arguments": arguments}).encode())
                except OSError:
                    self._lose(f"during {do!r}")
            found = self._receive(do, timeout_s)
        if "error" in found:
            raise WorkerFailure("crash", f"on {self.host}: {found['error']}", died=True)
        return found

    @property
    def host(self) -> str:
        """The name of the agent's machine."""
        return str(self.facts.get("host", "its machine"))

    @property
    def lost(self) -> str | None:
        """Why the agent cannot be reached any more; None while it can."""
        return self._lost

    def close(self) -> None:
        """Close the connection."""
        disconnect(self._control)

    def _receive(self, doing: str, timeout_s: float) -> dict[str, Any]:
        if self._lost is None:
            try:
                if self._control.poll(timeout_s):
                    found: dict[str, Any] = json.loads(self._control.recv_bytes())
                    return found
                self._lose(f"no answer to {doing!r} within {timeout_s:g} s")
            except (EOFError, OSError):
                self._lose(f"during {doing!r}")
        raise WorkerFailure("crash", self._lost or "", died=True)

    def _lose(self, how: str) -> None:
        self._lost = f"the process that torchrun started for rank {self.rank} on {self.host} is gone ({how})"


class RemoteHost:
    """`client.Host` of a process on another rank's machine."""

    def __init__(self, agent: Agent, listener: RankListener, name: str, settings: WorkerSettings) -> None:
        self._agent, self._name = agent, name
        agent.ask("start", timeout_s=START_TIMEOUT_S, name=name, settings=settings.model_dump(mode="json"))
        self.connection = self._arrival(listener)

    @property
    def sentinels(self) -> list[int]:
        """Empty: the end of the process shows as the end of its connection."""
        return []

    @property
    def alive(self) -> bool:
        """Whether its connection is open."""
        try:
            return self._agent.lost is None and not self.connection.poll()
        except OSError:
            return False

    @property
    def lost(self) -> str | None:
        """Why its machine cannot be reached any more; None while it can."""
        return self._agent.lost

    def output(self) -> str:
        """The last lines that the process printed."""
        return str(self._told("output", LOOK_TIMEOUT_S).get("output", ""))

    def ending(self) -> Ending:
        """How the process ended."""
        told = self._told("ending")
        return Ending(**told) if told else Ending(self._agent.lost or "it was ended", False, "")

    def wait(self, timeout_s: float) -> None:
        """Return at once: `kill` always follows."""

    def kill(self) -> None:
        """End the process, if its machine can still be reached."""
        self._told("kill")
        disconnect(self.connection)

    def _told(self, what: str, timeout_s: float = REQUEST_TIMEOUT_S) -> dict[str, Any]:
        try:
            return self._agent.ask(what, timeout_s=timeout_s, name=self._name)
        except WorkerFailure:
            return {}

    def _arrival(self, listener: RankListener) -> Connection:
        for _ in range(int(START_TIMEOUT_S / LOOK_S)):
            connection = listener.wait(self._name, LOOK_S)
            if connection is not None:
                return connection
            if not self._agent.ask("alive", name=self._name)["alive"]:
                ending = Ending(**self._agent.ask("ending", name=self._name))
                why = f"the worker process on {self._agent.host} died before it reached rank 0: {ending.how}"
                code: TroubleCode = "out_of_memory" if ending.out_of_memory else "crash"
                raise WorkerFailure(code, why, died=True, traceback=ending.output)
        self._told("kill")
        why = f"the worker process on {self._agent.host} did not reach rank 0 within {START_TIMEOUT_S:g} s"
        raise WorkerFailure("timeout", why, died=True)


class Nodes:
    """`launcher.Launcher` over the ranks of torchrun: rank r of a group is torchrun's rank r."""

    def __init__(self, rank: Rank, listener: RankListener) -> None:
        self._rank, self._listener = rank, listener
        self._names = itertools.count()
        self._locked = False
        deadline = time.monotonic() + MEETING_TIMEOUT_S
        self._agents = {other: self._arrived(other, deadline) for other in range(1, rank.size)}

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self._rank.size

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
        """A new name at the store that torchrun's ranks share."""
        self._lock_machines()
        return f"{self._rank.store_address}/dilabench/{next(self._names)}"

    def close_store(self, store: str) -> None:
        """Do nothing: names are not used again."""

    def start(self, key: str, settings: WorkerSettings) -> Worker:
        """Start the worker of a rank on that rank's machine."""
        if settings.rank == 0:
            return Worker(key, settings.model_copy(update={"gpu": self._rank.local_rank}), LocalHost)
        agent, name = self._agents[settings.rank], f"worker {next(self._names)}"
        return Worker(key, settings, lambda own: RemoteHost(agent, self._listener, name, own))

    def close(self) -> None:
        """Tell all agents that the run is over."""
        for agent in self._agents.values():
            try:
                agent.ask("end")
            except WorkerFailure:
                continue
            finally:
                agent.close()

    def _arrived(self, rank: int, deadline: float) -> Agent:
        control = self._listener.wait(agent_name(rank), max(0.0, deadline - time.monotonic()))
        if control is None:
            raise EnvironmentNotReady(
                f"rank {rank} of {self.size} did not come within {MEETING_TIMEOUT_S:g} s; start the same `dilabench "
                "run` with torchrun on every machine, and let them reach each other over TCP"
            )
        return Agent(rank, control)

    def _lock_machines(self) -> None:
        if not self._locked:
            machines: dict[str, list[Agent]] = {}
            for agent in self._agents.values():
                machines.setdefault(agent.facts["machine"], []).append(agent)
            # Rank 0 has locked its own machine already.
            machines.pop(machine_id(), None)
            for _, agents in sorted(machines.items()):
                gpus = [agent.facts["local_rank"] for agent in agents]
                wait_s = DEFAULT_WAIT_S + REQUEST_TIMEOUT_S
                agents[0].ask("lock", timeout_s=wait_s, run=self._rank.store_address, gpus=gpus)
            self._locked = True


def _gpu_of(rank: int, facts: Mapping[str, Any]) -> GpuInfo:
    if facts["gpu"] is None:
        raise EnvironmentNotReady(
            f"rank {rank} on {facts['host']} needs GPU {facts['local_rank']}, {facts['gpus']} visible; start at most "
            "as many ranks per node as it has GPUs (torchrun --nproc-per-node)"
        )
    return GpuInfo.model_validate(facts["gpu"])
