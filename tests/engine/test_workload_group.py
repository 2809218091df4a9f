"""The order of measurement, with workers that only pretend: no process, no sleep, no clock."""

import contextlib
import random
from collections import Counter

import pytest

from dilabench.comparison.pairing import pair_many
from dilabench.engine.budget import Budget
from dilabench.engine.call.specs import TimerSpec
from dilabench.engine.case_executor import CaseExecutor
from dilabench.engine.case_state import TimerRun
from dilabench.engine.method import Method
from dilabench.engine.progress import Progress
from dilabench.engine.rounds import are_precise
from dilabench.engine.runner import _Run
from dilabench.engine.worker.client import WorkerFailure
from dilabench.engine.worker.protocol import TakeSlot, WorkerSettings
from dilabench.engine.worker.replies import MemoryMeasured, Prepared, Profiled, Released, Sampled, Verified, WarmedUp
from dilabench.engine.worker.warmup import WarmUpLimits
from dilabench.engine.workload_group import WorkloadGroupRun
from dilabench.machine import Machine
from dilabench.metadata import BUDGET_EXCEEDED, CUT_SHORT, NOT_INTERLEAVED, OWN_TILES, matmul_key
from dilabench.plugins import builtin
from dilabench.plugins.catalogue import Catalogue
from dilabench.plugins.descriptors import Backend, Capabilities, Implementation
from dilabench.record import Check, Failed, KernelUse, Measured, Memory, Note, Skipped, Slot, Verification
from dilabench.units import format_seconds

DENSE = Capabilities(patterns=frozenset({"dense"}))
WALL = TimerSpec(name="wall", target="t", proves="p")
SLOTS = ("slot", "last_slot")
GRAPH = TimerSpec(name="graph", target="t", proves="p")


class Lab:
    """A pool of pretended workers. `script` maps (implementation, command) to replies or failures, used in turn."""

    def __init__(self, script=None, call_ns=1_000_000, device="cpu", build_s=None):
        self.settings = WorkerSettings(device=device)
        self.script = script or {}
        self.build_s = build_s or {}
        self.call_ns = call_ns
        self.launch_ns = 0
        self.asked, self.timeouts_s = [], {}
        self.started = Counter()
        self.homes = {}
        self.now = 0.0
        self.slept = []
        self.verify_s = self.release_s = 0.0
        # The slots in which a timed call is checked.
        self.checking = ("last_slot",)

    def resident(self, key):
        if key not in self.homes or not self.homes[key].alive:
            self.homes[key] = FakeWorker(self, key)
        return self.homes[key]

    @contextlib.contextmanager
    def fresh(self, key):
        yield FakeWorker(self, f"fresh {key}")

    def close(self):
        for worker in self.homes.values():
            worker.alive = False

    def clock(self):
        return self.now


class FakeWorker:
    def __init__(self, lab, key):
        self.lab, self.key, self.alive, self.names = lab, key, True, {}
        lab.started[key] += 1

    def kill(self):
        self.alive = False

    def ask(self, command, handle="", *, timeout_s):
        kind = "last_slot" if isinstance(command, TakeSlot) and command.last else command.name
        if kind == "prepare":
            self.names[handle] = command.spec.case.implementation
        name = self.names[handle]
        self.lab.asked.append((name, kind, self.key))
        self.lab.timeouts_s[name, kind] = timeout_s
        scripted = self.lab.script.get((name, kind), [])
        answer = scripted.pop(0) if scripted else None
        if kind == "prepare":
            self.lab.now += self.lab.build_s.get(name, 0.0)
        if isinstance(answer, WorkerFailure):
            self.lab.now += timeout_s * (answer.code == "timeout")
            self.alive = self.alive and not answer.died
            raise answer
        if isinstance(answer, KeyboardInterrupt):
            raise answer
        if isinstance(answer, Sampled):
            if kind == "last_slot" and answer.verification is None:
                checked = self.usual(kind, command).verification
                answer = answer.model_copy(update={"verification": checked})
            self.lab.now += sum(answer.slot.samples_ns) * 1e-9
        return answer or self.usual(kind, command)

    def usual(self, kind, command):
        right = Verification(checks=(Check(name="out", passed=True),))
        self.lab.now += {"verify": self.lab.verify_s, "release": self.lab.release_s}.get(kind, 0.0)
        if kind in SLOTS:
            self.lab.now += command.count * self.lab.call_ns * 1e-9
            checked = right.model_copy(update={"timed_calls": 1}) if kind in self.lab.checking else None
            launches = (self.lab.launch_ns,) * command.count if self.lab.launch_ns else ()
            slot = Slot(samples_ns=(self.lab.call_ns,) * command.count, enqueue_ns=launches)
            return Sampled(slot=slot, verification=checked)
        return {
            "prepare": Prepared(setup_ns={"build": 1}, call_ns=self.lab.call_ns),
            "verify": Verified(verification=right),
            "kernels": Profiled(),
            "warm_up": WarmedUp(samples_ns=(self.lab.call_ns,) * 3, settled=True),
            "memory": MemoryMeasured(memory=Memory(peak_bytes=1, isolated=True)),
            "release": Released(),
        }[kind]


@pytest.fixture
def measure(dense_case):
    def go(names, lab, backend=None, compiles=(), chooses=(), budget_s=None, kept=None, **method):
        catalogue = Catalogue()
        for name in names:
            origin = "builtin" if not name.startswith("foreign") else name
            kinds = {"compiles": name in compiles, "chooses": name in chooses}
            implementation = Implementation(name, "", "m:b", supports=DENSE, **kinds)
            catalogue.implementations.add(implementation, origin)
        if backend:
            catalogue.backends.add(backend, "builtin")
        for timer in builtin.dilabench_register_timers():
            catalogue.timers.add(timer, "builtin")
        planned = [dense_case(name, backend.name if backend else None) for name in names]
        fields = {"timer": WALL, "warm_up": WarmUpLimits(min_s=0, max_s=1), "precision": 0.02, "sampling_s": 1.0}
        executor = CaseExecutor(
            catalogue=catalogue,
            pool=lab,
            method=Method(**{**fields, **method}),
            budget=Budget(budget_s, [one.case for one in planned], lab.clock),
            progress=Progress(),
            sleep=lab.slept.append,
        )
        lab.executor = executor
        rows = {} if kept is None else kept
        group = WorkloadGroupRun(executor, planned)
        try:
            for row in group.rows():
                rows[row.case.implementation] = row.outcome
        except KeyboardInterrupt:
            # As the run does.
            rows |= {row.case.implementation: row.outcome for row in group.interrupted_rows()} | rows
            raise
        return rows

    return go


def slots_in_order(lab):
    return [name for name, command, _ in lab.asked if command in SLOTS]


def test_the_stages_come_in_order(measure):
    lab = Lab()
    measure(["a"], lab)
    stages = list(dict.fromkeys(command for _, command, _ in lab.asked))
    assert stages == ["prepare", "verify", "kernels", "warm_up", "slot", "last_slot", "memory", "release"]


def test_rows_and_the_run_say_how_all_of_the_time_was_spent(measure):
    wrong = Verification(checks=(Check(name="out", passed=False),))
    lab = Lab({("c", "verify"): [Verified(verification=wrong)]}, build_s={"c": 1.0})
    lab.verify_s, lab.release_s = 2.0, 0.5
    rows = measure(["a", "b", "c"], lab)
    spent = [rows[name].wall_ns for name in "ab"]
    stages = {"worker", "build", "verify", "kernels", "warmup", "time", "timed_checks", "memory", "release"}
    assert spent[0].keys() == stages
    assert [(wall_ns["verify"], wall_ns["release"]) for wall_ns in spent] == [(2_000_000_000, 500_000_000)] * 2
    assert lab.executor.wall_ns == {"unmeasured": pytest.approx(1.5e9)}
    assert sum(wall_ns.total() for wall_ns in map(Counter, [*spent, lab.executor.wall_ns])) == pytest.approx(
        lab.now * 1e9
    )


def test_slots_of_calls_that_launch_slowly_are_short(measure):
    """The GPU waits for the host: 20 samples of 0.2 ms behind 3 ms of launches take 60 ms, not the 10 ms of a slot."""
    lab = Lab(call_ns=200_000)
    lab.launch_ns = 3_000_000
    found = measure(["a"], lab, recheck=False)
    lengths = [len(slot.samples_ns) for slot in found["a"].timings[0].slots]
    assert (lengths[0], set(lengths[1:])) == (20, {5})


def test_rounds_interleave_all_of_the_cell_in_random_order(measure):
    lab = Lab()
    found = measure(["a", "b", "c"], lab, recheck=False)
    order = slots_in_order(lab)
    rounds = [tuple(order[i : i + 3]) for i in range(0, len(order), 3)]
    assert all(sorted(one) == ["a", "b", "c"] for one in rounds)
    assert len(set(rounds)) > 1
    for outcome in found.values():
        assert [slot.round for slot in outcome.timings[0].slots] == list(range(len(rounds)))
    positions = {slot.position for slot in found["a"].timings[0].slots}
    assert len(positions) > 1


def test_the_same_seed_gives_the_same_order(measure):
    first, second = Lab(), Lab()
    measure(["a", "b", "c"], first)
    measure(["a", "b", "c"], second)
    assert slots_in_order(first) == slots_in_order(second)


def test_rounds_stop_on_precision_but_not_before_five(measure):
    found = measure(["a", "b"], Lab(), recheck=False)
    assert len(found["a"].timings[0].slots) < 100
    assert len(found["a"].timings[0].slots) >= 5


def test_rivals_share_as_many_rounds_as_an_interval_of_their_ratio_needs(measure):
    """A round takes longer than the share: turns of a slow timer, each of them with enough samples."""
    lab = Lab(call_ns=1_000_000)
    found = measure(["a", "b"], lab, recheck=False, sampling_s=0.001, min_rounds=1, min_samples=1)
    assert [len(found[name].timings[0].slots) for name in ("a", "b")] == [5, 5]


def test_noisy_times_are_measured_until_the_share_is_used_up(measure):
    noise = random.Random(1)
    lab = Lab()
    samples = [tuple(int(1e6 * noise.lognormvariate(0, 1)) for _ in range(10)) for _ in range(300)]
    lab.script["a", "slot"] = [Sampled(slot=Slot(samples_ns=one)) for one in samples]
    found = measure(["a"], lab, recheck=False, max_rounds=40)
    assert len(found["a"].timings[0].slots) == 40


def test_rounds_go_on_until_ratios_are_known_as_well():
    """Each has a narrow median before their ratio has one; drift that they share cancels, and a large distance is seen
    through noise that hides a small one."""
    steps = [(-1) ** at * 0.016 for at in range(20)]

    def run(sign, times=1.0):
        samples = [int(1e8 * times * (1 + sign * step)) for step in steps]
        return TimerRun(WALL, slots=[Slot(round=at, samples_ns=(one,)) for at, one in enumerate(samples)])

    assert are_precise([run(1)], 0.02)
    assert are_precise([run(1), run(1, times=1.03)], 0.02)
    assert not are_precise([run(1), run(-1, times=1.03)], 0.02)
    assert are_precise([run(1), run(-1, times=1.2)], 0.02)


def test_what_is_far_slower_than_a_verified_case_is_left_out(measure):
    """By a call in preparation. What is fast and wrong leaves nobody out, and what chooses is what is asked about."""
    lab = Lab(call_ns=100)
    call_ns = {"wrong": 1, "slow": 301, "near": 300, "choosing": 1000}
    for name, taken in call_ns.items():
        lab.script[name, "prepare"] = [Prepared(setup_ns={}, call_ns=taken)]
    check = Check(name="out", passed=False)
    lab.script["wrong", "verify"] = [Verified(verification=Verification(checks=(check,), duration_ns=1), why="no")]
    found = measure(["slow", "near", "fast", "wrong", "choosing"], lab, chooses=("choosing",), far_slower=3.0)
    assert {name for name, one in found.items() if one.status == "measured"} == {"near", "fast", "choosing"}
    assert (found["wrong"].code, found["slow"].code) == ("wrong_output", "far_slower")
    assert found["slow"].why == "not timed: a call took 301 ns, over 3 times the 100 ns of fast"
    assert ("slow", "verify") not in {(name, command) for name, command, _ in lab.asked}


def test_long_calls_get_five_single_samples(measure):
    lab = Lab(call_ns=2_000_000_000)
    found = measure(["a"], lab)
    assert [len(slot.samples_ns) for slot in found["a"].timings[0].slots] == [1] * 5
    assert [command for _, command, _ in lab.asked if command in SLOTS] == ["slot"] * 4 + ["last_slot"]


@pytest.mark.parametrize("budget_s", [None, 0.05])
def test_the_last_slot_of_each_is_checked_once_also_where_the_budget_ended_before(measure, budget_s):
    lab = Lab(call_ns=2_000_000)
    found = measure(["a", "b"], lab, budget_s=budget_s, recheck=False)
    assert sorted(name for name, command, _ in lab.asked if command == "last_slot") == ["a", "b"]
    assert [one.verification.timed_calls for one in found.values()] == [1, 1]
    last = [(name, command) for name, command, _ in lab.asked if command in SLOTS][-2:]
    assert {command for _, command in last} == {"last_slot"}


def test_a_wrong_result_of_the_last_slot_leaves_no_time(measure):
    wrong = Verification(checks=(Check(name="timed_out", passed=False),), timed_calls=1)
    reply = Sampled(slot=Slot(samples_ns=(1_000_000,) * 10), verification=wrong, why="off")
    found = measure(["a", "b"], Lab({("a", "last_slot"): [reply]}))
    assert (found["a"].status, found["a"].code) == ("failed", "wrong_output")
    assert isinstance(found["b"], Measured)


def test_memory_that_was_seen_with_the_kernels_takes_no_call_of_its_own(measure):
    seen = Profiled(memory=Memory(peak_bytes=7, isolated=True))
    lab = Lab({("a", "kernels"): [seen]})
    found = measure(["a", "b"], lab)
    assert [found[name].memory.peak_bytes for name in "ab"] == [7, 1]
    assert [name for name, command, _ in lab.asked if command == "memory"] == ["b"]


def test_turns_are_sized_again_where_the_first_calls_took_too_long(measure):
    """The first call of a process took 2 s, so that nothing was warmed up; the others take 1 ms."""
    lab = Lab()
    lab.script["a", "prepare"] = [Prepared(setup_ns={"build": 1}, call_ns=2_000_000_000)]
    lab.script["a", "warm_up"] = [WarmedUp(samples_ns=(), settled=False)]
    found = measure(["a"], lab, recheck=False)
    assert [len(slot.samples_ns) for slot in found["a"].timings[0].slots][:3] == [1, 10, 10]


def test_a_crash_ends_its_case_and_the_others_go_on_in_a_new_session(measure):
    lab = Lab()
    fine = Sampled(slot=Slot(samples_ns=(1_000_000,) * 10))
    lab.script["b", "slot"] = [fine, WorkerFailure("crash", "killed by SIGSEGV", died=True)]
    found = measure(["a", "b", "c"], lab, recheck=False)
    assert found["b"] == Failed(
        stage="time", code="crash", why="killed by SIGSEGV", verification=found["b"].verification
    )
    for name in ("a", "c"):
        # Calls of the dead process were never checked.
        assert {slot.session for slot in found[name].timings[0].slots} == {1}
        assert found[name].verification.timed_calls == 1
        assert "unchecked_samples" in {note.code for note in found[name].notes}
    assert lab.started["builtin"] == 2


def test_samples_do_not_count_if_the_worker_was_lost_and_the_budget_ended_before_a_timed_call_was_checked(measure):
    """One case hangs when it is timed, which ends the worker that both share."""
    hang = WorkerFailure("timeout", "no answer", died=True)
    for rounds in range(1, 4):
        fine = [Sampled(slot=Slot(samples_ns=(1_000_000,) * 10)) for _ in range(rounds)]
        lab = Lab({("hangs", "slot"): [*fine, hang]})
        found = measure(["a", "hangs"], lab, budget_s=0.5, recheck=False)
        assert isinstance(found["a"], Skipped)
        assert found["a"].code == "budget"
        assert "before its timed calls were checked" in found["a"].why


def test_a_wrong_clock_fails_the_one_that_has_it_in_a_worker_of_its_own(measure):
    """A case changes the clock of the worker that all share; alone, only its own samples are too long."""
    lab = Lab()
    usual = FakeWorker.usual

    def disturbed(self, kind, command):
        now = lab.now
        reply = usual(self, kind, command)
        if kind in SLOTS and "guilty" in self.names.values():
            lab.now = now + 1e-6
        return reply

    FakeWorker.usual = disturbed
    try:
        found = measure(["a", "guilty", "b"], lab, recheck=False)
    finally:
        FakeWorker.usual = usual
    assert isinstance(found["a"], Measured)
    assert isinstance(found["b"], Measured)
    assert "by the runner's clock" in found["guilty"].why


def test_an_idle_workers_death_is_nobodys_fault(measure, monkeypatch):
    lab = Lab()

    original = FakeWorker.usual

    def usual(self, kind, command):
        reply = original(self, kind, command)
        if kind == "slot" and len(slots_in_order(lab)) == 2:
            self.alive = False
        return reply

    monkeypatch.setattr(FakeWorker, "usual", usual)
    found = measure(["a", "b"], lab, recheck=False)
    assert all(isinstance(outcome, Measured) for outcome in found.values())
    assert lab.started["builtin"] == 2


def test_out_of_memory_in_company_is_tried_again_in_isolation(measure):
    lab = Lab()
    lab.script["b", "prepare"] = [WorkerFailure("out_of_memory", "out of memory: 80 GiB")]
    found = measure(["a", "b"], lab)
    assert isinstance(found["b"], Measured)
    assert [note.code for note in found["b"].notes] == ["not_interleaved"]
    last_of_a = max(i for i, (name, _, _) in enumerate(lab.asked) if name == "a")
    assert next(i for i, (name, command, _) in enumerate(lab.asked) if (name, command) == ("b", "verify")) > last_of_a


def test_what_was_isolated_after_the_others_took_no_turns_with_them(measure):
    """Both have random or first positions in their rounds; only the rounds' numbers tell that they lie apart."""
    lab = Lab()
    lab.script["c", "prepare"] = [WorkerFailure("out_of_memory", "out of memory: 80 GiB")]
    timings = {name: outcome.timings[0] for name, outcome in measure(["a", "b", "c"], lab).items()}
    assert pair_many([[(timings["a"], timings["b"])]])[0].left_out == 0
    assert pair_many([[(timings["a"], timings["c"])]])[0].rounds is None


@pytest.mark.parametrize("command", ["prepare", "verify", "warm_up", "slot", "memory"])
def test_out_of_memory_in_isolation_is_the_end_of_one_row(measure, command):
    lab = Lab()
    lab.script["b", command] = [WorkerFailure("out_of_memory", "out of memory: 80 GiB") for _ in range(3)]
    found = measure(["a", "b"], lab)
    assert isinstance(found["a"], Measured)
    assert isinstance(found["b"], Failed)
    assert found["b"].why == "out of memory: 80 GiB"


def test_plug_ins_have_processes_of_their_own(measure):
    lab = Lab()
    measure(["a", "foreign_x", "foreign_y"], lab)
    homes = {name: key for name, command, key in lab.asked if command == "slot"}
    assert homes == {"a": "builtin", "foreign_x": "foreign_x", "foreign_y": "foreign_y"}


def test_memory_is_weighed_where_the_case_is(measure):
    lab = Lab()
    found = measure(["a", "b"], lab)
    assert all(outcome.memory is not None for outcome in found.values())
    assert lab.started == {"builtin": 1}
    for name in ("a", "b"):
        own = [command for one, command, _ in lab.asked if one == name]
        assert own.index("memory") < own.index("release")


def test_a_crash_while_memory_is_weighed_costs_its_own_row(measure):
    lab = Lab()
    lab.script["a", "memory"] = [WorkerFailure("crash", "killed by SIGSEGV", died=True)]
    found = measure(["a", "b"], lab, recheck=False)
    assert (found["a"].stage, found["b"].memory is not None) == ("memory", True)
    assert lab.started == {"builtin": 2}


@pytest.mark.parametrize("interrupted", ["a", "b"])
def test_ctrl_c_while_memory_is_weighed_keeps_what_was_timed(measure, interrupted):
    kept = {}
    lab = Lab({(interrupted, "memory"): [KeyboardInterrupt()]})
    with pytest.raises(KeyboardInterrupt):
        measure(["a", "b"], lab, kept=kept, min_rounds=3)
    assert all(isinstance(kept[name], Measured) and kept[name].timings for name in ("a", "b"))
    messages = [note.message for note in kept[interrupted].notes]
    assert messages == ["the run was interrupted before its memory was measured"]
    assert (kept["a"].memory is None) == (interrupted == "a")
    assert kept["b"].memory is None


@pytest.mark.parametrize(
    ("command", "before", "checking", "kept_samples"),
    [
        ("verify", 0, SLOTS, {}),
        ("warm_up", 0, SLOTS, {}),
        ("slot", 0, SLOTS, {}),
        ("slot", 1, SLOTS, {"a": 1, "b": 1}),
        ("slot", 3, SLOTS, {"a": 3, "b": 3}),
        ("slot", 3, (), {}),
    ],
)
def test_ctrl_c_keeps_what_is_verified_and_has_samples(measure, command, before, checking, kept_samples):
    """`before`: rounds of ten samples that were complete. `checking`: slots in which a timed call was checked."""
    kept = {}
    lab = Lab({(name, command): [*[None] * before, KeyboardInterrupt()] for name in ("a", "b")})
    lab.checking = checking
    with pytest.raises(KeyboardInterrupt):
        measure(["a", "b"], lab, kept=kept, min_rounds=9)
    assert kept.keys() == kept_samples.keys()
    for name, rounds in kept_samples.items():
        outcome = kept[name]
        assert outcome.verification.passed
        assert sum(len(slot.samples_ns) for slot in outcome.timings[0].slots) >= 10 * rounds
        (note,) = outcome.notes
        assert note.code == CUT_SHORT.key
        assert note.message.startswith("the run was interrupted after ")
        assert note.observed == len(outcome.timings[0].samples_ns)


def test_what_compiles_is_built_last(measure):
    lab = Lab()
    measure(["slow", "a", "b"], lab, compiles=["slow"])
    assert [name for name, command, key in lab.asked if command == "prepare" and key == "builtin"] == [
        "a",
        "b",
        "slow",
    ]


def test_who_takes_long_to_build_leaves_the_others_their_time(measure):
    lab = Lab(build_s={"a": 1.0, "slow": 25.0, "slower": 60.0})
    found = measure(["a", "slow", "slower"], lab, compiles=["slow", "slower"], budget_s=30.0)
    assert [type(found[name]) for name in ("a", "slow", "slower")] == [Measured, Measured, Skipped]
    assert found["slower"].why.startswith("budget of 30 s used up before its turn")


@pytest.mark.parametrize(
    ("device", "budget_s", "waited_s", "kind"),
    [
        ("cpu", 100.0, 51.0, Failed),
        ("cpu", 12.0, 7.0, Skipped),
        ("cuda", 100.0, 51.0, Skipped),
        ("cuda", 200.0, 101.0, Failed),
    ],
)
def test_a_late_answer_is_a_failure_only_where_the_wait_was_long(measure, device, budget_s, waited_s, kind):
    lab = Lab(device=device)
    lab.script["hangs", "prepare"] = [WorkerFailure("timeout", "no answer", died=True)]
    found = measure(["hangs", "a"], lab, budget_s=budget_s)
    assert lab.timeouts_s["hangs", "prepare"] == pytest.approx(waited_s)
    assert isinstance(found["hangs"], kind)
    assert isinstance(found["a"], Measured)


def test_wrong_output_is_never_timed(measure):
    lab = Lab()
    wrong = Verification(checks=(Check(name="out", passed=False, error=1.0),))
    lab.script["b", "verify"] = [Verified(verification=wrong, why="out: error 1")]
    found = measure(["a", "b"], lab)
    assert found["b"] == Failed(stage="verify", code="wrong_output", why="out: error 1", verification=wrong)
    assert "b" not in slots_in_order(lab)


def test_a_profiler_that_sees_nothing_proves_nothing_either_way(measure):
    found = measure(["a"], Lab(), Backend("flashy", "", "m:a", supports=DENSE, kernels=("flash_fwd",)))
    assert [note.code for note in found["a"].notes] == ["no_ledger"]


def test_a_claimed_backend_without_its_kernel_is_never_timed(measure):
    lab = Lab()
    lab.script["a", "kernels"] = [Profiled(kernels=(KernelUse(name="gemm", count=1, duration_ns=1),))]
    found = measure(["a"], lab, Backend("flashy", "", "m:a", supports=DENSE, kernels=("flash_fwd",)))
    assert found["a"].stage == "verify"
    assert "claims flashy but no such kernel ran" in found["a"].why
    assert slots_in_order(lab) == []


@pytest.mark.parametrize(("name", "measured"), [("a", True), ("foreign", False)])
def test_only_ours_may_say_that_other_kernels_take_a_backends_place(measure, name, measured):
    lab = Lab()
    lab.script[name, "prepare"] = [
        Prepared(setup_ns={"build": 1}, call_ns=lab.call_ns, notes=(OWN_TILES.note("in its place"),))
    ]
    lab.script[name, "kernels"] = [Profiled(kernels=(KernelUse(name="my_forward_kernel", count=1, duration_ns=1),))]
    found = measure([name], lab, Backend("flashy", "", "m:a", supports=DENSE, kernels=("flash_fwd",)))
    assert isinstance(found[name], Measured) == measured


def test_one_that_is_slower_alone_is_noted(measure):
    lab = Lab()
    slow_alone = Sampled(slot=Slot(samples_ns=(1_300_000,) * 10))
    usual = Sampled(slot=Slot(samples_ns=(1_000_000,) * 10))
    for name in ("a", "b"):
        lab.script[name, "slot"] = [usual] * 5 + [slow_alone] * 3
    found = measure(["a", "b"], lab, min_rounds=5)
    noted = [note for outcome in found.values() for note in outcome.notes]
    assert [note.code for note in noted] == ["interference"]
    assert noted[0].observed == pytest.approx(0.3)


def test_launch_bound_calls_are_timed_as_graphs_as_well(measure):
    lab = Lab()
    note = Note(code="launch_bound", message="m")
    noted = Sampled(slot=Slot(samples_ns=(1_000_000,) * 10), notes=(note,))
    lab.script |= {("a", command): [noted] * 50 for command in SLOTS}
    found = measure(["a", "b"], lab, graph_timer=GRAPH, recheck=False)
    assert [timing.timer for timing in found["a"].timings] == ["wall", "graph"]
    assert [timing.timer for timing in found["b"].timings] == ["wall"]


def test_a_timer_that_cannot_be_used_is_a_note_beside_the_others(measure):
    lab = Lab()
    note = Note(code="launch_bound", message="m")
    noted = Sampled(slot=Slot(samples_ns=(1_000_000,) * 10), notes=(note,))
    lab.script |= {("a", command): [noted] * 50 for command in SLOTS}
    unusable = WarmedUp(samples_ns=(), settled=False, unusable="it waits for the device")
    lab.script["a", "warm_up"] = [None, unusable]
    found = measure(["a"], lab, graph_timer=GRAPH)
    assert isinstance(found["a"], Measured)
    assert "timer_unusable" in [note.code for note in found["a"].notes]
    assert [timing.timer for timing in found["a"].timings] == ["wall"]


def test_the_only_timer_that_cannot_be_used_fails_the_case(measure):
    lab = Lab()
    unusable = WarmedUp(samples_ns=(), settled=False, unusable="it waits for the device")
    lab.script["a", "warm_up"] = [unusable]
    found = measure(["a"], lab)
    assert found["a"].stage == "time"
    assert "it waits for the device" in found["a"].why


def test_throttled_slots_are_kept_and_tagged(measure):
    lab = Lab()
    hot = Slot(samples_ns=(1_000_000,) * 10, throttle=("hw_thermal",), sm_clock_mhz=900)
    lab.script |= {("a", command): [Sampled(slot=hot)] * 50 for command in SLOTS}
    found = measure(["a"], lab)
    assert isinstance(found["a"], Measured)
    assert "throttled" in [note.code for note in found["a"].notes]
    assert all(slot.throttle == ("hw_thermal",) for slot in found["a"].timings[0].slots)
    assert 0 < sum(lab.slept) <= 10


@pytest.fixture
def measure_lengths(dense_case, keeper):
    """Three implementations at three lengths, each verified in 10 s: who was verified in order, and the rows."""

    def go(budget_s, script=None, with_references=False):
        lab, catalogue = Lab(script), Catalogue()
        lab.verify_s = 10.0
        for name, priority in (("first", 0), ("slow", 1), ("best", 2)):
            catalogue.implementations.add(Implementation(name, "", "m:b", supports=DENSE, priority=priority), "builtin")
        for timer in builtin.dilabench_register_timers():
            catalogue.timers.add(timer, "builtin")
        planned = [dense_case(name, seq_len=length) for length in (64, 128, 256) for name in ("first", "slow", "best")]
        if with_references:
            catalogue.implementations.add(Implementation("reference", "", "m:b", supports=DENSE, priority=9), "builtin")
            references = [dense_case("reference", seq_len=length, causal=False) for length in (64, 128, 256)]
            planned = [one.model_copy(update={"role": "yardstick"}) for one in references] + planned
        executor = CaseExecutor(
            catalogue=catalogue,
            pool=lab,
            method=Method(timer=WALL, warm_up=WarmUpLimits(min_s=0, max_s=1), precision=0.02, sampling_s=1.0),
            budget=Budget(budget_s, [one.case for one in planned], lab.clock),
            progress=Progress(),
            sleep=lab.slept.append,
        )
        run = _Run(executor, Machine(device="cpu"), keeper, planned, ())
        run.ceilings = {matmul_key("float32"): 1e30}
        run._measure_all(None)
        verified = [name for name, command, _ in lab.asked if command == "verify"]
        return verified, {(row.case.workload.seq_len, row.case.implementation): row.outcome for row in keeper.kept}

    return go


@pytest.mark.parametrize(("budget_s", "rows"), [(20.0, 3), (35.0, 3), (60.0, 4), (1000.0, 9), (None, 9)])
def test_every_length_gets_its_least_row_before_any_gets_its_best(measure_lengths, budget_s, rows):
    verified, outcomes = measure_lengths(budget_s)
    measured = {place for place, outcome in outcomes.items() if isinstance(outcome, Measured)}
    assert len(outcomes) == 9
    assert len(measured) >= rows
    assert {length for length, _ in measured} == {64, 128, 256}
    assert verified[:3] == (["best"] * 3 if budget_s else ["first", "slow", "best"])
    assert len(verified) == len(set(outcomes)) or rows < 9, "what was verified once is not verified again"
    for place in measured:
        assert sum(len(timing.samples_ns) for timing in outcomes[place].timings) >= 5
        alone = NOT_INTERLEAVED.among(outcomes[place].notes)
        assert not alone or budget_s in (20.0, 35.0, 60.0)


def test_least_rows_exceed_the_budget_by_as_much_again_at_most_and_say_so(measure_lengths):
    _, outcomes = measure_lengths(20.0)
    exceeded = {
        length: [note.observed * 1e-9 for note in BUDGET_EXCEEDED.among(outcome.notes)]
        for (length, _), outcome in outcomes.items()
        if isinstance(outcome, Measured)
    }
    assert exceeded == {64: [], 128: [pytest.approx(0.5, abs=1)], 256: [pytest.approx(10.5, abs=1)]}
    verified, outcomes = measure_lengths(9.0)
    assert verified == ["best"] * 2
    assert [length for (length, _), outcome in outcomes.items() if isinstance(outcome, Measured)] == [64]


@pytest.mark.parametrize("budget_s", [9.0, 20.0, 35.0, 60.0, 1000.0])
def test_every_reason_of_a_budget_names_the_budget_that_was_given(measure_lengths, budget_s):
    _, outcomes = measure_lengths(budget_s)
    texts = [outcome.why for outcome in outcomes.values() if isinstance(outcome, Skipped)]
    notes = [note for outcome in outcomes.values() if isinstance(outcome, Measured) for note in outcome.notes]
    texts += [note.message for note in notes if "used up" in note.message]
    assert all(f"budget of {format_seconds(budget_s)} used up" in text for text in texts), texts
    assert bool(texts) == (budget_s < 1000)


def test_references_are_measured_after_every_length_has_a_row(measure_lengths):
    verified, outcomes = measure_lengths(35.0, with_references=True)
    assert verified[:3] == ["best"] * 3
    measured = [name for (_, name), outcome in outcomes.items() if isinstance(outcome, Measured)]
    assert measured.count("best") == 3


def test_another_case_gives_the_least_row_where_the_best_is_wrong(measure_lengths):
    wrong = Verified(verification=Verification(checks=(Check(name="out", passed=False),)), why="out is zero")
    verified, outcomes = measure_lengths(45.0, {("best", "verify"): [wrong] * 3})
    assert verified[:2] == ["best", "slow"]
    assert {length for (length, _), outcome in outcomes.items() if isinstance(outcome, Measured)} == {64, 128, 256}


def test_no_case_is_verified_when_only_samples_of_others_have_time(measure):
    lab = Lab(call_ns=10**9)
    lab.verify_s = 10.0
    outcomes = measure(["a", "b", "c"], lab, budget_s=29.0)
    assert {name: type(outcome) for name, outcome in outcomes.items()} == {"a": Measured, "b": Skipped, "c": Skipped}
