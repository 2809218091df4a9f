"""Plug-ins that raise, exit, print or answer wrongly in the main process: each costs its own thing, and says where."""

import contextlib
import json
import resource
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pydantic import create_model

from dilabench.engine.timers import HeldTimer
from dilabench.errors import ConfigError, EnvironmentNotReady, ExitCode, PluginError, said
from dilabench.machine import Machine
from dilabench.plugins import Backend, Capabilities, Implementation, Reporter, Suite, hookimpl
from dilabench.plugins.boundary import answered, guarded
from dilabench.plugins.manager import discover
from dilabench.record import Case, Failed
from dilabench.report.findings import Curve, CurvePlot, Point, Section, render, sections_of
from dilabench.request import run_request
from dilabench.runs.execution import Reports
from dilabench.store.run_files import RunFolder
from dilabench.suites.planner import Planner, cases_of, expand, more_cases_of
from dilabench.workload.spec import WorkloadRequest
from tests.conftest import slow_but_every

CPU = Machine(device="cpu", no_cuda="test")
HOOKS = "dilabench_register_"


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even that")


class LeavingError(Exception):
    def __str__(self) -> str:
        sys.exit(0)


class Nameless(type):
    @property
    def __name__(cls) -> str:
        sys.exit(0)


class NamelessError(Exception, metaclass=Nameless):
    @property
    def __class__(self) -> Any:
        sys.exit(0)

    @property
    def __traceback__(self) -> Any:
        sys.exit(0)


class NobodysError(BaseException):
    pass


def raises(*_: Any) -> Any:
    raise ZeroDivisionError("division by zero")


def exits(*_: Any) -> Any:
    sys.exit("enough")


def unprintable(*_: Any) -> Any:
    raise UnprintableError


def leaves_in_its_text(*_: Any) -> Any:
    raise LeavingError


def leaves_in_its_class(*_: Any) -> Any:
    raise NamelessError("a text")


def closes(*_: Any) -> Any:
    raise GeneratorExit


def goes_on_and_on(*_: Any) -> Any:
    raise ValueError("word " * 600_000)


def beyond(*_: Any) -> Any:
    raise NobodysError("outside of Exception")


def nothing(*_: Any) -> Any:
    return None


def true(*_: Any) -> Any:
    return True


def zero(*_: Any) -> Any:
    return 0


def text(*_: Any) -> Any:
    return "a text"


def no_argument() -> Any:
    return None


def halfway(*_: Any) -> Any:
    yield Section(title="first", sentence="whole")
    raise OSError("gone")


def numbers(*_: Any) -> Any:
    return [3]


def wrong_rows(*_: Any) -> Any:
    return [Section(title="rows", sentence="of numbers", columns=("n",), rows=((3,),))]  # type: ignore[arg-type]


def wrong_point(*_: Any) -> Any:
    curve = Curve(label="times", points=(Point(1, "slow"),))  # type: ignore[arg-type]
    plot = CurvePlot(name="times", title="Times", y_label="ms", curves=(curve,))
    return [Section(title="points", sentence="of texts", plots=(plot,))]


def too_few_cells(*_: Any) -> Any:
    return [Section(title="rows", sentence="too short", columns=("n", "m"), rows=(("3",),))]


def chatty(*_: Any) -> Any:
    print("I am not JSON")  # noqa: T201
    return "rendered"


def chatty_in_the_original(*_: Any) -> Any:
    assert sys.__stdout__ is not None
    sys.__stdout__.write("I am not JSON\n")
    return "rendered"


FAILING = {
    raises: "ZeroDivisionError: division by zero",
    exits: "SystemExit: enough",
    unprintable: "UnprintableError: (its text cannot be printed: its __str__ raised RuntimeError)",
    leaves_in_its_text: "LeavingError: (its text cannot be printed: its __str__ raised SystemExit)",
    leaves_in_its_class: "NamelessError: a text",
    closes: "GeneratorExit",
    goes_on_and_on: " word … (2999999 letters)",
    beyond: "NobodysError: outside of Exception",
}
HERE = Path(__file__).name


def target(function: Callable[..., Any]) -> str:
    return f"adversaries_under_test:{function.__name__}"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "adversaries_under_test", sys.modules[__name__])


def found_with(shelf: str, *descriptors: Any, strict: bool = False) -> Any:
    return found_of(shelf, lambda: list(descriptors), strict)


def found_of(shelf: str, make: Callable[[], list[Any]], strict: bool = False) -> Any:
    plugin = SimpleNamespace(**{HOOKS + shelf: hookimpl(lambda: make())}, __name__="theirs")
    return discover(strict, extra=[plugin])


# Registration: whatever is wrong with a descriptor, its plug-in is left out.

DESCRIPTORS: dict[str, tuple[str, Callable[[], Any], str]] = {
    "requires None": ("implementations", lambda: _mine(requires=None), "requires None must be tuple[str, ...]"),
    "requires a text": ("implementations", lambda: _mine(requires="triton"), "requires 'triton' must be tuple"),
    "requires half a version": (
        "implementations",
        lambda: _mine(requires=("cuda>=new",)),
        "'cuda>=new' cannot be read",
    ),
    "supports None": ("implementations", lambda: _mine(supports=None), "supports None must be Capabilities"),
    "supports the class": ("implementations", lambda: _mine(supports=Capabilities), "must be Capabilities"),
    "a class for an instance": ("implementations", lambda: Implementation, "which is no Implementation"),
    "causal True": ("implementations", lambda: _mine(supports=Capabilities(causal=True)), "causal True must be"),  # type: ignore[arg-type]
    "modes a text": ("implementations", lambda: _mine(supports=Capabilities(modes="forward")), "modes 'forward' must"),  # type: ignore[arg-type]
    "named all": ("implementations", lambda: _mine("all"), "'all' means several names"),
    "named auto": ("backends", lambda: Backend("auto", "", "m:f"), "'auto' means several names"),
    "also called all": ("implementations", lambda: _mine(aliases=("all",)), "'all' means several names"),
    "half an expression": ("backends", lambda: Backend("mine", "", "m:f", kernels=("(",)), "no regular expression"),
    "a suite with a dict of options": (
        "suites",
        lambda: Suite("mine", "", "m:f", options={"pace": 1}),  # type: ignore[arg-type]
        "options {'pace': 1} must be a pydantic model that has a field for each option",
    ),
    "a suite with an option that must be given": (
        "suites",
        lambda: Suite("mine", "", "m:f", options=create_model("Pace", speed=int)),
        "options Pace: speed needs a default, for a request may leave it out",
    ),
    "a suite with a number": ("suites", lambda: Suite("mine", "", "m:f", budget_s="1"), "budget_s '1' must be"),  # type: ignore[arg-type]
    "no name": ("reporters", lambda: Reporter(None, "", "m:f"), "name None must be str"),  # type: ignore[arg-type]
}


def _mine(name: str = "mine", **fields: Any) -> Implementation:
    return Implementation(name, "for a test", "m:f", **fields)


@pytest.mark.parametrize("case", DESCRIPTORS)
def test_a_wrong_descriptor_is_left_out_with_field_and_place(case: str) -> None:
    shelf, make, reason = DESCRIPTORS[case]
    (problem,) = found_of(shelf, lambda: [make()]).problems
    assert problem.plugin == "theirs"
    assert reason in problem.why
    assert f"{HERE}:" in problem.why
    with pytest.raises(PluginError, match="plug-in 'theirs'"):
        found_of(shelf, lambda: [make()], strict=True)


@pytest.mark.parametrize("hook", FAILING, ids=lambda one: one.__name__)
def test_a_hook_that_fails_is_named_with_its_line(hook: Callable[..., Any]) -> None:
    plugin = SimpleNamespace(dilabench_register_timers=hookimpl(lambda: hook()), __name__="theirs")
    (problem,) = discover(extra=[plugin]).problems
    assert FAILING[hook] in problem.why
    assert f"{HERE}:" in problem.why


def test_an_unknown_name_tells_of_plugins_that_were_left_out() -> None:
    catalogue = found_of("implementations", lambda: [_mine(requires=None)]).catalogue
    with pytest.raises(ConfigError, match=r"unknown implementation 'mine'.*is broken: plug-in 'theirs'"):
        catalogue.implementations.get("mine")


# Rules of its own.


@pytest.mark.parametrize("field", ["check", "check_ranks"])
@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        *FAILING.items(),
        (true, "true ("),
        (zero, "returned 0; it must return a reason against, or None"),
        (no_argument, "TypeError: no_argument() takes 0 positional arguments"),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_a_check_that_fails_is_the_reason_against_its_case(field: str, rule: Any, reason: str) -> None:
    found = found_with("implementations", _mine(supports=Capabilities(**{field: rule})))
    request = run_request(found.catalogue, suite="implementations", run={"implementations": ["mine", "gather"]})
    theirs, ours = expand(found.catalogue, CPU, request)
    assert theirs.skip is not None
    assert "plug-in 'theirs': what 'mine' supports: " in theirs.skip.why
    assert reason in theirs.skip.why
    assert ours.skip is None


# Suites.


FAILING_SUITES = {
    **FAILING,
    nothing: "returned None; it must return a sequence of PlannedCase",
    numbers: "planned 3, which is no PlannedCase",
    zero: "returned 0; it must return a sequence of PlannedCase",
    text: "returned 'a text'; it must return a sequence of PlannedCase",
    halfway: "OSError: gone",
}


@pytest.mark.parametrize(
    ("ask", "function"),
    slow_but_every(2, product(["cases", "follow-up", "within all"], FAILING_SUITES)),
    ids=lambda one: getattr(one, "__name__", one),
)
def test_a_suite_that_fails_is_named(ask: str, function: Any) -> None:
    reason = FAILING_SUITES[function]
    suite = Suite("mine", "for a test", target(function), follow_up=target(function))
    found = found_with("suites", suite)
    planner = Planner(found.catalogue, CPU, run_request(found.catalogue, suite="mine"))
    if ask == "within all":
        request = run_request(found.catalogue, suite="all")
        assert len(expand(found.catalogue, CPU, request)) > 50, "the other suites are asked all the same"
        assert any(reason in problem.why and problem.plugin == "theirs" for problem in found.problems)
        return
    with pytest.raises(PluginError, match=r"plug-in 'theirs': .*suite 'mine': ") as caught:
        cases_of(suite, planner) if ask == "cases" else more_cases_of(suite, planner, ())
    assert reason in str(caught.value)


# Analyses and reporters.


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        *FAILING.items(),
        (nothing, "returned None; it must return a sequence of Section"),
        (zero, "returned 0; it must return a sequence of Section"),
        (halfway, "OSError: gone"),
        (wrong_rows, "rows.0.0: Input should be a valid string"),
        (wrong_point, "plots.0.CurvePlot.curves.0.points.0.y: Input should be a valid number"),
        (too_few_cells, "needs a text per column"),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_an_analysis_that_fails_is_a_section_that_says_so(
    function: Any, reason: str, make_record: Any, make_row: Any
) -> None:
    found = found_with("suites", Suite("mine", "for a test", "m:f", analysis=target(function)))
    record = make_record([make_row()], suite="mine")
    _, section = sections_of(record, found.catalogue)
    assert section.title == "Analysis failed"
    assert "Plug-in 'theirs'" in section.sentence or "plug-in 'theirs'" in section.sentence
    assert reason in section.sentence
    assert [problem.plugin for problem in found.problems] == ["theirs"]
    assert "Analysis failed" in str(
        render(found.catalogue.reporters.get("markdown"), record, None, [section], found.catalogue)
    )


@pytest.mark.parametrize(
    ("function", "reason"),
    [*FAILING.items(), (zero, "returned 0; it must return str or None"), (true, "returned True; it must return str")],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_a_reporter_that_fails_is_named(function: Any, reason: str, make_record: Any) -> None:
    reporter = Reporter("mine", "for a test", target(function))
    found = found_with("reporters", reporter)
    with pytest.raises(PluginError, match="plug-in 'theirs': reporter 'mine': ") as caught:
        render(reporter, make_record([]), None, (), found.catalogue)
    assert reason in str(caught.value)


@pytest.mark.parametrize("function", [chatty, chatty_in_the_original])
def test_what_a_plugin_prints_goes_to_stderr(
    function: Any, make_record: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on the command line.
    monkeypatch.setattr(sys, "__stdout__", sys.stdout)
    reporter = Reporter("mine", "for a test", target(function))
    assert render(reporter, make_record([]), None, (), found_with("reporters", reporter).catalogue) == "rendered"
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "I am not JSON\n")


# What they are given is a copy; the run's own stays as it is.


def meddles(record: Any, *_: Any) -> Any:
    record.config["seed"] = "mine"
    for row in record.rows:
        object.__setattr__(row, "outcome", Failed(stage="verify", code="wrong_output", why="mine"))
        row.planned.labels["mine"] = "mine"
    return [] if _ == () else None


def overwrites(_record: Any, folder: Path) -> None:
    (folder / "run.json").write_text("{}")


def removes(_record: Any, folder: Path) -> None:
    (folder / "run.json").unlink()


def unshowable(*_: Any) -> Any:
    class Worse(Section):
        __slots__ = ()

        def tables(self) -> Any:
            raise LookupError("no table here")

    return [Worse(title="mine", sentence="whole", columns=("n",), rows=(("3",),))]


@pytest.mark.parametrize("kind", ["reporter", "analysis"])
def test_a_record_that_a_plugin_changes_is_a_copy(kind: str, make_record: Any, make_row: Any) -> None:
    record = make_record([make_row()], suite="mine")
    before = record.model_dump_json()
    if kind == "reporter":
        found = found_with("reporters", Reporter("mine", "for a test", target(meddles)))
        assert render(found.catalogue.reporters.get("mine"), record, None, (), found.catalogue) is None
    else:
        found = found_with("suites", Suite("mine", "for a test", "m:f", analysis=target(meddles)))
        sections_of(record, found.catalogue)
    assert found.problems == []
    assert record.model_dump_json() == before


@pytest.mark.parametrize("reporter", ["table", "markdown", "html", "pull-request"])
def test_a_suite_whose_sections_cannot_be_shown_is_blamed(reporter: str, make_record: Any, make_row: Any) -> None:
    found = found_with("suites", Suite("mine", "for a test", "m:f", analysis=target(unshowable)))
    record = make_record([make_row()], suite="mine")
    sections = sections_of(record, found.catalogue)
    text = render(found.catalogue.reporters.get(reporter), record, None, sections, found.catalogue)
    assert text is not None
    (problem,) = found.problems
    assert problem.plugin == "theirs"
    assert "suite 'mine'" in problem.why
    assert "LookupError: no table here" in problem.why


@pytest.mark.parametrize("change", [overwrites, removes])
def test_a_record_on_disk_that_a_reporter_changes_is_put_back(
    change: Callable[..., None], make_record: Any, make_row: Any, tmp_path: Path
) -> None:
    found = found_with("reporters", Reporter("mine", "for a test", target(change), filename="mine.txt"))
    record = make_record([make_row()])
    RunFolder(tmp_path).finish(record)
    before = (tmp_path / "run.json").read_bytes()
    Reports(record, found.catalogue, (), {}).written([found.catalogue.reporters.get("mine")], tmp_path)
    assert (tmp_path / "run.json").read_bytes() == before
    assert [problem.plugin for problem in found.problems] == ["theirs"]
    assert "changed run.json" in found.problems[0].why


# Targets of shardings and memory.


class Balance:
    def load_balance(self, *_: Any) -> Any:
        return "even"

    def overlapping_share(self, *_: Any) -> Any:
        raise KeyError("ranks")

    def received_bytes(self, *_: Any) -> Any:
        sys.exit(3)


balance = Balance()


def case_of(catalogue: Any, implementation: str) -> Case:
    workload = WorkloadRequest(seq_len=96).resolve("float32")
    return Case(implementation=implementation, backend="math", workload=workload)


def test_a_sharding_that_fails_leaves_its_figures_unknown() -> None:
    found = found_with("implementations", _mine(sharding="adversaries_under_test:balance"))
    case = case_of(found.catalogue, "mine")
    sharding = found.catalogue.sharding_of(case.implementation)
    assert sharding is not None
    facts = case.workload, 2
    assert (sharding.load_balance(*facts), sharding.overlapping_share(*facts), sharding.received_bytes(*facts)) == (
        None,
        None,
        None,
    )
    assert {problem.plugin for problem in found.problems} == {"theirs"}
    assert (
        found_with("implementations", _mine(sharding="no_such:thing")).catalogue.sharding_of(case.implementation)
        is None
    )


# Timers, inside a worker.


class AnsweringTimer:
    answer: Any = None

    def __init__(self, call: Any) -> None:
        self.call = call

    def take(self, count: int) -> Any:
        from dilabench.engine.timers import Samples

        return {"nothing": None, "zero": 0}.get(self.call) if self.call in ("nothing", "zero") else Samples(self.call)

    def notes(self) -> tuple[()]:
        return ()


@pytest.mark.parametrize(
    "answer", ["nothing", "zero", (0, 5), (5,), (5, -1), (5, 2.5), (5, True, 3), [5, 5], (5, 2**70)]
)
def test_samples_that_are_none_are_the_timers_error(answer: Any) -> None:
    timer = HeldTimer("adversaries_under_test:AnsweringTimer", answer)
    with pytest.raises(PluginError, match="timer adversaries_under_test:AnsweringTimer"):
        timer.take(2)
    assert HeldTimer("adversaries_under_test:AnsweringTimer", (5, 6)).take(2).samples_ns == (5, 6)


# Patterns.

PATTERN = """
from typing import Literal
from pydantic import field_validator
from dilabench.patterns.pattern import Pattern
from dilabench.plugins import PatternKind, hookimpl

class Mine(Pattern):
    kind: Literal["{name}"] = "{name}"
    size_of_{name}: int = 1

    def counts(self, shape, head, rows):
        raise KeyError("lost")
        yield

{body}

@hookimpl
def dilabench_register_patterns():
    return [PatternKind("{name}", "for a test", "{name}:Mine")]
"""


@pytest.fixture
def pattern_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Any]:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("dilabench.patterns.registry._types", dict(sys.modules["dilabench.patterns.registry"]._types))

    def make(name: str, body: str) -> Any:
        import importlib

        (tmp_path / f"{name}.py").write_text(PATTERN.format(name=name, body=textwrap.indent(body, "    ")))
        return discover(extra=[importlib.import_module(name)])

    return make


@pytest.mark.parametrize(
    ("name", "body", "reason"),
    [
        ("label_raises", "def label(self): return 1 / 0", "Mine.label: ZeroDivisionError"),
        ("label_none", "def label(self): return None", "Mine.label ("),
        ("example_exits", "@classmethod\ndef examples(cls): raise SystemExit(2)", "SystemExit: 2"),
        ("no_model", "@classmethod\ndef request_model(cls): return 3", "returned 3; it must return type"),
        ("no_trials", "@classmethod\ndef trials(cls): return None", "must return Mapping"),
        ("parts_text", "@property\ndef parts(self): return 'two'", "returned 'two'; it must return int"),
    ],
)
def test_a_pattern_that_cannot_be_asked_is_left_out(pattern_plugin: Any, name: str, body: str, reason: str) -> None:
    found = pattern_plugin(name, body)
    (problem,) = found.problems
    assert problem.plugin == name
    assert reason in problem.why
    assert f"{name}.py:" in problem.why
    assert name not in found.catalogue.patterns


def test_a_pattern_that_fails_later_is_named_with_its_line(pattern_plugin: Any) -> None:
    check = "@field_validator('size_of_later')\n@classmethod\ndef _size(cls, value): return 1 // (value - 7)"
    found = pattern_plugin("later", check)
    assert not found.problems
    workload = WorkloadRequest(pattern="later", seq_len=16).resolve("float32")
    from dilabench.workload.spec import flops

    with pytest.raises(PluginError, match=r"plug-in 'later': pattern Mine.counts: KeyError: 'lost' \(.*later.py:\d+\)"):
        flops(workload)
    with pytest.raises(PluginError, match=r"plug-in 'later': .*ZeroDivisionError.*later.py:\d+"):
        workload.pattern.model_validate({"size_of_later": 7})
    with pytest.raises(ValueError, match="valid integer"):
        workload.pattern.model_validate({"size_of_later": "x"})


def test_a_pattern_is_checked_and_the_class_of_its_plugin_stays_as_it_is(pattern_plugin: Any) -> None:
    pattern_plugin("plain", "drawn_in_reports = False\ndef label(self): return 'plain'")
    own = sys.modules["plain"].Mine
    workload = WorkloadRequest(pattern="plain", seq_len=16).resolve("float32")
    given = workload.replace(pattern=own(size_of_plain=1))
    assert given == workload
    assert len({given, workload}) == 1
    # The plug-in's own instance is checked as well, and the class raises its own error.
    for pattern, error in ((given.pattern, PluginError), (own(), KeyError)):
        with pytest.raises(error):
            next(pattern.counts(given.shapes[0], 0, np.arange(16)))


# The boundary itself.


def lowers_recursion(*_: Any) -> Any:
    # The lowest that is accepted at this depth.
    for limit in range(1, 1000):
        with contextlib.suppress(RecursionError):
            return sys.setrecursionlimit(limit)
    return None


def lowers_files(*_: Any) -> Any:
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def lowers_file_sizes(*_: Any) -> Any:
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


LOWERED = {
    lowers_recursion: "it set the recursion limit to ",
    lowers_files: "it set RLIMIT_NOFILE to 3, which is ",
    lowers_file_sizes: "it set RLIMIT_FSIZE to 0, which is -1 again",
}


def limits() -> Any:
    return (
        sys.getrecursionlimit(),
        resource.getrlimit(resource.RLIMIT_NOFILE),
        resource.getrlimit(resource.RLIMIT_FSIZE),
    )


@pytest.mark.parametrize("then", [nothing, closes], ids=["returns", "raises"])
@pytest.mark.parametrize("lower", LOWERED, ids=lambda function: function.__name__)
@pytest.mark.parametrize("at", ["hook", "request"])
def test_a_limit_that_a_plugin_lowers_is_restored(at: str, lower: Any, then: Any) -> None:
    before = limits()

    def lowers(*_: Any) -> Any:
        lower()
        return then()

    if at == "hook":
        (problem,) = found_of("timers", lowers).problems
        plugin, why = problem.plugin, problem.why
    else:
        with pytest.raises(PluginError) as caught:
            answered("theirs", "a test", lowers, kind=type(None))
        assert caught.value.plugin is not None
        plugin, why = caught.value.plugin, caught.value.why
    assert limits() == before
    assert (plugin, LOWERED[lower] in why) == ("theirs", True)


def test_a_limit_that_cannot_be_restored_ends_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    before, set_limit = resource.getrlimit(resource.RLIMIT_NOFILE), resource.setrlimit

    def refuse(*_: Any) -> None:
        raise ValueError("not allowed to raise maximum limit")

    def lower() -> None:
        set_limit(resource.RLIMIT_NOFILE, (64, before[1]))
        monkeypatch.setattr(resource, "setrlimit", refuse)

    try:
        with pytest.raises(EnvironmentNotReady, match="'theirs': it set RLIMIT_NOFILE to 64, which cannot be undone"):
            answered("theirs", "a test", lower, kind=type(None))
    finally:
        set_limit(resource.RLIMIT_NOFILE, before)


def test_a_raised_limit_stays() -> None:
    before = sys.getrecursionlimit()
    try:
        with guarded("theirs"):
            sys.setrecursionlimit(before + 500)
        assert sys.getrecursionlimit() == before + 500
    finally:
        sys.setrecursionlimit(before)


@pytest.mark.parametrize("refusal", [ConfigError, EnvironmentNotReady])
@pytest.mark.parametrize("at", ["hook", "check"])
def test_a_refusal_without_a_request_is_the_plugins_problem(at: str, refusal: Any) -> None:
    def refuses(*_: Any) -> Any:
        raise refusal("its settings are missing")

    if at == "hook":
        (problem,) = found_of("timers", refuses).problems
        why = problem.why
    else:
        found = found_with("implementations", _mine(supports=Capabilities(check=refuses)))
        request = run_request(found.catalogue, suite="implementations", run={"implementations": ["mine"]})
        (planned,) = expand(found.catalogue, CPU, request)
        assert planned.skip is not None
        why = planned.skip.why
    assert "its settings are missing" in why
    assert f"{HERE}:" in why


def test_the_text_and_the_exit_code_of_a_refusal_are_not_the_plugins_class() -> None:
    class MineError(ConfigError):
        exit_code = ExitCode.OK

        def __str__(self) -> str:
            sys.exit(0)

    with pytest.raises(ConfigError) as caught, guarded("theirs", "a test"):
        raise MineError
    assert (type(caught.value), caught.value.exit_code) == (ConfigError, ExitCode.BAD_REQUEST)
    assert "its __str__ raised SystemExit" in str(caught.value)


def test_refusals_for_the_user_and_ctrl_c_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    # A shell that starts the tests in the background has it ignored.
    monkeypatch.setattr(signal, "getsignal", lambda _: signal.default_int_handler)
    for error in (ConfigError("no"), EnvironmentNotReady("no"), KeyboardInterrupt()):
        with pytest.raises(type(error)), guarded("theirs", "a test"):
            raise error


def test_an_answer_of_another_kind_names_the_function() -> None:
    with pytest.raises(PluginError, match=rf"plug-in 'theirs': a test: true \(.*{HERE}:\d+\) returned True; it must"):
        answered("theirs", "a test", true, kind=int)


def test_any_exception_has_a_text() -> None:
    assert said(UnprintableError()) == "UnprintableError: (its text cannot be printed: its __str__ raised RuntimeError)"
    assert json.dumps(said(ValueError("two\nlines"))) == '"ValueError: two lines"'


# Where rows come from.


def forging(request: Any, planner: Any) -> Any:
    (asked,) = planner.workload_requests([{"seq_len": 96}])
    planned = [one for name in ("mine", "gather") for one in planner.plan(planner.implementations([name])[0], asked)]
    return [one.model_copy(update={"source": "dilabench 9"}) for one in planned]


def test_a_suite_does_not_decide_where_its_rows_come_from() -> None:
    suite = Suite("forged", "for a test", target(forging))
    hooks = {HOOKS + "suites": hookimpl(lambda: [suite]), HOOKS + "implementations": hookimpl(lambda: [_mine()])}
    found = discover(extra=[SimpleNamespace(**hooks, __name__="theirs")])
    request = run_request(found.catalogue, suite="forged")
    planned = expand(found.catalogue, CPU, request)
    assert {one.case.implementation: one.source for one in planned} == {"mine": "theirs", "gather": None}


SPOILT_STREAMS = """
import sys
from dilabench.cli.terminal import note, own_streams, say
from dilabench.errors import PluginError
from dilabench.plugins.boundary import guarded
own_streams()
try:
    with guarded("theirs", "a test"):
        {}
except PluginError:
    pass
say("the answer")
note("the rest")
"""


SPOILS = ("{}.close()", "{}.buffer.close()", "{}.detach()", "{} = None", "{} = object()")
STREAMS = ("sys.stdout", "sys.stderr", "sys.__stdout__", "sys.__stderr__")


# Each has a process; every third has all ways and all streams.
@pytest.mark.parametrize(("spoil", "stream"), slow_but_every(3, [*product(SPOILS, STREAMS)]))
def test_what_a_plugin_does_to_streams_costs_no_output(spoil: str, stream: str) -> None:
    code = SPOILT_STREAMS.format(spoil.format(stream))
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "the answer\n", "note: the rest\n")
