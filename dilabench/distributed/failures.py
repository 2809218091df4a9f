"""Failures of several ranks. One failing rank makes the others fail; the user must see the first reason."""

from dilabench.errors import DilabenchError, ExitCode

# Messages of torch.distributed on ranks that did not cause the failure.
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
    """Return True if an exception's text is torch.distributed's on a rank that only waited for another one.

    Call it where the exception is caught: its type is that of any other fault.
    """
    return any(phrase in why.lower() for phrase in CONSEQUENCES)


class RanksDisagreeError(DilabenchError):
    """Ranks received different workloads. Raised on every rank."""

    exit_code = ExitCode.CASE_FAILED
