"""Tests run in as many processes as there are cores; where there is a GPU, only those that need it do. GPU tests are
skipped, with the reason, where there is none; texts are laid out at a fixed width.
"""

import functools
import gc
import itertools
import lzma
import os
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Generator, Iterator
from importlib import metadata
from pathlib import Path

import pytest

PINNED_WIDTH = "100"
# More would only wait for the longest files.
MOST_PROCESSES = 8
# Of those that share a GPU and its memory.
MOST_OF_A_GPU = 14
PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"
# What a machine may lack. A skipped test says that it needs one of these, or is marked needs_extra, or it fails.
LACKED = re.compile(
    r"^Skipped: (Triton is not installed: |needs (a CUDA device|two CUDA devices|the backend |a C\+\+ compiler|"
    r"Linux: |a processor |a newer Triton|compiled kernels: |compute-sanitizer|chromium ))"
)

# In this process and in those that tests start; before any other conftest.py imports torch, which reads one of them.
os.environ.setdefault("TERMINAL_WIDTH", PINNED_WIDTH)
os.environ.pop("FORCE_COLOR", None)
# Hundreds of processes import the same modules: they are compiled once, whatever the shell says of bytecode.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Small tensors gain nothing from threads, and spinning ones starve whoever shares the cores: ranks and workers.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# As many processes as tests run in would each start as many compilers as there are cores.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    # Without xdist (`-p no:xdist`) there is one process, and what pyproject.toml asks of it has no effect.
    if not pluginmanager.hasplugin("xdist"):
        for option in ("--numprocesses", "--dist"):
            parser.addoption(option)


def pytest_configure(config: pytest.Config) -> None:
    # However many processes are asked for: GPU tests wait for compilers, and most of them are in one file.
    if config.option.markexpr == "gpu" and config.option.dist == "loadfile":
        config.option.dist = "load"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    from dilabench.machine import detect

    cores = os.cpu_count() or 1
    if detect().device == "cuda":
        # Others may fill the GPU, or time it, and need it to themselves.
        return min(cores, MOST_OF_A_GPU) if config.option.markexpr == "gpu" else 0
    files = {argument.partition("::")[0] for argument in config.args}
    one_file = len(files) == 1 and Path(*files).is_file()
    # A file stays in one process.
    return 0 if one_file else min(cores, MOST_PROCESSES)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    # A file that names none of the requested marks has none of their tests, and need not be imported to learn that.
    marks = config.option.markexpr.split(" or ")
    if collection_path.suffix != ".py" or not all(map(str.isidentifier, marks)):
        return None
    text = collection_path.read_text()
    return None if any(mark in text for mark in marks) else True


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    # What collection makes stays: looking for garbage among it takes a fifth of its time.
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    # Loaded modules and collected tests stay to the end: garbage collections need not look at them ever again.
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    counts = {word: Counter[str]() for word in ("passed", "failed")}
    for word, count in counts.items():
        reports = terminalreporter.getreports(word)
        count.update(report.nodeid.partition("::")[0] for report in reports if "faults" in report.keywords)
    passed, failed = (counts[word] for word in ("passed", "failed"))
    if names := sorted(passed | failed):
        each = ", ".join(f"{passed[name]} in {name}" for name in names)
        terminalreporter.write_line(f"faults: {passed.total()} survived ({each}), {failed.total()} not")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for mark in item.iter_markers("needs_extra"):
            if missing := missing_from(*mark.args):
                item.add_marker(pytest.mark.skip(reason=f"needs [{mark.args[0]}]: {', '.join(missing)} not installed"))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            # Before the reason of a parametrisation over what this machine's GPU runs, which is empty.
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, none is visible to torch"), append=False)


@functools.cache
def missing_from(extra: str, *names: str) -> tuple[str, ...]:
    """The requirements of an extra of pyproject.toml, or those of these names, that this environment does not meet."""
    from packaging.requirements import Requirement

    project = tomllib.loads(PYPROJECT.read_text())["project"]
    requirements = [Requirement(text) for text in project["optional-dependencies"][extra]]
    assert {*names} <= {requirement.name for requirement in requirements}, f"not in [{extra}]: {names}"
    missing: list[str] = []
    for requirement in requirements:
        if requirement.name == project["name"] and not names:
            missing += [text for part in sorted(requirement.extras) for text in missing_from(part)]
        elif requirement.name in (names or [requirement.name]) and not is_met(requirement):
            missing.append(str(requirement))
    return tuple(missing)


def is_met(requirement):
    """Whether the distribution of a requirement is installed in such a version, if this system needs it."""
    if requirement.marker and not requirement.marker.evaluate():
        return True
    try:
        return requirement.specifier.contains(metadata.version(requirement.name), prereleases=True)
    except metadata.PackageNotFoundError:
        return False


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    return failed_unless_named(report, {mark.args[0] for mark in item.iter_markers("needs_extra")})


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    return failed_unless_named(report)


def failed_unless_named(report, extras=frozenset()):
    """This report of a test or a module: failed if it was skipped and names neither one of LACKED nor of the extras."""
    if report.skipped and not hasattr(report, "wasxfail"):
        *_, reason = report.longrepr
        named = re.match(r"Skipped: needs \[(\w+)\]: ", reason)
        if not LACKED.match(reason) and (named is None or named[1] not in extras | {"test"}):
            report.outcome = "failed"
            report.longrepr = (
                f"{reason!r} does not say what the machine lacks; see LACKED and needs_extra in {__file__}"
            )
    return report


@pytest.fixture
def with_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are those of a machine with a C++ compiler, here or not."""
    from dilabench.choice import descriptors

    monkeypatch.setattr(descriptors, "_unmet_compiler", lambda _machine: None)


@pytest.fixture(scope="session", autouse=True)
def _own_device_lock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Where tests share the processor, their runs need not wait for those of another process, nor for anyone else's."""
    with pytest.MonkeyPatch.context() as patch:
        if "PYTEST_XDIST_WORKER" in os.environ:
            patch.setenv("DILABENCH_LOCK_DIR", str(tmp_path_factory.mktemp("locks")))
        yield


@pytest.fixture(autouse=True)
def _own_module_path() -> Iterator[None]:
    """What a test adds to sys.path, such as the folders of DILABENCH_PEERS, is found by no later test."""
    before = [*sys.path]
    yield
    sys.path[:] = before


@pytest.fixture(scope="session")
def warm_server() -> None:
    """Ranks and workers are forked from a server that has loaded what they need, once for all of them."""
    import multiprocessing
    from multiprocessing import forkserver

    # torch loads the last one at the first call of autograd.grad.
    modules = [
        "dilabench.engine.worker.handlers",
        "dilabench.distributed.launch",
        "torch.fx.experimental.symbolic_shapes",
    ]
    multiprocessing.set_forkserver_preload(["__main__", *modules])
    forkserver.ensure_running()


@pytest.fixture(scope="module")
def catalogue():
    """Everything that is registered."""
    from dilabench.plugins.manager import discover

    return discover().catalogue


@pytest.fixture(scope="session")
def ceilings_by_dtypes():
    return {}


@pytest.fixture
def known_ceilings(monkeypatch, ceilings_by_dtypes):
    """The first run of each set of dtypes measures the machine's ceilings, for half a second; later ones know them."""
    from dilabench.engine import runner

    measure = runner._measured_ceilings

    def known(worker, dtypes):
        key = frozenset(dtypes)
        if key not in ceilings_by_dtypes:
            ceilings_by_dtypes[key] = measure(worker, dtypes)
        return ceilings_by_dtypes[key]

    monkeypatch.setattr(runner, "_measured_ceilings", known)


@pytest.fixture
def launch(monkeypatch, warm_server):
    """Run a function on ranks; their processes import it by its module's name, for they inherit sys.path."""
    for folder in ("kernels", "distributed/on_ranks"):
        monkeypatch.syspath_prepend(Path(__file__).parent / folder)
    from launching import launch as on_ranks

    return on_ranks


@pytest.fixture(scope="session")
def interpreted(tmp_path_factory):
    """Runs a script of cases with its arguments in Triton's interpreter, and gives what it prints last.

    The interpreter is switched on before Triton is imported, so it has a process; scripts run in forks of it.
    """
    import json
    import signal
    import subprocess

    here, folder, server = Path(__file__).resolve().parent, tmp_path_factory.mktemp("interpreted"), None

    def run(script, arguments=()):
        nonlocal server
        if server is None:
            environment = os.environ | {"PYTHONPATH": str(here.parent), "OMP_NUM_THREADS": "1"}
            command = [sys.executable, "-W", "ignore", str(here / "kernels" / "interpreter.py")]
            pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
            server = subprocess.Popen(command, env=environment, text=True, start_new_session=True, **pipes)
        output = folder / "output"
        try:
            server.stdin.write(json.dumps([str(output), str(here / script), *arguments]) + "\n")
            server.stdin.flush()
            status = server.stdout.readline()
        except BaseException:
            # The time limit of a test ends the script, too.
            os.killpg(server.pid, signal.SIGKILL)
            stop()
            raise
        printed = output.read_text()
        assert status == "0\n", printed[-3000:]
        return json.loads(printed.splitlines()[-1])

    def stop():
        nonlocal server
        with server:
            server.stdin.close()
        server = None

    yield run
    if server is not None:
        stop()


def slow(*values):
    """A case of a parametrisation that is slow."""
    return pytest.param(*values, marks=pytest.mark.slow)


def slow_but_every(n, cases):
    """These cases, of several values each; all but every n-th are slow."""
    return [slow(*case) if at % n else case for at, case in enumerate(cases)]


def half_are_slow(*parameters):
    """All combinations of these parameters' values; slow are those whose places add up to an odd number.

    The others have every value, and of three or more parameters every pair of values of two of them.
    """
    return [
        pytest.param(*(value for _, value in case), marks=pytest.mark.slow if sum(at for at, _ in case) % 2 else ())
        for case in itertools.product(*map(enumerate, parameters))
    ]


def random_examples(few, many, **strategies):
    """A test of `few` random examples of these Hypothesis strategies, in the slow set of `many`; always the same."""

    def decorate(check):
        from hypothesis import given, settings

        @pytest.mark.parametrize("examples", [few, slow(many)])
        def test(examples):
            settings(max_examples=examples, deadline=None, derandomize=True)(given(**strategies)(check))()

        test.__name__, test.__doc__ = check.__name__, check.__doc__
        return test

    return decorate


def interrupting_once(function):
    """This function, of which the first call is interrupted before it begins."""
    calls = []

    def call(*arguments):
        calls.append(arguments)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return function(*arguments)

    return call


def text_of(path):
    """The text of a record that may be compressed."""
    data = path.read_bytes()
    return (lzma.decompress(data) if path.suffix == ".xz" else data).decode()


def stored_records():
    """The files of the stored records: of pages, and those that only tests read."""
    root = Path(__file__).parents[1]
    folders = root / "docs" / "results", root / "tests" / "golden" / "records"
    return [path for folder in folders for path in sorted(folder.glob("*.json.xz"))]


def stored_record(name):
    """The file of the stored record of this name."""
    (path,) = (path for path in stored_records() if path.name == f"{name}.json.xz")
    return path


def smallest_of_each_suite(records):
    """The smallest of these record files of each suite: what differs between suites, in the least time."""
    first = {}
    for path in sorted(records, key=lambda path: path.stat().st_size):
        suite = re.search(r'"suite":\s*"([^"]+)"', text_of(path))
        if suite:
            first.setdefault(suite[1], path)
    return set(first.values())


def role_of(name):
    """What a row of that name is in records made by hand."""
    return "plain" if name.startswith("gather") else "method"


def made_row(
    implementation="strided",
    *,
    ns=1e7,
    spread=0.01,
    rounds=20,
    samples=5,
    sessions=1,
    seed=0,
    position=0,
    peak=2**24,
    source="allocator",
    outcome=None,
    timer="wall",
    backend="math",
    throttle=(),
    labels=None,
    role=None,
    takes="heads",
    world_size=1,
    optimizations=None,
    notes=(),
    **workload,
):
    """A row of a record: measured with log-normal samples around `ns`, unless an outcome is given."""
    import random
    from math import exp

    from dilabench.record import Case, Measured, Memory, Optimizations, PlannedCase, Row, Slot, Timing, Verification
    from dilabench.workload.spec import Workload

    shape = {
        "pattern": {"kind": "dense"},
        "batch_size": 1,
        "seq_len": 96,
        "num_heads": 2,
        "num_kv_heads": 2,
        "head_dim": 24,
    }
    case = Case(
        implementation=implementation,
        backend=backend,
        workload=Workload.model_validate({**shape, **workload}),
        world_size=world_size,
        optimizations=optimizations or Optimizations(),
    )
    noise = random.Random(f"{implementation}-{seed}")
    slots = tuple(
        Slot(
            session=session,
            round=index,
            position=position,
            samples_ns=tuple(max(1, round(ns * exp(noise.gauss(0, spread)))) for _ in range(samples)),
            throttle=throttle if index < 10 else (),
        )
        for session in range(sessions)
        for index in range(rounds)
    )
    passed = Verification.model_validate({"checks": [{"name": "out", "passed": True}]})
    measured = Measured(
        verification=passed,
        timings=(Timing(timer=timer, proves="elapsed time", slots=slots),),
        memory=None if peak is None else Memory(peak_bytes=peak, isolated=True, source=source),
        notes=notes,
    )
    return Row(
        planned=PlannedCase(case=case, role=role or role_of(implementation), takes=takes, labels=labels or {}),
        outcome=outcome or measured,
    )


def made_record(
    rows, run_id="aaaa", *, hard=None, soft=None, device="cpu", started_at="2026-01-02T03:04:05+00:00", **more
):
    """A record of rows, on a machine with the given fingerprint."""
    from dilabench.record import CpuInfo, Environment, RunRecord

    environment = Environment(
        os="Linux",
        python="3.12",
        cpu=CpuInfo(model="test", cores=2, threads=2),
        fingerprint_hard={"device": device, "cpu": "test"} if hard is None else hard,
        fingerprint_soft=soft or {},
    )
    fields = {"tool_version": "0", "suite": "quick", "config": {"suite": "quick"}, **more}
    return RunRecord(
        run_id=run_id, device=device, started_at=started_at, environment=environment, rows=tuple(rows), **fields
    )


@pytest.fixture
def make_row():
    """`made_row`: a row out of thin air."""
    return made_row


@pytest.fixture
def make_record():
    """`made_record`: a record of such rows."""
    return made_record


@pytest.fixture
def calls_of():
    """How many functions, Python's and C's, a call makes: what grows with the square is found without a clock."""

    def count_calls(function, *arguments):
        count = 0

        def counted(_frame, event, _argument):
            nonlocal count
            count += event in ("call", "c_call")

        # What is freed meanwhile may call functions, too.
        gc.collect()
        gc.disable()
        sys.setprofile(counted)
        try:
            function(*arguments)
        finally:
            sys.setprofile(None)
            gc.enable()
        return count

    return count_calls


@pytest.fixture
def compiled_kernels():
    """The names of the Triton kernels that are compiled, as they are."""
    import triton

    names = []
    before = triton.knobs.runtime.jit_post_compile_hook
    triton.knobs.runtime.jit_post_compile_hook = lambda **about: names.append(str(about.get("fn")))
    yield names
    triton.knobs.runtime.jit_post_compile_hook = before
