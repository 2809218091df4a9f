"""A case in a process of its own, with a worker that only pretends: how it ends, and what a resumed run does then."""

import contextlib

import pytest

from dilabench.engine.budget import Budget
from dilabench.engine.call.specs import TimerSpec
from dilabench.engine.case_executor import CaseExecutor
from dilabench.engine.device.environment import snapshot
from dilabench.engine.isolated_run import IsolatedRun
from dilabench.engine.method import Method
from dilabench.engine.progress import Progress
from dilabench.engine.worker.client import WorkerFailure
from dilabench.engine.worker.protocol import WorkerSettings
from dilabench.engine.worker.warmup import WarmUpLimits
from dilabench.machine import Machine
from dilabench.plugins.descriptors import Capabilities, Implementation
from dilabench.record import Failed, RunHeader, Skipped
from dilabench.store.run_files import RunFolder, completed_rows
from tests.conftest import slow

DENSE = Capabilities(patterns=frozenset({"dense"}))


class Pool:
    """Workers that answer nothing in the time they are given, or do not even start."""

    settings = WorkerSettings(device="cpu")

    def __init__(self, starts, answers=()):
        self.starts, self.answers = starts, list(answers)

    def close(self):
        pass

    @contextlib.contextmanager
    def fresh(self, key):
        if not self.starts:
            raise WorkerFailure("timeout", "no answer to 'start'", died=True)
        yield self

    def ask(self, command, handle, *, timeout_s):
        if self.answers:
            answer = self.answers.pop(0)
            if isinstance(answer, BaseException):
                raise answer
            return answer
        raise WorkerFailure("timeout", f"no answer to {command.name!r} within {timeout_s:.3g} s", died=True)


@pytest.fixture
def row(catalogue, dense_case):
    def measure(budget_s, starts=True, answers=()):
        catalogue.implementations.add(Implementation("slow", "", "m:b", supports=DENSE), "builtin")
        planned = dense_case("slow")
        timer = TimerSpec(name="wall", target="t", proves="p")
        executor = CaseExecutor(
            catalogue=catalogue,
            pool=Pool(starts, answers),
            method=Method(timer=timer, warm_up=WarmUpLimits(min_s=0, max_s=1), precision=0.02),
            budget=Budget(budget_s, [planned.case], lambda: 0.0),
            progress=Progress(),
            timeout_s=600.0,
        )
        return IsolatedRun(executor, planned).row()

    return measure


def resumed(row, tmp_path):
    """The rows that a resumed run does not repeat."""
    folder = RunFolder.create(tmp_path, "extreme", "r")
    environment = snapshot(Machine(device="cpu"))
    folder.start(RunHeader(tool_version="0", run_id="r", suite="extreme", started_at="now", environment=environment))
    folder.row(row)
    folder.close()
    return completed_rows(folder.path)


def test_a_case_that_the_budget_ended_is_tried_again_by_a_resumed_run(row, tmp_path):
    ended = row(budget_s=60.0)
    assert isinstance(ended.outcome, Skipped)
    assert ended.outcome.code == "budget"
    assert ended.outcome.why.startswith("budget of 60 s used up during its stage 'time'")
    assert resumed(ended, tmp_path) == ()


def test_a_case_that_gave_no_answer_in_the_longest_time_has_failed(row, tmp_path):
    ended = row(budget_s=None)
    assert isinstance(ended.outcome, Failed)
    assert ended.outcome.code == "timeout"
    assert ended.outcome.why == "no answer to 'isolated' within 600 s"
    assert resumed(ended, tmp_path) == (ended,)


def test_a_worker_that_does_not_start_is_no_matter_of_the_budget(row):
    assert isinstance(row(budget_s=60.0, starts=False).outcome, Failed)


@pytest.mark.parametrize(
    ("code", "outcome"), [slow("out_of_memory", Skipped), ("unusable_optimization", Skipped), ("crash", Failed)]
)
def test_what_a_worker_tells_becomes_the_code_of_the_row(row, tmp_path, code, outcome):
    ended = row(None, answers=[WorkerFailure(code, "in any words")])
    assert type(ended.outcome) is outcome
    assert ended.outcome.code == code
    assert resumed(ended, tmp_path) == (ended,)
