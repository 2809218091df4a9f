"""A rank that torchrun started, other than rank 0: it runs worker processes for rank 0 and nothing else. No torch.

It connects to rank 0's listener, describes its machine, and then carries out requests: start a worker, say how one
ended, end one. The workers themselves talk to rank 0 directly. When the connection to rank 0 closes, they end.
"""

import contextlib
import json
import signal
import socket
import sys
from dataclasses import asdict
from importlib.metadata import version
from multiprocessing.connection import Connection
from typing import Any

import dilabench
from dilabench.engine.device.lock import device_lock
from dilabench.engine.progress import Silent
from dilabench.engine.worker.listener import connect
from dilabench.engine.worker.main import serve_at
from dilabench.engine.worker.process import Child, warm_server, worker_context
from dilabench.engine.worker.torchrun import MEETING_TIMEOUT_S, Meeting, Rank, machine_id
from dilabench.errors import EnvironmentNotReady, ExitCode
from dilabench.machine import Machine, detect


def serve(rank: Rank) -> ExitCode:
    """Connect to rank 0 and serve it. Raises EnvironmentNotReady when it cannot be found."""
    from dilabench.distributed.launch import store_from_environment

    store = store_from_environment(rank.rank, rank.size, MEETING_TIMEOUT_S)
    return serve_listening(rank, Meeting.find(rank, store))


def serve_listening(rank: Rank, meeting: Meeting) -> ExitCode:
    """Serve rank 0 until it ends the run or its connection closes."""
    # Ctrl-C reaches every rank; rank 0 says when to end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warm_server()
    machine = detect()
    control = connect(meeting.address, meeting.key, agent_name(rank.rank))
    with contextlib.ExitStack() as held:
        agent = _Agent(rank, meeting, machine, held)
        held.callback(agent.end_workers)
        try:
            _send(control, facts_of(rank, machine))
            while agent.answer(control):
                pass
        except (EOFError, OSError):
            print(f"rank {rank.rank}: rank 0 is gone; its workers here were ended", file=sys.stderr)  # noqa: T201
            return ExitCode.INTERRUPTED
    return ExitCode.OK


def agent_name(rank: int) -> str:
    """The name that the agent of a rank gives at the listener."""
    return f"rank {rank}"


def facts_of(rank: Rank, machine: Machine) -> dict[str, Any]:
    """What rank 0 wants to know of a rank: its machine, its GPU, the versions that must agree."""
    gpu = machine.gpus[rank.local_rank] if rank.local_rank < len(machine.gpus) else None
    return {
        "host": socket.gethostname(),
        "machine": machine_id(),
        "gpus": len(machine.gpus),
        "local_rank": rank.local_rank,
        "gpu": gpu and gpu.model_dump(mode="json"),
        "versions": {"dilabench": dilabench.__version__, "torch": version("torch")},
    }


class _Agent:
    """The workers that rank 0 has asked for, by name."""

    def __init__(self, rank: Rank, meeting: Meeting, machine: Machine, held: contextlib.ExitStack) -> None:
        self._rank, self._meeting, self._machine, self._held = rank, meeting, machine, held
        self._children: dict[str, tuple[Child, Connection]] = {}

    def answer(self, control: Connection) -> bool:
        """Carry out the next request; False when the run is over."""
        asked = json.loads(control.recv_bytes())
        try:
            found = getattr(self, f"_{asked['do']}")(**asked["arguments"])
        except (OSError, EnvironmentNotReady) as error:
            found = {"error": str(error)}
        _send(control, found or {})
        return asked["do"] != "end"

    def end_workers(self) -> None:
        """End all workers."""
        while self._children:
            self._kill(next(iter(self._children)))

    def _start(self, name: str, settings: dict[str, Any]) -> None:
        own = json.dumps({**settings, "gpu": self._rank.local_rank})
        # The pipe closes when this process ends, however it ends.
        ours, theirs = worker_context().Pipe()
        child = Child(serve_at, self._meeting.address, self._meeting.key, name, theirs, own)
        self._children[name] = child, ours
        child.start()
        theirs.close()

    def _alive(self, name: str) -> dict[str, Any]:
        return {"alive": name in self._children and self._children[name][0].alive}

    def _output(self, name: str) -> dict[str, Any]:
        return {"output": self._children[name][0].output if name in self._children else ""}

    def _ending(self, name: str) -> dict[str, Any]:
        return asdict(self._children[name][0].ending()) if name in self._children else {}

    def _kill(self, name: str) -> None:
        if name in self._children:
            child, lifeline = self._children.pop(name)
            child.kill()
            lifeline.close()

    def _lock(self, run: str, gpus: list[int]) -> None:
        """Hold the locks of all ranks on this machine until the run is over."""
        self._held.enter_context(device_lock(self._machine, run, Silent(), gpus=gpus))

    def _end(self) -> None:
        self.end_workers()


def _send(connection: Connection, message: dict[str, Any]) -> None:
    connection.send_bytes(json.dumps(message).encode())
