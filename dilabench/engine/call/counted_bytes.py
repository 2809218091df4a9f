"""Compare the bytes of timed calls over ranks with the bytes of the recorded call."""

from collections.abc import Iterator
from contextlib import contextmanager

from dilabench.engine.call.prepared_call import PreparedCall


@contextmanager
def counted(call: PreparedCall) -> Iterator[list[str]]:
    """In it, timed calls: afterwards the list says whether they sent or received other numbers of bytes than the call
    whose bytes are recorded. Replays of a graph are not counted.
    """
    differs: list[str] = []
    if call.world is None:
        yield differs
        return
    traffic, calls = call.world.traffic.total(), call.counted_calls
    yield differs
    number = call.counted_calls - calls
    for what, now, then, recorded in zip(
        ("sent", "received"), call.world.traffic.total(), traffic, call.bytes_of_call, strict=True
    ):
        if now - then != number * recorded:
            in_each = f"{(now - then) / max(1, number):g} bytes in each of {number} timed calls"
            differs.append(f"rank {call.world.rank} {what} {in_each}, and {recorded} in the call that was counted")
