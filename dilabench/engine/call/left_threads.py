"""How many threads of this process may still be at work, without waiting for any."""

from __future__ import annotations

import _thread
import sys
from concurrent.futures import thread as pools
from types import FrameType


def working_threads() -> int:
    """The number of started threads, without those of thread pools that wait for work or have finished their item."""
    frames = sys._current_frames()
    idle = sum(
        queue.empty() and _has_no_work(frames.get(thread.ident or 0))
        for thread, queue in list(pools._threads_queues.items())
    )
    return _thread._count() - idle


def _has_no_work(frame: FrameType | None) -> bool:
    """Whether a pool's thread is between two items: a waiter is notified of a result before its thread goes on."""
    if frame is None:
        return False
    while frame is not None and frame.f_code not in (pools._worker.__code__, pools._WorkItem.run.__code__):
        frame = frame.f_back
    if frame is None:
        return False
    if frame.f_code is pools._worker.__code__:
        # The item of an idle thread is deleted or not yet there.
        return frame.f_locals.get("work_item") is None
    item = frame.f_locals.get("self")
    return item is None or item.future._state == "FINISHED"
