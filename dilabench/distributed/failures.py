"""Failures of several ranks. When one fails, the others do because of it; the user must read the first reason."""

from dilabench.errors import DilabenchError, ExitCode

# What torch.distributed says on the ranks that did nothing wrong.
CONSEQUENCES = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "connection was likely closed",
    "timed out",
    "timeout",
    "wait timeout",
    "socket closed",
    "socket error",
    "failed to recv",
    "failed to pass monitoredbarrier",
    "nccl communicator was aborted",
    "remote process exited",
    "did not complete",
)


def tells_of_another(why: str) -> bool:
    """Whether an exception's text is what torch.distributed says on a rank that only waits for another one.

    Asked where the exception is caught and nowhere later: its types are those of any other fault.
    """
    return any(phrase in why.lower() for phrase in CONSEQUENCES)


class RanksDisagreeError(DilabenchError):
    """Ranks were given different work; told on every rank."""

    exit_code = ExitCode.CASE_FAILED
