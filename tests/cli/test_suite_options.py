"""The options of a suite on the command line: those of a plug-in's suite as those of ours."""

import json
import sys

import pytest

from dilabench.plugins import Suite

THEIRS = """
import json
from dilabench.errors import ConfigError
from dilabench.plugins import Suite, hookimpl
from pydantic import BaseModel, Field

class Pace(BaseModel):
    speed: int = Field(1, ge=1, le=9, description="How fast, 1 to 9.")
    loud: bool = Field(True, description="With noise.")
    steps: tuple[int, ...] = Field((), description="Where to go.")
    seed: int = Field(5, description="Hidden by the option that every suite has.")
    memory_limit: str | None = Field(None, description="Of their own kind.")

def expand(request, planner):
    raise ConfigError("their suite got " + json.dumps(request.options))

@hookimpl
def dilabench_register_suites():
    return [Suite("their-suite", "", f"{__name__}:expand", options=Pace)]
"""


@pytest.fixture
def theirs(tmp_path, monkeypatch):
    """An installed package with a suite that says which options it got."""
    (tmp_path / "suite_of_theirs.py").write_text(THEIRS)
    info = tmp_path / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[dilabench]\ntheirs = suite_of_theirs\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "suite_of_theirs", raising=False)
    monkeypatch.delenv("DILABENCH_DISABLE_PLUGINS")


def section(text, title):
    """The lines of one section of a help text, spaces folded."""
    return [" ".join(line.split()) for line in text.partition(f"{title}:\n")[2].partition("\n\n")[0].splitlines()]


@pytest.mark.usefixtures("theirs")
@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ("", {}),
        ("--speed 3 --no-loud --steps 2 --steps 4", {"speed": 3, "loud": False, "steps": [2, 4]}),
        ("--set speed=3 --set seed=7 --seed 2", {"speed": 3, "seed": 7}),
        ("--memory-limit little --loud", {"memory_limit": "little", "loud": True}),
    ],
)
def test_their_suite_gets_the_options_of_the_command_line(cli, arguments, options):
    result = cli("run", "their-suite", *arguments.split(), "--device", "cpu", "--dry-run")
    text = result.stderr.partition("their suite got ")[2]
    assert json.loads(text) == options, result.output


@pytest.mark.usefixtures("theirs")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("their-suite --speed 10", "speed '10' should be less than or equal to 9"),
        ("their-suite --speed fast", "speed 'fast' should be a valid integer"),
        ("their-suite --tokens 5", "suite billion has it"),
        ("quick --speed 3", "suite their-suite has it: `dilabench run their-suite`, or leave it out"),
        ("their-suite --sped 3", "No such option: --sped"),
    ],
)
def test_wrong_options_are_refused(cli, arguments, message):
    result = cli("run", *arguments.split(), "--dry-run")
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


@pytest.mark.usefixtures("theirs")
def test_help_shows_the_options_of_the_suite_that_is_named(cli):
    theirs = cli("run", "their-suite", "--help").stdout
    assert section(theirs, "Options of their-suite") == [
        "--speed N How fast, 1 to 9.",
        "--loud / --no-loud With noise.",
        "--steps VALUE Where to go.",
    ]
    assert section(theirs, "Options of their-suite and extreme and billion") == [
        "--memory-limit VALUE Of their own kind."
    ]
    assert "--tokens" not in theirs
    ours = cli("run", "billion", "--help").stdout
    assert section(ours, "Options of billion") == ["--tokens N Tokens of the sequence (default 2^30 = 1G)."]
    assert "--chunked" not in ours
    every = cli("run", "--help").stdout
    assert section(every, "Options of ring and distributed")
    assert "--speed" not in every


def test_names_alone_are_options_of_any_value():
    suite = Suite("mine", "", "package.module:expand", options=("speed", "loud"))
    assert suite.options(speed="fast").model_dump(exclude_unset=True) == {"speed": "fast"}
    assert list(suite.options.model_fields) == ["speed", "loud"]


@pytest.mark.usefixtures("theirs")
@pytest.mark.parametrize(("words", "found"), [("run extreme --ch", "--chunked"), ("run their-suite --sp", "--speed")])
def test_a_shell_completes_the_options_of_suites(cli, monkeypatch, words, found):
    monkeypatch.setenv("COMP_WORDS", f"dilabench {words}")
    monkeypatch.setenv("COMP_CWORD", str(len(words.split())))
    monkeypatch.setenv("_DILABENCH_COMPLETE", "complete_bash")
    assert cli().stdout.split() == [found]
