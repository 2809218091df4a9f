"""The engine over ranks: rows are measured, and whatever goes wrong on one rank becomes a row with its reason."""

import pytest

from dilabench.engine.device.environment import snapshot
from dilabench.engine.runner import run
from dilabench.engine.worker import rank_group
from dilabench.machine import Machine
from dilabench.plugins.descriptors import Capabilities, Implementation
from dilabench.plugins.manager import discover
from dilabench.record import Case, Measured, PlannedCase, RunHeader, Skipped
from dilabench.request import RunRequest
from dilabench.workload.spec import Workload

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


@pytest.fixture(autouse=True)
def lock_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("DILABENCH_LOCK_DIR", str(tmp_path))


def rows_of(names, ranks=2, optimizations=None, **workload):
    catalogue = discover().catalogue
    for name in ("killed", "raising", "slow", "wrong", "brittle"):
        target = f"failing:build_{name}"
        catalogue.implementations.add(Implementation(name, "", target, supports=ANY, uses_backend=True), f"test-{name}")
    one = Workload.model_validate({"pattern": {"kind": "dense"}, "mode": "both", **SHAPE, **workload})
    planned = [
        PlannedCase(
            case=Case(
                implementation=name,
                backend="math",
                workload=one,
                world_size=ranks,
                optimizations=optimizations or {},
            )
        )
        for name in names
    ]
    header = RunHeader(
        tool_version="0", run_id="r", suite="ring", started_at="2026-01-01T00:00:00", environment=snapshot(CPU)
    )
    request = RunRequest(suite="ring", timing="simple", nproc=ranks, budget_s=40.0)
    keeper = Keeper()
    run(planned, request, catalogue, CPU, header, keeper)
    return {row.case.implementation: row.outcome for row in keeper.kept}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Three right rows and a wrong one, of one run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DILABENCH_LOCK_DIR", str(tmp_path_factory.mktemp("locks")))
        return rows_of(["ring", "zigzag-ring", "ring-multihead", "wrong"])


def test_rows_over_ranks_are_verified_timed_and_counted(rows):
    for outcome in (rows[name] for name in ("ring", "zigzag-ring", "ring-multihead")):
        assert isinstance(outcome, Measured), outcome
        assert outcome.verification.passed
        assert outcome.timings[0].samples_ns
        assert outcome.memory.peak_bytes > 0
        for slot in outcome.timings[0].slots:
            assert slot.samples_ns == tuple(map(max, *slot.rank_samples_ns))
    counters = rows["zigzag-ring"].counters
    # Rank 0 needs all of rank 1's K and V, and keeps them for the backward pass.
    assert counters["received_keys_bytes"] == 2 * 48 * 2 * 8 * 4


@pytest.mark.parametrize(
    "workload",
    [
        {},
        {"pattern": {"kind": "dilated", "segment_lengths": (16, 96), "dilation_rates": (1, 2)}},
        pytest.param(
            {"batch_size": 1, "layout": "packed", "cu_seqlens": (0, 7, 60, 61, 96), "causal": True},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["dense", "dilated", "packed"],
)
def test_the_librarys_own_call_is_a_row_that_says_what_it_takes(workload):
    (outcome,) = rows_of(["library-over-ranks"], **workload).values()
    assert isinstance(outcome, Measured), outcome
    assert outcome.verification.passed
    notes = {note.code: note.message for note in outcome.notes}
    assert notes["transport"] == "messages go by gloo"
    algorithm = "balanced-allgather" if "layout" in workload else "ring-allgather" if workload else "zigzag-allgather"
    order = {"balanced-allgather": "balanced", "ring-allgather": "contiguous"}.get(algorithm, "zigzag")
    assert notes["chosen"].startswith(f"{algorithm} (")
    assert notes["chosen"].endswith(f"tokens {order}")
    assert outcome.counters["received_keys_bytes"]


def test_parts_of_a_call_are_timed_beside_its_row(rows):
    diagnostics = rows["zigzag-ring"].diagnostics
    assert [one.part for one in diagnostics] == ["whole", "computation", "communication"]
    assert len({len(one.samples_ns) for one in diagnostics}) == 1
    for one in diagnostics:
        assert one.samples_ns == tuple(map(max, *one.rank_samples_ns))
    # The row's own timings hold the whole call only.
    assert [timing.timer for timing in rows["zigzag-ring"].timings] == ["wall"]
    # Without its kernels a projected ring would still project.
    assert [one.part for one in rows["ring-multihead"].diagnostics] == ["whole", "computation"]
    assert rows["wrong"].status == "failed"


def test_a_part_that_takes_the_ranks_along_costs_no_row():
    rows = rows_of(["brittle", "ring"])
    brittle = rows["brittle"]
    assert isinstance(brittle, Measured), brittle
    assert brittle.memory is not None
    assert brittle.diagnostics == ()
    (note,) = [note for note in brittle.notes if note.code == "undiagnosed"]
    assert "rank 1: the worker process died during 'diagnose': killed by SIGKILL" in note.message
    assert isinstance(rows["ring"], Measured)


def test_sharding_inside_a_call_gives_whole_tensors():
    rows = rows_of(["ring"], optimizations={"sharding_inside": True})
    outcome = rows["ring"]
    assert isinstance(outcome, Measured), outcome
    assert outcome.verification.passed
    # Half of out, and of dq, dk and dv, comes from the other rank.
    assert outcome.counters["received_whole_bytes"] == 48 * (2 * 4 + 2 * 2) * 8 * 4


@pytest.mark.parametrize("inside", [pytest.param(False, marks=pytest.mark.slow), True])
def test_what_is_around_a_function_of_shards_keeps_them(inside):
    """Recomputation wraps the function; its shards and parameters are asked for all the same."""
    switched = {"gradient_checkpointing": True, "sharding_inside": inside}
    for name, outcome in rows_of(["ring", "ring-multihead"], optimizations=switched).items():
        assert isinstance(outcome, Measured), (name, outcome)
        assert outcome.verification.passed
        assert ("d q_proj.weight" in {check.name for check in outcome.verification.checks}) == (name != "ring")


@pytest.mark.slow
def test_what_torch_cannot_compile_over_ranks_is_skipped_with_its_reason():
    """Whether it can is torch's matter, and differs by version and device; a failure it never is."""
    (outcome,) = rows_of(["ring"], optimizations={"compile": True}).values()
    if isinstance(outcome, Measured):
        assert outcome.verification.passed
    else:
        assert isinstance(outcome, Skipped), outcome
        assert outcome.why.startswith("torch.compile cannot compile it: ")
        assert outcome.why.endswith("leave compile out")


def test_what_goes_wrong_on_a_rank_is_the_rows_reason(monkeypatch):
    # The other rank waits for the one that raised, and has nothing to report.
    monkeypatch.setattr(rank_group, "GRACE_S", 0.5)
    reasons = {
        "raising": ("build", "rank 1: ArithmeticError: the root cause"),
        "killed": ("build", "rank 1: the worker process died during 'prepare': killed by SIGKILL"),
        "wrong": ("verify", "out: error"),
    }
    # The case after each gets ranks of its own.
    rows = rows_of([*reasons, "ring"])
    for name, (stage, why) in reasons.items():
        assert rows[name].status == "failed"
        assert rows[name].stage == stage
        assert why in rows[name].why
    assert isinstance(rows["ring"], Measured)
