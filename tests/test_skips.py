"""Which skips count as such: the rules of tests/conftest.py, tried in a pytest of its own."""

import re
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

RULES = "pytest_collection_modifyitems, pytest_make_collect_report, pytest_runtest_makereport"
MARKED = "import pytest\n@pytest.mark.needs_extra({})\ndef test_it(): {}\n"
CASES = {
    "passes": ("def test_it(): pass", "passed"),
    "machine": ('import pytest\ndef test_it(): pytest.skip("needs two CUDA devices")', "skipped"),
    "a_module_of_the_test_extra": (
        'import pytest\npytest.importorskip("none", reason="needs [test]: none")',
        "skipped",
    ),
    "no_reason": ("import pytest\n@pytest.mark.skip\ndef test_it(): pass", "failed"),
    "reason_without_a_name": ('import pytest\ndef test_it(): pytest.skip("not today")', "failed"),
    "missing_module": ('import pytest\npytest.importorskip("no_such_module")', "failed"),
    "extra_without_the_mark": ('import pytest\ndef test_it(): pytest.skip("needs [data]: pandas")', "failed"),
    "absent": (MARKED.format("'lacking'", "pass"), "skipped"),
    "absent_through_another_extra": (MARKED.format("'all'", "pass"), "skipped"),
    "too_old": (MARKED.format("'newer'", "pass"), "skipped"),
    "present": (MARKED.format("'lacking', 'pytest'", "assert False"), "failed"),
    "other_system": (MARKED.format("'elsewhere'", "pass"), "passed"),
    "skipped_for_something_else": (MARKED.format("'elsewhere'", "pytest.skip('not today')"), "failed"),
}
PROJECT = """
[project]
name = "example"
[project.optional-dependencies]
lacking = ["pytest", "no-such-distribution>=1"]
newer = ["pytest>=1000"]
all = ["example[lacking]"]
elsewhere = ["no-such-distribution; sys_platform == 'none'"]
"""


@pytest.fixture
def outcomes(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    (pytester.path / "pyproject.toml").write_text(PROJECT)
    conftest = f"import tests.conftest\nfrom tests.conftest import {RULES}\n"
    pytester.makeconftest(conftest + "tests.conftest.PYPROJECT = tests.conftest.Path('pyproject.toml')\n")
    pytester.makeini("[pytest]\nmarkers = needs_extra")
    pytester.makepyfile(**{f"test_{name}": text for name, (text, _) in CASES.items()})
    result = pytester.runpytest_subprocess(
        "-p", "no:xdist", "--continue-on-collection-errors", "--junit-xml=report.xml"
    )
    report = (pytester.path / "report.xml").read_text()
    cases = re.findall(r'<testcase classname="(?:test_(\w+))?" name="(?:test_)?(\w+)"[^>]*?(?:/>|><(\w+))', report)
    assert len(cases) == len(CASES), result.stdout.str()
    words = {"": "passed", "error": "failed", "failure": "failed"}
    return {file or name: words.get(word, word) for file, name, word in cases}


def test_a_skip_without_the_name_of_what_is_missing_fails(outcomes: dict[str, str]) -> None:
    assert outcomes == {name: outcome for name, (_, outcome) in CASES.items()}
