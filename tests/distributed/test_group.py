"""The engine over ranks: rows are measured, and whatever goes wrong on one rank becomes a row with its reason."""

import pytest

from dilabench.engine.device.environment import snapshot
from dilabench.engine.runner import run
from dilabench.engine.worker import client
from dilabench.machine import Machine
from dilabench.plugins.descriptors import Capabilities, Implementation
from dilabench.plugins.manager import discover
from dilabench.record import Case, Failed, Measured, PlannedCase, RunHeader, Skipped
from dilabench.request import RunRequest
from dilabench.workload.spec import Workload
from tests.conftest import slow

pytestmark = pytest.mark.distributed
CPU = Machine(device="cpu", no_cuda="test")
ANY = Capabilities(patterns=frozenset({"dense", "dilated"}), max_world_size=None)
SHAPE = {"batch_size": 1, "seq_len": 96, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "dtype": "float32"}


class Keeper:
    def __init__(self):
        self.kept = []

    def start(self, header):
        pass

    def row(self, row):
        self.kept.append(row)

    def finish(self, record):
        pass


def case_of(name, optimizations=None, **workload):
    one = Workload.model_validate({"pattern": {"kind": "dense"}, "mode": "both", **SHAPE, **workload})
    return Case(implementation=name, backend="math", workload=one, world_size=2, optimizations=optimizations or {})


def outcomes_of(cases, timing="simple"):
    """What one run makes of each case, by the keys of `cases`."""
    catalogue = discover().catalogue
    for name in ("killed", "raising", "slow", "wrong", "brittle", *SPARING):
        target = f"failing:build_{name}"
        catalogue.implementations.add(Implementation(name, "", target, supports=ANY, uses_backend=True), f"test-{name}")
    planned = [PlannedCase(case=case) for case in cases.values()]
    header = RunHeader(
        tool_version="0", run_id="r", suite="ring", started_at="2026-01-01T00:00:00", environment=snapshot(CPU)
    )
    request = RunRequest(suite="ring", timing=timing, nproc=2)
    keeper = Keeper()
    run(planned, request, catalogue, CPU, header, keeper)
    found = {row.case: row.outcome for row in keeper.kept}
    return {key: found[case] for key, case in cases.items()}


@pytest.fixture(scope="module", autouse=True)
def lock_of_the_module(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DILABENCH_LOCK_DIR", str(tmp_path_factory.mktemp("locks")))
        yield


LIBRARY = {
    "dense": {},
    "dilated": {"pattern": {"kind": "dilated", "segment_lengths": (16, 96), "dilation_rates": (1, 2)}},
    "packed": {"batch_size": 1, "layout": "packed", "cu_seqlens": (0, 7, 60, 61, 96), "causal": True},
}


@pytest.fixture(scope="module")
def right():
    """Right rows of one run."""
    cases = {name: case_of(name) for name in ("zigzag-ring", "ring-multihead")}
    cases |= {f"library, {key}": case_of("library-over-ranks", **LIBRARY[key]) for key in ("dense", "dilated")}
    inside = {"sharding_inside": True}
    cases["sharding inside"] = case_of("ring", inside)
    cases["recomputed, sharding inside"] = case_of("ring-multihead", inside | {"gradient_checkpointing": True})
    return outcomes_of(cases)


@pytest.fixture(scope="module")
def spoiled():
    """Rows of one run that go wrong on one rank, and a right one, which gets ranks of its own."""
    with pytest.MonkeyPatch.context() as patch:
        # The other rank waits for the one that raised, and has nothing to report.
        patch.setattr(client, "GRACE_S", 0.5)
        return outcomes_of({name: case_of(name) for name in ("raising", "killed", "wrong", "brittle", "ring")})


def test_rows_over_ranks_are_verified_timed_and_counted(right):
    for outcome in right.values():
        assert isinstance(outcome, Measured), outcome
        assert outcome.verification.passed
        assert outcome.timings[0].samples_ns
        assert outcome.memory.peak_bytes > 0
        for slot in outcome.timings[0].slots:
            assert slot.samples_ns == tuple(map(max, *slot.rank_samples_ns))
    counters = right["zigzag-ring"].counters
    # Rank 0 needs all of rank 1's K and V, and keeps them for the backward pass.
    assert counters["received_keys_bytes"] == 2 * 48 * 2 * 8 * 4


SPARING = ("sparing", "sparing_unseen", "sparing_always")


@pytest.mark.parametrize("name", [SPARING[0], *map(slow, SPARING[1:])])
def test_bytes_of_timed_calls_are_those_that_are_recorded(name):
    """Of functions that send 0.7 kB instead of 6 kB, because the receiver knows the numbers of the call before."""
    outcome = outcomes_of({name: case_of(name, causal=False, mode="forward")}, timing="warmup")[name]
    assert isinstance(outcome, Failed), outcome
    assert (outcome.stage, outcome.code) == ("verify", "wrong_output")
    assert "timed_messages: rank " in outcome.why


def assert_says_what_it_takes(outcome, algorithm, order):
    notes = {note.code: note.message for note in outcome.notes}
    assert notes["transport"] == "messages go by gloo"
    assert notes["chosen"].startswith(f"{algorithm} (")
    assert notes["chosen"].endswith(f"tokens {order}")
    assert outcome.counters["received_keys_bytes"]


def test_the_librarys_own_call_is_a_row_that_says_what_it_takes(right):
    assert_says_what_it_takes(right["library, dense"], "zigzag-allgather", "zigzag")
    assert_says_what_it_takes(right["library, dilated"], "ring-allgather", "contiguous")


@pytest.mark.slow
def test_the_librarys_own_call_of_packed_documents_is_such_a_row():
    outcome = outcomes_of({"packed": case_of("library-over-ranks", **LIBRARY["packed"])})["packed"]
    assert isinstance(outcome, Measured), outcome
    assert outcome.verification.passed
    assert_says_what_it_takes(outcome, "balanced-allgather", "balanced")


def test_parts_of_a_call_are_timed_beside_its_row(right):
    diagnostics = right["zigzag-ring"].diagnostics
    assert [one.part for one in diagnostics] == ["whole", "computation", "communication"]
    assert len({len(one.samples_ns) for one in diagnostics}) == 1
    for one in diagnostics:
        assert one.samples_ns == tuple(map(max, *one.rank_samples_ns))
    # The row's own timings hold the whole call only.
    assert [timing.timer for timing in right["zigzag-ring"].timings] == ["wall"]
    # Without its kernels a projected ring would still project.
    assert [one.part for one in right["ring-multihead"].diagnostics] == ["whole", "computation"]


@pytest.mark.slow
def test_a_part_that_takes_the_ranks_along_costs_no_row(spoiled):
    brittle = spoiled["brittle"]
    assert isinstance(brittle, Measured), brittle
    assert brittle.memory is not None
    assert brittle.diagnostics == ()
    (note,) = [note for note in brittle.notes if note.code == "undiagnosed"]
    assert "rank 1: the worker process died during 'diagnose': killed by SIGKILL" in note.message
    assert isinstance(spoiled["ring"], Measured)


def test_sharding_inside_a_call_gives_whole_tensors(right):
    outcome = right["sharding inside"]
    # Half of out, and of dq, dk and dv, comes from the other rank.
    assert outcome.counters["received_whole_bytes"] == 48 * (2 * 4 + 2 * 2) * 8 * 4


def test_what_is_around_a_function_of_shards_keeps_its_parameters(right):
    """Recomputation wraps the function; its shards and parameters are asked for all the same."""
    for name in ("ring-multihead", "recomputed, sharding inside"):
        assert "d q_proj.weight" in {check.name for check in right[name].verification.checks}, name


@pytest.mark.slow
def test_what_is_around_a_function_of_shards_keeps_them():
    """As above, of tokens that are sharded outside of the call."""
    cases = {name: case_of(name, {"gradient_checkpointing": True}) for name in ("ring", "ring-multihead")}
    for name, outcome in outcomes_of(cases).items():
        assert isinstance(outcome, Measured), (name, outcome)
        assert outcome.verification.passed
        assert ("d q_proj.weight" in {check.name for check in outcome.verification.checks}) == (name != "ring")


@pytest.mark.slow
def test_what_torch_cannot_compile_over_ranks_is_skipped_with_its_reason():
    """Whether it can is torch's matter, and differs by version and device; a failure it never is."""
    outcome = outcomes_of({"ring": case_of("ring", {"compile": True})})["ring"]
    if isinstance(outcome, Measured):
        assert outcome.verification.passed
    else:
        assert isinstance(outcome, Skipped), outcome
        assert outcome.why.startswith("torch.compile cannot compile it: ")
        assert outcome.why.endswith("leave compile out")


@pytest.mark.parametrize(
    ("name", "stage", "why"),
    [
        ("raising", "build", "rank 1: ArithmeticError: the root cause"),
        ("killed", "build", "rank 1: the worker process died during 'prepare': killed by SIGKILL"),
        ("wrong", "verify", "out: error"),
    ],
)
@pytest.mark.slow
def test_what_goes_wrong_on_a_rank_is_the_rows_reason(spoiled, name, stage, why):
    assert spoiled[name].status == "failed"
    assert spoiled[name].stage == stage
    assert why in spoiled[name].why
    assert isinstance(spoiled["ring"], Measured)
