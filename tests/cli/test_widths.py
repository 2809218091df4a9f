"""The main commands at 80 and 120 columns: no line is wider, and no word of the full answer is cut in two."""

from pathlib import Path

import pytest

GOLDEN = str(Path(__file__).parents[1] / "golden" / "run_record.v1.json")
COMMANDS = {
    "list": ("list",),
    "list with limits": ("list", "implementations", "--why"),
    "dry run": ("run", "quick", "--dry-run"),
    "report": ("report", GOLDEN, "--details", "--columns", "median,verified"),
    "compare rows": ("compare", GOLDEN, "--by", "implementation"),
}


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
    assert "What fits into memory; nothing is run." in printed


def test_a_bare_command_shows_the_help_and_is_fine(cli):
    bare = cli()
    assert (bare.exit_code, bare.stdout) == (0, cli("--help").stdout)


def test_configs_are_listed_without_a_suite(cli):
    listed = cli("run", "--list-configs")
    assert listed.exit_code == 0
    assert listed.stdout == cli("list", "workloads").stdout
