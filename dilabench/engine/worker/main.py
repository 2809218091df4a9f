"""The process that builds, verifies and times cases: set-up and the loop over commands.

This module is light, because the runner names `serve` as the entry; the work is done in `handlers` (torch).
"""

import contextlib
import ctypes
import os
import signal
import sys
from multiprocessing.connection import Connection

from dilabench.engine.worker.protocol import COMMAND, WorkerSettings
from dilabench.engine.worker.replies import Reply

LOG_LIMIT_BYTES = 1 << 20
PR_SET_PDEATHSIG = 1


def serve(connection: Connection, settings_json: str, log_path: str) -> None:
    """Answer commands until the pipe closes. Its output goes to the log, never to the terminal."""
    _detach(log_path)
    from dilabench.engine.worker.handlers import Handlers

    handlers = Handlers(WorkerSettings.model_validate_json(settings_json))
    _send(connection, handlers.hello())
    while True:
        try:
            message = connection.recv_bytes()
        except (EOFError, OSError):
            return
        _bound_log()
        _send(connection, handlers.answer(COMMAND.validate_json(message)))


def _send(connection: Connection, reply: Reply) -> None:
    # The runner may have ended; then the reply goes nowhere.
    with contextlib.suppress(BrokenPipeError):
        connection.send_bytes(reply.model_dump_json().encode())


def _detach(log_path: str) -> None:
    """Own process group, no Ctrl-C, death with the parent, output into the log."""
    with contextlib.suppress(OSError):
        os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    log = _open_log(log_path)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def _open_log(path: str) -> int:
    try:
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    except FileNotFoundError:
        # Its folder is gone with the command, which was ended while this process was being started.
        sys.exit(1)


def _bound_log() -> None:
    """Cut the log when it is too long; the file was opened for appending."""
    sys.stdout.flush()
    sys.stderr.flush()
    if os.fstat(1).st_size > LOG_LIMIT_BYTES:
        os.ftruncate(1, 0)
