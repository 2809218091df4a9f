"""The conformance suite finds what is wrong with a thing, and says so in its scorecard."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest
from pydantic import create_model

from dilabench.choice.descriptors import unmet
from dilabench.conformance.component import CHECKS, check_suite
from dilabench.conformance.fresh_import import import_reports
from dilabench.conformance.implementation import check_implementation
from dilabench.conformance.pattern import QUESTIONS, SHAPES
from dilabench.conformance.scorecard import Finding, Findings, Listener, Scorecard
from dilabench.engine.outcomes import mistake_of
from dilabench.errors import ExitCode
from dilabench.machine import Machine
from dilabench.patterns.dilated import DilatedPattern
from dilabench.patterns.pattern import Pairs, SequenceShape
from dilabench.plugins import Suite, hookimpl
from dilabench.plugins.manager import discover
from dilabench.record import Check, Skipped, Verification
from dilabench.testing import check_plugin

CPU = Machine(device="cpu", no_cuda="test")
DILATED = next(one for one in DilatedPattern.examples() if not one.covered(SHAPES[1], 0).all())


@pytest.mark.slow
def test_an_import_that_does_more_than_define_is_told_with_its_line(tmp_path, monkeypatch):
    module = tmp_path / "rude_module.py"
    module.write_text(
        "import os, socket, random\n"
        "os.environ['RUDE'] = '1'\n"
        "open('/tmp/../tmp/rude_file_of_a_test', 'w').close(); os.remove('/tmp/rude_file_of_a_test')\n"
        "try:\n    socket.create_connection(('127.0.0.1', 9), 0.1)\nexcept OSError:\n    pass\n"
        "random.seed(3)\n"
        "import torch\ntorch.set_num_threads(3)\n"
        "print('noise')\n"
    )
    (tmp_path / "dying_module.py").write_text("import os\nos._exit(3)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    rude, dying = import_reports(["rude_module", "dying_module"], ["never_reached"])
    assert rude.heavy == ("torch",)
    assert "127.0.0.1" in rude.network[0]
    assert f"({module}:5)" in rude.network[0]
    told = " ".join(rude.effects)
    assert "environment variable RUDE was None, is '1'" in told
    assert "rude_file_of_a_test', 'w', " in told
    assert f"({module}:3)" in told
    assert "state of random" in told
    assert dying.error is not None
    assert dying.error.startswith("its process ended with code 3")


def overridden(**answers: Any) -> DilatedPattern:
    """The dilated pattern with other answers, which its counts do not bear out."""
    kind = type("Wrong", (DilatedPattern,), answers)
    return kind(**DILATED.model_dump())


@pytest.mark.parametrize(
    ("question", "answers"),
    [
        ("pairs", {"pairs": lambda self, shape: Pairs(3, 3)}),
        ("covered, rows_seeing, keys_per_row", {"covered": lambda self, shape, head: np.ones(shape.length, bool)}),
        ("covered, rows_seeing, keys_per_row", {"keys_per_row": lambda self, length: 1}),
        ("head_key", {"head_key": lambda self, shape, head: None}),
        ("reached_rows", {"reached_rows": lambda self, shape: (10**6, 10**6)}),
        ("strided_segments, is_dense", {"is_dense": lambda self, shape: True}),
        ("cut_length", {"cut_length": property(lambda self: 5)}),
        ("edges", {"edges": lambda self, shape: np.array([-3])}),
    ],
)
def test_an_answer_of_a_pattern_that_is_not_its_definition_is_found(question, answers):
    def problems(pattern: DilatedPattern, shape: SequenceShape) -> list[str]:
        return list(QUESTIONS[question](pattern, shape))

    assert not any(problems(DILATED, shape) for shape in SHAPES)
    assert any(problems(overridden(**answers), shape) for shape in SHAPES)


def test_a_suite_that_plans_otherwise_or_fails_over_a_record_is_found(monkeypatch):
    import sys

    flips = iter((512, 256))
    module = SimpleNamespace(
        expand=lambda request, planner: planner.compare(
            planner.workload_requests([{"seq_len": next(flips)}]), planner.implementations(["gather"])
        ),
        analyse=lambda record: [1 // sum(row.outcome.status == "measured" for row in record.rows)],
    )
    monkeypatch.setitem(sys.modules, "flipping", module)
    suite = Suite("flipping", "", "flipping:expand", analysis="flipping:analyse")

    @hookimpl
    def dilabench_register_suites() -> list[Suite]:
        return [suite]

    plugin = SimpleNamespace(dilabench_register_suites=dilabench_register_suites, __name__="third")
    found, findings = discover(extra=[plugin]), Findings()
    check_suite(suite, found.catalogue, CPU, findings)
    results = {one.name: (one.result, one.detail) for one in findings}
    assert results["determinism"][0] == "failed"
    assert "which is no Section" in results["analysis, measured"][1]
    assert "ZeroDivisionError" in results["analysis, nothing measured"][1]
    assert found.problems == [], "what was tried here is no problem of the catalogue"


@pytest.mark.parametrize(
    ("results", "code"),
    [
        (("right",), ExitCode.OK),
        (("skipped",), ExitCode.NOTHING_MEASURED),
        (("right", "failed"), ExitCode.CASE_FAILED),
        (("failed", "wrong"), ExitCode.WRONG_OUTPUT),
    ],
)
def test_the_gravest_finding_decides(results, code):
    behaviour = tuple(Finding(name=result, result=result) for result in results)
    card = create_model("Card", __base__=Scorecard)(
        name="x", kind="k", plugin="p", version="0", device="cpu", package=(), behaviour=behaviour
    )
    assert card.exit_code is code
    assert card.passed is (code is ExitCode.OK)
    assert card.model_dump(mode="json")["passed"] is card.passed


def test_what_we_ship_conforms(dilabench_check):
    (card,) = dilabench_check("markdown", kind="reporter", device="cpu")
    assert {one.result for one in card.findings} == {"right"}


CATALOGUE = discover().catalogue
LIGHT_KINDS = ("suites", "reporters", "workloads")
SHIPPED = [(registry, one.name) for registry in LIGHT_KINDS for one in getattr(CATALOGUE, registry)]


@pytest.mark.slow
@pytest.mark.parametrize(("registry", "name"), SHIPPED)
def test_every_light_thing_that_we_ship_conforms(registry, name):
    findings = Findings()
    CHECKS[registry](getattr(CATALOGUE, registry).get(name), CATALOGUE, CPU, findings)
    assert [one for one in findings if one.result != "right"] == []


@pytest.mark.slow
def test_importing_what_we_ship_does_nothing_else():
    """All light modules in one process, then those of implementations that need no library."""
    shelves = {one: list(getattr(CATALOGUE, one)) for one in CHECKS}
    light = {one.target.partition(":")[0] for name in ("patterns", "suites", "reporters") for one in shelves[name]}
    implementations = [one for one in shelves["implementations"] if one.takes != "model"]
    heavy = {one.target.partition(":")[0] for one in implementations if not unmet(one.requires, CPU)}
    reports = import_reports(sorted(light), sorted(heavy - light))
    assert len(reports) == len(light | heavy)
    allowed = {"module": ANY, "lasted_ns": ANY, "error": None, "network": (), "effects": ()}
    for report in reports:
        of_torch = {"heavy": ANY} if report.module in heavy else {"heavy": ()}
        assert report.model_dump() == {**allowed, **of_torch}, report.module


@pytest.mark.slow
def test_a_timer_that_runs_in_workers_conforms():
    check_plugin("wall", kind="timer", device="cpu")


@pytest.mark.slow
def test_an_implementation_over_ranks_conforms():
    findings = Findings()
    check_implementation(CATALOGUE.implementations.get("ring"), CATALOGUE, CPU, findings, kinds=("dense",))
    results = {one.name: one.result for one in findings}
    assert set(results.values()) <= {"right", "skipped"}
    assert results["2 ranks"] == results["memory"] == "right"


def test_a_failure_of_the_suite_is_an_assertion_with_every_reason(monkeypatch):
    from dilabench.report import json

    monkeypatch.setattr(json, "render", lambda record, folder: "" if record.rows else 5)
    with pytest.raises(AssertionError, match=r"reporter json does not conform:\nall measured: it prints nothing\n"):
        check_plugin("json", kind="reporter", device="cpu")


def test_a_result_is_told_as_soon_as_its_last_case_is_known(monkeypatch):
    told, heard = [], []

    class Hears(Listener):
        def verified(self, done, total, what):
            heard.append((done, total))

    findings, catalogue = Findings(Hears()), discover().catalogue

    def outcomes_of(planned, *_):
        for one in planned:
            told.append({finding.name for finding in findings})
            yield one.skip or Skipped(code="unsupported", why="not tried")

    monkeypatch.setattr("dilabench.conformance.implementation.outcomes_of", outcomes_of)
    reference = catalogue.implementations.get("reference")
    check_implementation(reference, catalogue, Machine(device="cpu"), findings, kinds=("dense", "window_sink"))
    assert "pattern dense" in told[-1]
    assert "pattern window_sink" not in told[-1]
    assert heard == [(done, len(told)) for done in range(len(told) + 1)]


def test_a_mistake_of_no_known_kind_is_the_check_that_fails():
    checks = (Check(name="lse", passed=True), Check(name="out", passed=False, error=0.5, tolerance=1e-6))
    assert mistake_of(Verification(checks=checks)) == ("check out fails", "out: error 0.5, allowed 1e-06")
    known = Verification(checks=checks, diagnosis="out is that of no window")
    assert mistake_of(known)[0] == "out is that of no window"
