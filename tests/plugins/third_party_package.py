"""A third party's package: a backend, implementations on one device and over ranks, a timer and a suite, with facts."""

from pydantic import BaseModel, Field

from dilabench.plugins import Backend, Capabilities, Implementation, Suite, Timer, hookimpl

HERE = __name__
DENSE = frozenset({"dense"})


class Pace(BaseModel):
    """What a request may set for their suite."""

    speed: int = Field(1, ge=1, le=9, description="How fast, 1 to 9.")
    loud: bool = Field(False, description="With noise.")
    steps: tuple[int, ...] = Field((), description="Where to go.")


class Halves:
    """A sharding of their own: one rank of two does three quarters of the work."""

    def load_balance(self, _workload, _ranks):
        return 2 / 3

    def overlapping_share(self, _workload, _ranks):
        return 0.5

    def received_bytes(self, workload, ranks):
        return workload.seq_len * (ranks - 1)


HALVES = Halves()


def attend(q, k, v, **_mask):
    """A kernel that needs two more like q for a moment."""
    held = [q.clone(), q.clone()]
    return held.pop(), q.new_zeros(q.shape[0], q.shape[2], q.shape[1])


def build(_workload, context):
    """Attention by whatever kernel there is, their own formula without one."""
    return lambda q, k, v: context.backend.attend(q, k, v)[0] if context.backend else q + v


def expand(request, planner):
    implementation = planner.catalogue.implementations.get("their-plain")
    labels = {"theirs:speed": str(Pace(**request.options).speed)}
    return planner.plan(implementation, planner.workload_requests([{}])[0], labels)


@hookimpl
def dilabench_register_backends():
    return [
        Backend(
            "their-kernel",
            "faster than ours",
            f"{HERE}:attend",
            priority={"cpu": 99, "sm90": 99},
            kernels=(r"their_flash_(fwd|bwd)",),
            library=True,
        )
    ]


@hookimpl
def dilabench_register_implementations():
    over_ranks = Capabilities(patterns=DENSE, max_world_size=None)
    ours = "dilabench.distributed.shardings:ZIGZAG_RING"
    return [
        Implementation("their-plain", "slow", f"{HERE}:build", role="plain", uses_backend=True, priority=1),
        Implementation("their-best", "fast", f"{HERE}:build", priority=99),
        Implementation("their-ring", "", f"{HERE}:build", supports=over_ranks, sharding=ours, uses_backend=True),
        Implementation(
            "their-halves", "", f"{HERE}:build", supports=over_ranks, sharding=f"{HERE}:HALVES", priority=98
        ),
    ]


@hookimpl
def dilabench_register_suites():
    return [Suite("their-suite", "a question", f"{HERE}:expand", options=Pace, priority=99)]


@hookimpl
def dilabench_register_timers():
    return [Timer("their-timer", "", f"{HERE}:Stopwatch", "nothing", fresh_process=True, default_on=frozenset({"cpu"}))]
