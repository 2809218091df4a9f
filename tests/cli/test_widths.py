"""The commands at 80 and 120 columns: snapshots where the machine does not matter, and no word is cut in two."""

from pathlib import Path

import pytest

from dilabench.store.archive import Archive
from dilabench.store.run_files import read_record

FOLDER = Path(__file__).parents[1] / "golden"
GOLDEN = str(FOLDER / "run_record.v1.json")
COMMANDS = {
    "list": ("list",),
    "list with limits": ("list", "implementations", "--why"),
    "dry run": ("run", "quick", "--dry-run"),
    "report": ("report", GOLDEN, "--details", "--columns", "median,verified"),
    "compare rows": ("compare", GOLDEN, "--by", "implementation", "--only", "dense"),
    "describe": ("describe", "block-sparse"),
}
NAME = Path(GOLDEN).name
# What does not depend on the machine, in the folder of the golden record.
SNAPSHOTS = (
    ("list", "suites"),
    ("run", "optimization", "-i", "gather,fused", "--lengths", "1K", "--device", "cpu", "--dry-run"),
    ("compare", NAME, NAME),
    ("compare", NAME, "--by", "implementation"),
    ("check", "--against", NAME, "--run", NAME),
    ("history",),
    ("history", "strided", "4K"),
)


def words(text: str) -> set[str]:
    # Rules of tables are as wide as their columns.
    return {word for word in text.split() if not set(word) <= set("─━-")}


@pytest.mark.parametrize("arguments", COMMANDS.values(), ids=list(COMMANDS))
@pytest.mark.parametrize("width", [80, 120])
def test_no_word_is_cut(cli, monkeypatch, arguments, width):
    monkeypatch.setenv("TERMINAL_WIDTH", "1000")
    whole = words(cli(*arguments).stdout)
    monkeypatch.setenv("TERMINAL_WIDTH", str(width))
    narrow = cli(*arguments).stdout
    assert whole <= words(narrow)


def test_the_help_says_each_command_in_full(cli, monkeypatch):
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    printed = cli("--help").stdout
    assert "..." not in printed.partition("Commands:")[2]
    assert "Predict what fits into memory, without running it." in printed


def test_a_bare_command_shows_the_help_and_is_fine(cli):
    bare = cli()
    assert (bare.exit_code, bare.stdout) == (0, cli("--help").stdout)


def test_configs_are_listed_without_a_suite(cli):
    listed = cli("run", "--list-configs")
    assert listed.exit_code == 0
    assert listed.stdout == cli("list", "workloads").stdout


@pytest.mark.usefixtures("with_a_compiler")
@pytest.mark.parametrize("width", [80, 120])
def test_snapshots(cli, monkeypatch, tmp_path, width):
    monkeypatch.setenv("TERMINAL_WIDTH", str(width))
    monkeypatch.setenv("DILABENCH_STORE", str(tmp_path / "store"))
    monkeypatch.chdir(FOLDER)
    Archive().add(read_record(Path(GOLDEN)))
    shown = []
    for arguments in SNAPSHOTS:
        done = cli(*arguments)
        shown.append(f"$ dilabench {' '.join(arguments)}\n{done.stdout}[exit code {done.exit_code}]\n")
    text = "\n".join(shown)
    assert max(map(len, text.splitlines())) <= width
    new, golden = tmp_path / "shown.txt", FOLDER / f"commands_{width}.txt"
    new.write_text(text)
    assert text == golden.read_text(), f"where the change is meant: cp {new} {golden}"
