"""Threads that run plug-in code at once: their prints go to stderr, the command's own lines never do."""

import sys
from threading import Barrier, Thread

import pytest

from dilabench.cli.terminal import say
from dilabench.plugins.boundary import guarded

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
