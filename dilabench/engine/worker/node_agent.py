"""A rank that torchrun started, other than rank 0: it only runs worker processes for rank 0.

It describes its machine, and then carries out rank 0's requests: start a worker, pass a command on to it, end it. When
rank 0 is gone, they end.
"""

import contextlib
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable
from enum import StrEnum
from importlib.metadata import version
from typing import Any

from dilabench.engine.device.lock import device_lock
from dilabench.engine.progress import Silent
from dilabench.engine.worker.client import Worker, WorkerFailure
from dilabench.engine.worker.process import warm_server
from dilabench.engine.worker.protocol import CommandName, WorkerSettings
from dilabench.engine.worker.store_channel import BEAT_S, StoreChannel
from dilabench.engine.worker.torchrun import Rank, machine_id
from dilabench.errors import ExitCode
from dilabench.machine import Machine, detect
from dilabench.version import __version__


def serve(rank: Rank) -> ExitCode:
    """Serve rank 0 until it ends the run or is gone. Raises EnvironmentNotReady when the store cannot be reached."""
    # Ctrl-C reaches every rank; rank 0 says when to end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warm_server()
    machine = detect()
    requests: queue.Queue[dict[str, Any]] = queue.Queue()
    with contextlib.ExitStack() as held:
        channel = StoreChannel(rank, lambda _, asked: requests.put(asked), peers=[0])
        held.callback(channel.close)
        agent = Agent(rank, machine, held)
        held.callback(agent.end)
        channel.send(0, {"number": 0, "answer": facts_of(rank, machine)})

        def carry_out(number: int, do: str, arguments: dict[str, Any]) -> None:
            channel.send(0, {"number": number, "answer": agent.answer(do, arguments)})

        while (lost := channel.lost(0)) is None:
            with contextlib.suppress(queue.Empty):
                asked = requests.get(timeout=BEAT_S)
                if asked["do"] == AgentCommand.END:
                    carry_out(**asked)
                    return ExitCode.OK
                # In a thread, for a worker may have to be ended while it works.
                threading.Thread(target=carry_out, kwargs=asked, daemon=True).start()
    print(f"rank {rank.rank}: rank 0 is gone ({lost}); its workers here were ended", file=sys.stderr)  # noqa: T201
    return ExitCode.INTERRUPTED


def facts_of(rank: Rank, machine: Machine) -> dict[str, Any]:
    """The facts of a rank that rank 0 needs: its machine, its GPU, the versions that must agree."""
    gpu = machine.gpus[rank.local_rank] if rank.local_rank < len(machine.gpus) else None
    return {
        "host": socket.gethostname(),
        "machine": machine_id(),
        "gpus": len(machine.gpus),
        "local_rank": rank.local_rank,
        "gpu": gpu and gpu.model_dump(mode="json"),
        "versions": {"dilabench": __version__, "torch": version("torch")},
    }


class AgentCommand(StrEnum):
    """The requests of rank 0 to the agent of a rank."""

    START = "start"
    ASK = "ask"
    ALIVE = "alive"
    KILL = "kill"
    LOCK = "lock"
    END = "end"


class Agent:
    """The workers that rank 0 has requested, by name; each `AgentCommand` is carried out by a method."""

    def __init__(self, rank: Rank, machine: Machine, held: contextlib.ExitStack) -> None:
        self._rank, self._machine, self._held = rank, machine, held
        self._workers: dict[str, Worker] = {}
        self._methods: dict[AgentCommand, Callable[..., dict[str, Any] | None]] = {
            AgentCommand.START: self.start,
            AgentCommand.ASK: self.ask,
            AgentCommand.ALIVE: self.alive,
            AgentCommand.KILL: self.kill,
            AgentCommand.LOCK: self.lock,
            AgentCommand.END: self.end,
        }

    def answer(self, do: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Carry a request out; an exception becomes the answer."""
        try:
            return self._methods[AgentCommand(do)](**arguments) or {}
        except WorkerFailure as failure:
            fields = {name: getattr(failure, name) for name in ("code", "why", "died", "traceback")}
            return {"failure": {**fields, "state": failure.state and failure.state.model_dump(mode="json")}}
        # The boundary of the process: rank 0 is waiting for an answer.
        except Exception as error:  # noqa: BLE001
            return {"failure": {"code": "crash", "why": f"on {socket.gethostname()}: {error}", "died": True}}

    def start(self, name: str, settings: dict[str, Any]) -> dict[str, Any]:
        """Start a worker on this rank's GPU."""
        own = WorkerSettings.model_validate({**settings, "gpu": self._rank.local_rank})
        worker = self._workers[name] = Worker(name, own)
        return {"hello": worker.hello.model_dump(mode="json")}

    def ask(
        self, name: str, own_timeout_s: float, command: CommandName, handle: str, arguments: dict[str, Any]
    ) -> dict[str, Any]:
        """Pass a command on to a worker, with a time limit in seconds."""
        reply = self._workers[name].ask(command, handle, timeout_s=own_timeout_s, **arguments)
        return {"reply": reply.model_dump(mode="json")}

    def alive(self, name: str) -> dict[str, Any]:
        """Whether a worker still runs."""
        return {"alive": name in self._workers and self._workers[name].alive}

    def kill(self, name: str) -> None:
        """Kill a worker."""
        if name in self._workers:
            self._workers[name].kill()

    def lock(self, run: str, gpus: list[int]) -> None:
        """Hold the locks of all ranks on this machine until the run is over."""
        self._held.enter_context(device_lock(self._machine, run, Silent(), gpus=gpus))

    def end(self) -> None:
        """End all workers."""
        for worker in list(self._workers.values()):
            worker.kill()
