"""Process groups: the gloo group of the same ranks as one of NCCL, the time-out of a group, and its end."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from weakref import WeakKeyDictionary, finalize

import torch.distributed as dist

DEFAULT_TIMEOUT_S = 120.0

# The gloo group of each NCCL group, cached because a new one creates threads and files.
_controls: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def control_of(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The gloo group of the same ranks, made once and ended with the group. All ranks of the group call it."""
    control = _controls.get(group)
    # Destroying all groups destroys this one, too, while other code may still reference the group.
    if control is None or not is_alive(control):
        ranks = dist.get_process_group_ranks(group)
        timeout = timedelta(seconds=timeout_of(group))
        control = dist.new_group(ranks, timeout=timeout, backend="gloo", use_local_synchronization=True)
        _controls[group] = control
        finalize(group, _end, control).atexit = False
    return control


def timeout_of(group: dist.ProcessGroup | None) -> float:
    """The seconds after which a group's waits end, the default if this version of torch does not tell."""
    devices = getattr(group, "_device_types", ())
    options = (getattr(group._get_backend(device), "options", None) for device in devices) if group else ()
    known = (getattr(option, "_timeout", None) for option in options)
    return next((timeout.total_seconds() for timeout in known if timeout is not None), DEFAULT_TIMEOUT_S)


def is_alive(group: dist.ProcessGroup) -> bool:
    """Return False after the end of a group."""
    try:
        return dist.get_rank(group) >= 0
    except (ValueError, RuntimeError):
        return False


def _end(group: dist.ProcessGroup) -> None:
    """End a group unless it was ended with all others."""
    with contextlib.suppress(AssertionError, ValueError, RuntimeError):
        dist.destroy_process_group(group)
