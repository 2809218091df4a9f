"""Client of the tracing process, which starts with the first question: one JSON line each way. No torch."""

import atexit
import json
import selectors
import subprocess
import sys
from typing import Any

from dilabench.machine import child_environment, python_command

MODULE = "dilabench.engine.trace"
# Seconds until a trace is reported on stderr. A trace limits its own CPU time; its time limit ends one that waits.
SILENT_S = 1.0


class InterruptedTraceError(Exception):
    """`Tracer.end` killed the process before it answered."""


class Tracer:
    """A process that answers one question after another; a crash of it does not affect the caller."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._path: list[str] = []
        self._ended = False

    def ask(self, question: dict[str, Any], about: str, timeout_s: float) -> dict[str, Any]:
        """Return the answer; {'why': ...} if the process died, and {'why': ..., 'hung': True} if it took longer.

        Raises InterruptedTraceError after `end`.
        """
        process = self._running()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(question) + "\n")
            process.stdin.flush()
        except OSError:
            self.stop()
            return {"why": "its trace could not be started"}
        line = self._line(process, about, timeout_s)
        if line is None:
            self.stop()
            return {"why": f"its trace took more than {timeout_s:.0f} s", "hung": True}
        if not line and self._ended:
            self.stop()
            raise InterruptedTraceError(about)
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError:
            self.stop()
            return {"why": "its trace ended without an answer"}
        return answer

    def end(self) -> None:
        """Kill the process, so that a thread that waits for its answer continues."""
        if self._process is not None:
            self._ended = True
            self._process.kill()

    def stop(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None and not pipe.closed:
                    try:
                        pipe.close()
                    except OSError:
                        continue
            self._process = None
        self._ended = False

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None or self._path != sys.path:
            self.stop()
            self._path = list(sys.path)
            self._process = subprocess.Popen(
                python_command("-W", "ignore", "-m", MODULE),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                # A GPU is not touched.
                env=child_environment(CUDA_VISIBLE_DEVICES=""),
            )
            atexit.register(self.stop)
        return self._process

    @staticmethod
    def _line(process: subprocess.Popen[str], about: str, timeout_s: float) -> str | None:
        """Return the next line; empty at the end of the process, None after `timeout_s`."""
        assert process.stdout is not None
        with selectors.DefaultSelector() as ready:
            ready.register(process.stdout, selectors.EVENT_READ)
            if not ready.select(SILENT_S):
                # Programs without a console have none.
                if sys.stderr is not None:
                    sys.stderr.write(f"tracing {about}, for at most {timeout_s:.0f} s ...\n")
                if not ready.select(timeout_s):
                    return None
        return process.stdout.readline()
