"""The server of worker processes, and multiprocessing's tracker beside it, when the command ends without a word."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import dilabench

# A process whose child loads for ever what the server loads.
LOADING = """
import subprocess, sys, time
child = '''
import importlib.abc, os, sys, time

class Slow(importlib.abc.MetaPathFinder):
    def find_spec(self, name, *_):
        if name == "dilabench.engine.worker.handlers":
            print(os.getpid(), flush=True)
            time.sleep(300)

sys.meta_path.insert(0, Slow())
import dilabench.engine.worker.server
'''
subprocess.run([sys.executable, "-c", child])
"""
LEAKING = """
import os
from dilabench.engine.worker.process import end_server, warm_server, worker_context

warm_server()
leaked = worker_context().Semaphore()
end_server()
os._exit(0)
"""


def start(code: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(dilabench.__file__).parents[1])}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", code], text=True, env=environment, **pipes)


def runs(pid: int) -> bool:
    try:
        # Behind the name in brackets is the state.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_server_that_loads_ends_with_the_command() -> None:
    command = start(LOADING)
    assert command.stdout is not None
    server = int(command.stdout.readline())
    command.send_signal(signal.SIGKILL)
    # The pipes are the server's, too.
    command.communicate(timeout=60)
    deadline = time.monotonic() + 20
    while runs(server) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not runs(server)


def test_semaphores_that_killed_workers_leave_are_freed_without_a_word() -> None:
    assert start(LEAKING).communicate(timeout=60) == ("", "")
