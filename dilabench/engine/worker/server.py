"""The module that the server of worker processes loads: all that workers need. It ends with the command meanwhile.

Loading takes seconds, in which the server does not see that the command was killed.
"""

import os
import signal
from importlib import import_module
from types import FrameType

_EVERY_S = 0.5
_command = os.getppid()


def _end_without_command(_number: int, _frame: FrameType | None) -> None:
    if os.getppid() != _command:
        os._exit(1)


_before = signal.signal(signal.SIGALRM, _end_without_command)
signal.setitimer(signal.ITIMER_REAL, _EVERY_S, _EVERY_S)
try:
    import_module("dilabench.engine.worker.handlers")
finally:
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, _before)
