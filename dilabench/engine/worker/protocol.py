"""The messages from the runner to its workers: plain data, checked at both ends, each with the kind of its answer.
No torch.
"""

from typing import Annotated, Generic, Literal, Self, TypeVar

from pydantic import Field, TypeAdapter

from dilabench.engine.call.specs import CaseSpec, TimerSpec
from dilabench.engine.worker.replies import (
    AnyReply,
    Ceilings,
    Diagnosed,
    Isolated,
    MemoryMeasured,
    Prepared,
    Profiled,
    Released,
    Reply,
    Sampled,
    Verified,
    WarmedUp,
)
from dilabench.engine.worker.warmup import WarmUpLimits
from dilabench.validation import Model

ReplyT = TypeVar("ReplyT", bound=Reply)


class WorkerSettings(Model):
    """How a worker sets its process up: alone, or as one of `world_size` ranks that meet at `store`.

    gpu: the visible GPU that it computes on. store: see `dilabench.distributed.launch.meeting_store`. num_workers: how
    many workers of this machine work at the same time, each on separate cases.
    """

    device: str
    gpu: int = 0
    rank: int = 0
    world_size: int = 1
    store: str = ""
    rank_timeout_s: float = 120.0
    num_workers: int = 1


class Command(Model, Generic[ReplyT]):
    """One request to a worker. handle: its case. timeout_s: limit of the wait for its answer, None for none."""

    name: str
    handle: str = ""
    timeout_s: float | None = None

    def for_rank(self, rank: int) -> Self:  # noqa: ARG002
        """The command as a rank of several gets it."""
        return self


class Prepare(Command[Prepared]):
    """Build a case and call it once."""

    name: Literal["prepare"] = "prepare"
    spec: CaseSpec


class Verify(Command[Verified]):
    """Check a prepared call."""

    name: Literal["verify"] = "verify"


class Profile(Command[Profiled]):
    """List the kernels of one call. trace: the file that gets a Chrome trace, which rank 0 alone writes."""

    name: Literal["kernels"] = "kernels"
    trace: str | None = None

    def for_rank(self, rank: int) -> Self:
        """Without the file on other ranks."""
        return self if rank == 0 else self.model_copy(update={"trace": None})


class WarmUp(Command[WarmedUp]):
    """Make a timer, and call until its samples settle."""

    name: Literal["warm_up"] = "warm_up"
    timer: TimerSpec
    limits: WarmUpLimits


class TakeSlot(Command[Sampled]):
    """Take samples with a timer that is warm. last: check timed calls, too."""

    name: Literal["slot"] = "slot"
    timer: str
    count: int
    last: bool = False


class Diagnose(Command[Diagnosed]):
    """Time the parts of a call over ranks, interleaved."""

    name: Literal["diagnose"] = "diagnose"
    timer: TimerSpec
    turns: int


class MeasureMemory(Command[MemoryMeasured]):
    """Measure the memory of one call."""

    name: Literal["memory"] = "memory"


class MeasureCeilings(Command[Ceilings]):
    """Measure the highest rates of the device in these dtypes."""

    name: Literal["ceilings"] = "ceilings"
    dtypes: tuple[str, ...]


class Release(Command[Released]):
    """Free the memory of a case."""

    name: Literal["release"] = "release"


class MeasureIsolated(Command[Isolated]):
    """Measure a case that has the process for itself, in at most `limit_bytes`, with samples for about `seconds`."""

    name: Literal["isolated"] = "isolated"
    spec: CaseSpec
    limit_bytes: int | None
    seconds: float


Commands = (
    Prepare
    | Verify
    | Profile
    | WarmUp
    | TakeSlot
    | Diagnose
    | MeasureMemory
    | MeasureCeilings
    | Release
    | MeasureIsolated
)
AnyCommand = Annotated[Commands, Field(discriminator="name")]
COMMAND: TypeAdapter[AnyCommand] = TypeAdapter(AnyCommand)
REPLY: TypeAdapter[AnyReply] = TypeAdapter(Annotated[AnyReply, Field(discriminator="kind")])
