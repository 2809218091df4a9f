"""The descriptors: facts beside names. Nothing heavy is imported here."""

from dilabench.plugins import (
    Backend,
    Capabilities,
    Implementation,
    PatternKind,
    Reporter,
    Suite,
    Timer,
    WorkloadPreset,
    hookimpl,
)

PACKAGE = "dilabench_every_kind"
STRIPES = Capabilities(patterns=frozenset({"stripes"}))
OVER_RANKS = Capabilities(patterns=frozenset({"dense", "dilated"}), max_world_size=None)


@hookimpl
def dilabench_register_patterns() -> list[PatternKind]:
    return [PatternKind("stripes", "every n-th key", f"{PACKAGE}.stripes:Stripes")]


@hookimpl
def dilabench_register_backends() -> list[Backend]:
    kernel = f"{PACKAGE}.heavy"
    # Before everything of ours on a CPU, so that `auto` takes it.
    return [Backend("their-kernel", "plain", f"{kernel}:attend", f"{kernel}:attend_backward", priority={"cpu": 99})]


@hookimpl
def dilabench_register_implementations() -> list[Implementation]:
    ring = "dilabench.impls.ring.rings:build_zigzag"
    sharding = "dilabench.distributed.shardings:ZIGZAG_RING"
    return [
        Implementation(
            "stripes-plain",
            "keys taken by index",
            f"{PACKAGE}.heavy:build",
            supports=STRIPES,
            role="plain",
            priority=5,
            uses_backend=True,
        ),
        Implementation("their-ring", "as ours", ring, supports=OVER_RANKS, sharding=sharding, uses_backend=True),
    ]


@hookimpl
def dilabench_register_workloads() -> list[WorkloadPreset]:
    return [
        WorkloadPreset("striped", "a small one", {"pattern": "stripes", "every": 3, "seq_len": 256, "num_heads": 2})
    ]


@hookimpl
def dilabench_register_suites() -> list[Suite]:
    return [Suite("their-suite", "how fast?", f"{PACKAGE}.light:expand", analysis=f"{PACKAGE}.light:analyse")]


@hookimpl
def dilabench_register_reporters() -> list[Reporter]:
    return [Reporter("their-report", "a line", f"{PACKAGE}.light:render")]


@hookimpl
def dilabench_register_timers() -> list[Timer]:
    return [Timer("their-timer", "ten calls", f"{PACKAGE}.heavy:TenCalls", proves="mean host time of ten calls")]
