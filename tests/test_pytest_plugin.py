"""The pytest plug-in in a separate session: it imports nothing heavy, and removed names answer."""

from pathlib import Path

import pytest

import dilabench

pytest_plugins = ["pytester"]

TESTS = """
import sys

def test_light():
    assert not {"torch", "numpy", "typer"} & set(sys.modules)

def test_of_old(dilabench_benchmark):
    dilabench_benchmark(sum, range(1000))
"""


@pytest.fixture
def session(pytester, monkeypatch):
    """Run pytest with only this plug-in."""
    monkeypatch.setenv("PYTHONPATH", str(Path(dilabench.__file__).parents[1]))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile(TESTS)
    return lambda *arguments: pytester.runpytest_subprocess("-p", "dilabench.pytest_plugin", *arguments)


def test_the_removed_fixture_says_what_to_use(session):
    result = session()
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*pytest fixture 'dilabench_benchmark' was removed: *; use pytest-benchmark*"])


def test_the_removed_option_says_what_to_use(session):
    result = session("--dilabench-json", "times.json")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*pytest option '--dilabench-json' was removed: *; use pytest-benchmark*"])
