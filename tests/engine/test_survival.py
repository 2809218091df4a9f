"""Death of the tool itself, a full disk, Ctrl-C, a clock that runs backwards: nothing is lost, nothing repeated."""

import errno
import os
import signal
import subprocess
import sys
import time
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from dilabench.comparison.pairing import pair_many
from dilabench.engine import runner
from dilabench.engine.device.lock import device_lock
from dilabench.engine.progress import Progress
from dilabench.engine.worker.client import WorkerPool
from dilabench.errors import ConfigError, EnvironmentNotReady
from dilabench.machine import Machine
from dilabench.metadata import CUT_SHORT, INTERRUPTED, matmul_key
from dilabench.record import Measured, Skipped
from dilabench.store.run_files import RunFolder, completed_rows, read_record, read_rows, refuse_other_rows
from tests.conftest import interrupting_once

pytestmark = pytest.mark.faults

# Three cells of one case each; the tool kills itself when the second row is on disk.
KILLED_TOOL = """
import os, signal, sys
from pathlib import Path

sys.path.insert(0, {impls!r})
from dilabench.engine.device.environment import snapshot
from dilabench.engine.device.lock import device_lock
from dilabench.engine.progress import Progress
from dilabench.engine.worker.client import WorkerPool
from dilabench.engine.runner import run
from dilabench.request import RunRequest
from dilabench.machine import Machine
from dilabench.plugins import builtin
from dilabench.plugins.catalogue import Catalogue
from dilabench.plugins.descriptors import Capabilities, Implementation
from dilabench.record import Case, PlannedCase, RunHeader
from dilabench.workload.spec import Workload
from dilabench.store.run_files import RunFolder


class Killer(Progress):
    rows = 0

    def row_done(self, row):
        self.rows += 1
        if self.rows == 2:
            os.kill(os.getpid(), signal.SIGKILL)


def main():
    cpu = Machine(device="cpu")
    catalogue = Catalogue()
    for timer in builtin.dilabench_register_timers():
        catalogue.timers.add(timer, "builtin")
    dense = Capabilities(patterns=frozenset({{"dense"}}))
    name = "leaves_its_pid"
    catalogue.implementations.add(Implementation(name, "", f"misbehaving:{{name}}", supports=dense), "x")
    shape = {{"batch_size": 1, "num_heads": 3, "num_kv_heads": 3, "head_dim": 24}}
    planned = [
        PlannedCase(case=Case(implementation=name, workload=Workload.model_validate({{
            "pattern": {{"kind": "dense"}}, "seq_len": n, **shape}})))
        for n in (33, 65, 129)
    ]
    header = RunHeader(tool_version="0", run_id="r", suite="s", started_at="now", environment=snapshot(cpu))
    folder = RunFolder.create(Path({base!r}), "s", "r")
    run(planned, RunRequest(suite="s", timing="simple"), catalogue, cpu, header, folder, Killer())


if __name__ == "__main__":
    main()
"""


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_kill_9_of_the_tool_then_resume_gives_the_same_cells(engine, dense_case, tmp_path, monkeypatch):
    impls = str(Path(__file__).parent / "impls_under_test")
    pids = tmp_path / "pids"
    script = tmp_path / "tool.py"
    script.write_text(KILLED_TOOL.format(impls=impls, base=str(tmp_path / "results")))
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": root, "DILABENCH_TEST_PIDS": str(pids), "OMP_NUM_THREADS": "1"}
    dead = subprocess.run([sys.executable, str(script)], env=environment, timeout=120, check=False)
    assert dead.returncode == -signal.SIGKILL

    (folder,) = (tmp_path / "results").iterdir()
    done = completed_rows(folder)
    assert [row.case.workload.seq_len for row in done] == [33, 65]
    assert read_record(folder).status == "interrupted"

    workers = [int(pid) for pid in pids.read_text().split()]
    deadline = time.monotonic() + 20
    while any(alive(pid) for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(alive(pid) for pid in workers)

    monkeypatch.setenv("DILABENCH_TEST_PIDS", str(pids))
    engine.register("leaves_its_pid")
    planned = [dense_case("leaves_its_pid", seq_len=length) for length in (33, 65, 129)]
    again = Counting()
    sink = RunFolder.resume(folder)
    record = engine(planned=planned, sink=sink, completed=done, progress=again)
    assert (again.totals, again.measured) == ([1], [129])
    assert [row.case.workload.seq_len for row in record.rows] == [33, 65, 129]
    assert record.status == "complete"
    assert record.rows[:2] == done
    assert read_record(folder) == record
    assert len(read_rows(folder)[1]) == 3


class Counting(Progress):
    def __init__(self):
        self.measured, self.totals = [], []

    def run_started(self, expected_s):
        self.totals.append(len(expected_s))

    def row_done(self, row):
        self.measured.append(row.case.workload.seq_len)


def test_ctrl_c_keeps_the_rows_so_far_and_says_so(engine, dense_case, tmp_path):
    class Interrupting(Progress):
        def row_done(self, row):
            raise KeyboardInterrupt

    engine.register("honest")
    planned = [dense_case("honest", seq_len=length) for length in (33, 65)]
    folder = RunFolder.create(tmp_path / "results", "s", "r")
    record = engine(planned=planned, sink=folder, progress=Interrupting())
    assert record.status == "interrupted"
    assert [row.case.workload.seq_len for row in record.rows] == [33]
    assert read_record(folder.path) == record
    rest = engine(planned=planned, sink=RunFolder.resume(folder.path), completed=completed_rows(folder.path))
    assert [row.case.workload.seq_len for row in rest.rows] == [33, 65]
    assert rest.status == "complete"


@pytest.mark.parametrize("built", [2, 3])
def test_ctrl_c_keeps_the_least_samples_of_every_length_and_resume_measures_them_again(
    engine, dense_case, tmp_path, built
):
    """Of two lengths within a budget, each gets its least samples first; then the first is built again."""

    class Interrupting(Progress):
        built = 0

        def stage_started(self, case, stage):
            self.built += stage == "build"
            if self.built == built:
                raise KeyboardInterrupt

    engine.register("honest")
    planned = [dense_case("honest", seq_len=length) for length in (33, 65)]
    folder = RunFolder.create(tmp_path / "results", "s", "r")
    record = engine(planned=planned, sink=folder, progress=Interrupting(), budget_s=100.0)
    assert record.status == "interrupted"
    assert [row.case.workload.seq_len for row in record.rows] == [33, 65][: built - 1]
    for row in record.rows:
        assert isinstance(row.outcome, Measured)
        assert [note.code for note in row.outcome.notes][-1] == CUT_SHORT.key
    assert read_record(folder.path) == record
    refuse_other_rows(folder.path, record)
    assert completed_rows(folder.path) == ()
    rest = engine(planned=planned, sink=RunFolder.resume(folder.path), completed=completed_rows(folder.path))
    assert [row.outcome.status for row in rest.rows] == ["measured", "measured"]
    assert not any(note.code == CUT_SHORT.key for row in rest.rows for note in row.outcome.notes)
    assert read_record(folder.path) == rest
    refuse_other_rows(folder.path, rest)


@pytest.mark.parametrize("place", [(runner._Run, "_record"), (RunFolder, "finish")], ids=["made", "written"])
def test_ctrl_c_while_the_record_is_made_or_written_loses_no_row(engine, tmp_path, monkeypatch, place):
    monkeypatch.setattr(*place, interrupting_once(getattr(*place)))
    folder = RunFolder.create(tmp_path / "results", "s", "r")
    with pytest.raises(KeyboardInterrupt):
        engine("honest", timing_runs=1, sink=folder)
    assert len(read_record(folder.path / "run.json").rows) == 1


def test_parts_of_a_cell_before_and_after_an_interruption_took_no_turns(engine, dense_case, tmp_path):
    class Interrupting(Progress):
        def row_done(self, row):
            raise KeyboardInterrupt

    names = ("honest", "noisy")
    for name in names:
        engine.register(name)
    planned = [dense_case(name) for name in names]
    folder = RunFolder.create(tmp_path / "results", "s", "r")
    options = {"planned": planned, "timing": "warmup", "warmup_runs": 1, "timing_runs": 6}
    rows = engine(sink=folder, progress=Interrupting(), **options).rows
    assert INTERRUPTED.key in {note.code for note in rows[1].outcome.notes}
    # As if the process had been killed after the first.
    record = engine(sink=RunFolder.resume(folder.path), completed=completed_rows(folder.path)[:1], **options)
    before, after = [row.outcome.timings[0] for row in record.rows]
    assert pair_many([[(before, after)]])[0].rounds is None


def test_a_disk_that_fills_up_stops_the_run_and_resumes_with_what_was_written(
    engine, dense_case, tmp_path, monkeypatch
):
    engine.register("honest")
    planned = [dense_case("honest", seq_len=length) for length in (33, 65, 129)]
    folder = RunFolder.create(tmp_path / "results", "s", "r")
    real, calls = os.fsync, []

    def full_at_the_third(descriptor):
        calls.append(descriptor)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    with monkeypatch.context() as patch:
        # Header, first row, second row.
        patch.setattr(os, "fsync", full_at_the_third)
        with pytest.raises(EnvironmentNotReady, match=r"No space left.* --resume "):
            engine(planned=planned, sink=folder)
    folder.close()
    done = completed_rows(folder.path)
    assert [row.case.workload.seq_len for row in done] == [33]
    record = engine(planned=planned, sink=RunFolder.resume(folder.path), completed=done)
    assert [row.case.workload.seq_len for row in read_record(folder.path).rows] == [33, 65, 129]
    assert all(isinstance(row.outcome, Measured) for row in record.rows)


def test_a_budget_that_ends_is_a_row_per_case_never_a_loss(engine, dense_case):
    engine.register("honest")
    planned = [dense_case("honest", seq_len=length) for length in (33, 65, 129)]
    ticks = iter(range(0, 10**9, 4))
    record = engine(planned=planned, budget_s=30.0, clock=lambda: float(next(ticks)))
    assert [row.case.workload.seq_len for row in record.rows] == [33, 65, 129]
    last = record.rows[-1].outcome
    assert isinstance(last, Skipped)
    assert last.why.startswith("budget of 30 s used up")


def test_waiting_for_another_run_costs_no_budget(engine):
    now = [0.0]
    other = device_lock(Machine(device="cpu"), "other", Progress())
    other.__enter__()

    class Released(Progress):
        def waiting(self, why):
            now[0] += 100.0
            other.__exit__(None, None, None)

    record = engine("honest", budget_s=30.0, clock=lambda: now[0], progress=Released())
    assert now == [100.0]
    assert isinstance(record.rows[0].outcome, Measured)


def test_a_monotonic_clock_that_runs_backwards_changes_nothing(engine):
    ticks = iter(range(10**9, 0, -7))
    record = engine("honest", budget_s=30.0, clock=lambda: float(next(ticks)))
    assert isinstance(record.rows[0].outcome, Measured)


def test_a_skipped_case_needs_no_worker(engine, dense_case, keeper):
    engine.register("honest")
    planned = [
        dense_case("honest").model_copy(update={"skip": Skipped(code="unsupported", why="needs cuda, have cpu")})
    ]
    record = engine(planned=planned, sink=keeper)
    assert record.rows[0].outcome == Skipped(code="unsupported", why="needs cuda, have cpu")
    assert keeper.record == record
    assert keeper.header.ceilings == {}


def test_rows_reach_the_sink_one_by_one_and_the_record_is_in_planned_order(engine, dense_case, keeper):
    for name in ("honest", "cannot_build"):
        engine.register(name)
    planned = [dense_case("honest"), dense_case("cannot_build"), dense_case("honest")]
    record = engine(planned=planned, sink=keeper)
    # The failure is certain first; a case that is planned twice is measured once.
    assert [row.case.implementation for row in keeper.kept] == ["cannot_build", "honest"]
    assert [row.case.implementation for row in record.rows] == ["honest", "cannot_build"]


def test_a_follow_up_adds_cases_until_it_is_content(engine, dense_case):
    engine.register("honest")
    asked = []

    def halve(rows):
        asked.append(len(rows))
        last = min(row.case.workload.seq_len for row in rows)
        return [dense_case("honest", seq_len=last // 2)] if last > 20 else []

    record = engine(planned=[dense_case("honest", seq_len=128)], follow_up=halve)
    assert [row.case.workload.seq_len for row in record.rows] == [128, 64, 32, 16]
    assert asked == [1, 2, 3, 4]


def test_a_dtype_that_comes_later_has_its_ceiling_measured_too(engine, dense_case):
    def in_float64(rows):
        return [] if len(rows) > 1 else [dense_case("honest", dtype="float64")]

    record = engine("honest", planned=[dense_case("honest", dtype="float32")], follow_up=in_float64)
    assert {row.case.workload.dtype for row in record.rows} == {"float32", "float64"}
    assert {matmul_key("float32"), matmul_key("float64")} <= record.ceilings.keys()


def test_an_unknown_timing_is_refused_before_anything_runs(engine):
    with pytest.raises(ConfigError, match="did you mean warmup"):
        engine("honest", timing="warmpu")
    with pytest.raises(ConfigError, match="works on cuda"):
        engine("honest", timing="cold")


def test_a_time_is_called_impossible_only_by_ceilings_that_a_second_look_confirms(engine, dense_case, monkeypatch):
    described = runner._Run._described

    def on_a_busy_machine(self, header):
        found = described(self, header)
        self.ceilings = dict.fromkeys(self.ceilings, 1.0)
        return found.model_copy(update={"ceilings": self.ceilings})

    monkeypatch.setattr(runner._Run, "_described", on_a_busy_machine)
    record = engine("honest")
    assert "above_peak_flops" not in [note.code for note in record.rows[0].outcome.notes]
    assert min(record.ceilings.values()) > 1e6, "what was measured again is what the record says"

    measured = []
    monkeypatch.setattr(runner, "_higher", lambda known, again: measured.append(again) or {})
    record = engine("honest", planned=[dense_case("honest"), dense_case("honest", seq_len=65)])
    assert [note.code for row in record.rows for note in row.outcome.notes].count("above_peak_flops") == 2
    assert len(measured) == 1, "a confirmed ceiling is not measured for every row"


def test_a_ceiling_that_was_not_known_counts_as_risen():
    """As that of tensor cores, which bounds float32 too, in a run that went on from a record without it."""
    assert runner._higher({"a": 2.0, "b": 2.0}, {"a": 1.0, "b": 3.0, "c": 1.0}) == {"b": 3.0, "c": 1.0}


@pytest.mark.parametrize("jump", [timedelta(days=-400), timedelta(days=400)], ids=["back", "ahead"])
def test_a_clock_that_is_set_meanwhile_changes_no_duration(engine, monkeypatch, jump):
    class Clock(datetime):
        """Set once it has been read."""

        ahead = timedelta(0)

        @classmethod
        def now(cls, tz=None):
            moment, cls.ahead = datetime.now(tz) + cls.ahead, jump
            return moment

    monkeypatch.setattr(runner, "datetime", Clock)
    record = engine("honest", timing_runs=1)
    took = datetime.fromisoformat(record.finished_at) - datetime.fromisoformat(record.started_at)
    assert timedelta(0) <= took < timedelta(hours=1)


def test_an_interrupted_run_is_saved_before_its_workers_end(engine, keeper, monkeypatch):
    """A worker of another machine may be out of reach, and torchrun kills what does not end within 30 s."""

    class Interrupting(Progress):
        def row_done(self, row):
            raise KeyboardInterrupt

    saved = []
    close = WorkerPool.close
    monkeypatch.setattr(WorkerPool, "close", lambda pool: (saved.append(keeper.record), close(pool)))
    record = engine("honest", timing_runs=1, sink=keeper, progress=Interrupting())
    assert record.status == "interrupted"
    assert saved == [record]
