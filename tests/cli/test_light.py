"""What never costs the import of torch."""

import pytest

from tests.conftest import slow

PROBE = """
import sys
from dilabench.cli import main
try:
    main({argv})
except SystemExit as end:
    assert not end.code, end.code
loaded = {{name.partition(".")[0] for name in sys.modules}}
print("LOADED", sorted(loaded & set({heavy})), file=sys.stderr)
"""


TORCH = ["torch", "triton", "flash_attn", "flash_attn_interface", "xformers", "matplotlib"]
# Besides numpy, which every pattern's class loads, and with it whatever lists names.
NUMERIC = ["scipy", "psutil"]


@pytest.mark.parametrize(
    ("argv", "heavy"),
    [
        (["--help"], [*TORCH, *NUMERIC, "numpy", "rich"]),
        slow(["--version"], TORCH),
        *(([command, "--help"], [*TORCH, *NUMERIC, "numpy"]) for command in ("run", "compare")),
        slow(["verify", "--help"], [*TORCH, *NUMERIC, "numpy"]),
        (["list"], [*TORCH, *NUMERIC]),
        slow(["list", "--why", "--json"], TORCH),
        (["describe", "medium"], [*TORCH, *NUMERIC]),
        (["run", "quick", "--dry-run"], TORCH),
    ],
    ids=lambda words: " ".join(words[:3]),
)
def test_what_is_heavy_is_not_imported(fresh, argv, heavy):
    result = fresh("-c", PROBE.format(argv=argv, heavy=heavy))
    assert result.returncode == 0, result.stderr
    assert "LOADED []" in result.stderr


def test_python_m(fresh):
    result = fresh("-m", "dilabench", "--version")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("dilabench 0.")


def test_no_colours_in_a_pipe(fresh):
    result = fresh("-m", "dilabench", "list", "suites", FORCE_COLOR="")
    assert "quick" in result.stdout
    assert "\x1b" not in result.stdout


CLOSED_PIPE = """
import subprocess, sys
command = [sys.executable, "-m", "dilabench", *sys.argv[1:]]
process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
process.stdout.close()
print(process.stderr.read(), process.wait())
"""


def test_a_closed_pipe_is_no_error(fresh):
    assert fresh("-c", CLOSED_PIPE, "list").stdout.strip() == "b'' 0"


def test_a_regression_is_one_though_nobody_reads_of_it(fresh, tmp_path, make_row, make_record):
    for name, peak in (("base", 2**24), ("new", 2**25)):
        (tmp_path / f"{name}.json").write_text(make_record([make_row(peak=peak)], run_id=name).model_dump_json())
    assert fresh("-c", CLOSED_PIPE, "compare", "base.json", "new.json").stdout.strip() == "b'' 6"
