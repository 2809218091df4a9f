"""The pytest fixture `dilabench_check`: run every conformance check on what your package registers.

    def test_it_conforms(dilabench_check):
        dilabench_check("my-attention")                  # `dilabench plugin check my-attention`, as an assertion

pytest finds it through the entry point `pytest11`; `-p no:dilabench` leaves it out. Loading it imports no torch.
"""

import argparse
import importlib
from collections.abc import Callable

import pytest

JSON_OPTION = "--dilabench-json"


@pytest.fixture
def dilabench_check() -> Callable[..., object]:
    """`dilabench.testing.check_plugin`, imported when a test requests it."""
    # By name: `dilabench.testing` is a module of the same layer, and imports torch.
    check: Callable[..., object] = importlib.import_module("dilabench.testing").check_plugin
    return check


@pytest.fixture
def dilabench_benchmark() -> None:
    """Fail with the reason for which this fixture was removed."""
    pytest.fail(_removed("pytest fixture", "dilabench_benchmark"), pytrace=False)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Accept `--dilabench-json FILE`, so that `pytest_configure` can say why it was removed."""
    parser.getgroup("dilabench").addoption(JSON_OPTION, help=argparse.SUPPRESS)


def pytest_configure(config: pytest.Config) -> None:
    """Refuse the removed option; raises UsageError (exit code 4)."""
    if config.getoption(JSON_OPTION):
        raise pytest.UsageError(_removed("pytest option", JSON_OPTION))


def _removed(kind: str, name: str) -> str:
    from dilabench.retired import removed

    return str(removed(kind, name))
