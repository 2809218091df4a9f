"""`run --sessions`: so many runs, each with its own folder, ended by the gravest of them."""

import pytest

from dilabench.errors import ExitCode


@pytest.fixture
def runs(monkeypatch):
    """Lets each session end with the next of some exit codes; their folders come back."""
    ended, folders = [], []

    def run(execution, *_, **__):
        folders.append(execution.folder.path)
        return ended.pop(0)

    monkeypatch.setattr("dilabench.runs.execute.execute", run)
    return ended, folders


def test_each_session_is_a_run_of_its_own(cli, runs):
    ended, folders = runs
    ended += [ExitCode.OK, ExitCode.CASE_FAILED, ExitCode.OK]
    result = cli("run", "quick", "--sessions", "3", "--device", "cpu")
    assert result.exit_code == ExitCode.CASE_FAILED
    assert len(set(folders)) == 3
    assert f"dilabench baseline save NAME {' '.join(map(str, folders))}" in result.stdout


def test_ctrl_c_ends_them_all(cli, runs):
    ended, folders = runs
    ended += [ExitCode.OK, ExitCode.INTERRUPTED]
    assert cli("run", "quick", "--sessions", "5", "--device", "cpu").exit_code == ExitCode.INTERRUPTED
    assert len(folders) == 2


@pytest.mark.parametrize("options", [["--json"], ["--resume", "latest"], ["-o", "one.json"]])
def test_what_is_of_one_run_is_refused(cli, options):
    result = cli("run", "quick", "--sessions", "2", *options)
    assert result.exit_code == 2
    assert "--sessions 2" in result.stderr
