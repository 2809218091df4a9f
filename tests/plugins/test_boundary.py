"""Threads that run plug-in code at once: their prints go to stderr, the command's own lines never do."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from threading import Barrier, Thread

import pytest

import dilabench
from dilabench.cli.terminal import say
from dilabench.plugins.boundary import guarded
from tests.conftest import slow

WAIT_S = 30


def test_threads_that_overlap_leave_stdout_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    stdout, both_inside, first_has_left = sys.stdout, Barrier(3, timeout=WAIT_S), Barrier(2, timeout=WAIT_S)

    def first() -> None:
        with guarded("first"):
            both_inside.wait()
            sys.stdout.write("from the first plug-in\n")
        first_has_left.wait()

    def second() -> None:
        with guarded("second"):
            both_inside.wait()
            first_has_left.wait()
            sys.stdout.write("from the second plug-in\n")

    threads = [Thread(target=first), Thread(target=second)]
    for thread in threads:
        thread.start()
    both_inside.wait()
    say("the command's line")
    for thread in threads:
        thread.join()
    assert sys.stdout is stdout
    captured = capsys.readouterr()
    assert captured.out == "the command's line\n"
    assert sorted(captured.err.splitlines()) == ["from the first plug-in", "from the second plug-in"]


# What ends the process: what is shown of it, and what the exit code may be.
ENDINGS = {
    "os._exit": ("import os; os._exit(0)", "SystemExit: os._exit(0)"),
    "an interrupt of its own": ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    "half of a surrogate pair": ("raise ValueError('\\ud800 is no letter')", r"ValueError: \ud800 is no letter"),
    "a segmentation fault": ("import ctypes; ctypes.string_at(0)", "the process ended while plug-in 'ends' was {}"),
    "exit in C": ("import ctypes; ctypes.CDLL(None)._exit(0)", "the process ended while plug-in 'ends' was {}"),
    "a signal": ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "while plug-in 'ends' was {}"),
    "Ctrl-C": (
        "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(5)",
        "interrupted while plug-in 'ends' was {}",
    ),
}
PLUGIN = """
from dilabench.plugins import Suite, hookimpl

def end():
    {ending}

def expand(request, planner):
    end()

if {at_import}:
    end()

@hookimpl
def dilabench_register_suites():
    return [Suite("ending", "for a test", "ends_process:expand")]
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Make a module a plug-in that processes find."""

    def install(text: str) -> None:
        (tmp_path / "ends_process.py").write_text(text)
        information = tmp_path / "ends_process-1.0.dist-info"
        information.mkdir()
        (information / "METADATA").write_text("Metadata-Version: 2.1\nName: ends-process\nVersion: 1.0\n")
        (information / "entry_points.txt").write_text("[dilabench]\nends = ends_process\n")
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{Path(dilabench.__file__).parents[1]}")

    return install


@pytest.mark.parametrize(
    ("ending", "at_import"),
    [
        *((ending, False) for ending in ENDINGS if ending != "a signal"),
        slow("a signal", False),
        ("os._exit", True),
        slow("exit in C", True),
        slow("an interrupt of its own", True),
    ],
)
def test_a_plugin_that_ends_the_process_is_named(
    installed: Callable[[str], None], tmp_path: Path, ending: str, at_import: bool
) -> None:
    code, shown = ENDINGS[ending]
    installed(PLUGIN.format(ending=code, at_import=at_import))
    arguments = ["list", "plugins"] if at_import else ["run", "ending", "--dry-run"]
    command = [sys.executable, "-m", "dilabench", *arguments]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
        # A shell that runs the tests in the background ignores it.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    said = " ".join((done.stdout + done.stderr).split())
    assert shown.format("loaded" if at_import else "running: suite 'ending'") in said
    if not at_import and ending != "exit in C":
        assert done.returncode not in (0, 1)


def test_a_process_that_a_plugin_forks_may_end() -> None:
    with guarded("theirs"):
        child = os.fork()
        if not child:
            os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


# What keeps a process after its answer, once it says "kept".
STAYING = {
    "a thread": (
        "def stay():\n"
        "    threading.main_thread().join()\n"
        "    kept()\n"
        "    time.sleep(300)\n"
        "threading.Thread(target=stay).start()"
    ),
    "an exit handler": "atexit.register(time.sleep, 300); atexit.register(kept)",
    "a C function at the exit": "atexit.register(ctypes.CDLL(None).sleep, 300); atexit.register(kept)",
}
KEPT = "import atexit, builtins, ctypes, os, signal, threading, time\ndef kept(write=os.write): write(2, b'kept\\n')\n"


@pytest.fixture
def staying(installed: Callable[[str], None], tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Start a command that is refused, with a plug-in of this code."""
    started = []

    def start(code: str) -> subprocess.Popen[str]:
        installed(KEPT + code)
        command = [sys.executable, "-m", "dilabench", "report", "no-such-run"]
        default = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, preexec_fn=default)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("kind", "number"),
    [
        ("a thread", signal.SIGINT),
        slow("a thread", signal.SIGTERM),
        slow("a thread", signal.SIGHUP),
        *((kind, signal.SIGTERM) for kind in STAYING if kind != "a thread"),
    ],
)
def test_a_signal_ends_a_command_that_a_plugin_keeps_after_its_answer(
    staying: Callable[[str], subprocess.Popen[str]], kind: str, number: signal.Signals
) -> None:
    process = staying(STAYING[kind])
    assert process.stderr is not None
    assert any(line == "kept\n" for line in process.stderr)
    process.send_signal(number)
    assert process.wait(WAIT_S) == 2


@pytest.mark.slow
def test_an_interrupted_command_does_not_wait_for_what_a_plugin_keeps(
    staying: Callable[[str], subprocess.Popen[str]],
) -> None:
    process = staying(STAYING["a thread"] + "\nos.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(300)")
    assert process.wait(WAIT_S) == 130
