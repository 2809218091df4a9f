"""A third party's package, installed by pip, is found by a fresh process, and what it adds passes verification."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dilabench.cli import spread
from tests.plugins.fresh_process import Said, answers

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that pip installed the example plug-in into."""
    pytest.importorskip("hatchling", reason="needs [test]: hatchling is not installed")
    source = tmp_path_factory.mktemp("source") / "example_plugin"
    shutil.copytree(TESTS / "example_plugin", source, ignore=shutil.ignore_patterns("__pycache__"))
    target = tmp_path_factory.mktemp("site")
    options = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    install = [sys.executable, "-m", "pip", "install", *options, "--target", str(target), str(source)]
    subprocess.run(install, check=True, capture_output=True, text=True)
    return target


SHAPE = (
    *("--set", "seq_len=193", "--set", "num_heads=6", "--set", "head_dim=24"),
    *("--set", "segment_lengths=50,128", "--set", "dilation_rates=2,3"),
)
CHUNKED = ("--set", "pattern=chunked", "--set", "chunk=20", "--set", "chunks_before=2")
SHORT = ("--set", "seq_len=97", "--set", "num_heads=4", "--set", "num_kv_heads=2")
CHOSEN = ("-i", "masked", "-i", "dense", *CHUNKED, "--set", "batch_size=1", "--set", "num_heads=2", "--lengths", "256")
ASKED = {
    "list": ("list", "--json"),
    "forward": ("verify", "masked", "--device", "cpu", "--mode", "forward", *SHAPE),
    "both": ("verify", "masked", "--device", "cpu", "--mode", "both", *SHAPE),
    "describe": ("describe", "chunked"),
    "chunked": ("verify", "masked", "reference", "gather", *CHUNKED, "--device", "cpu", *SHORT),
    "plan": ("plan", *CHOSEN, "--device", "cpu", "--json"),
    "run": ("run", "implementations", *CHOSEN, "--device", "cpu", "--no-store", "-o", "results"),
}


@pytest.fixture(scope="module")
def said(site: Path) -> dict[str, Said]:
    """What each command answers in a fresh process that sees the installed plug-in; one process for all of them."""
    return answers(site, {name: spread(arguments) for name, arguments in ASKED.items()})


@pytest.mark.slow
def test_an_installed_plugin_is_listed(said: dict[str, Said]) -> None:
    done = said["list"]
    assert done.code == 0, done.stderr
    listing = json.loads(done.stdout)
    (masked,) = [entry for entry in listing["implementations"] if entry["name"] == "masked"]
    assert (masked["plugin"], masked["usable"]) == ("example", True)
    (example,) = [entry for entry in listing["plugins"] if entry["name"] == "example"]
    assert (example["distribution"], example["version"]) == ("dilabench-example", "1.0")
    (pattern,) = [entry for entry in listing["patterns"] if entry["plugin"] == "example"]
    assert (pattern["name"], pattern["usable"]) == ("chunked", True)
    assert listing["problems"] == []


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["forward", "both"])
def test_an_installed_plugin_passes_verification(said: dict[str, Said], mode: str) -> None:
    done = said[mode]
    assert done.code == 0, done.stdout + done.stderr
    assert "masked" in done.stdout


@pytest.mark.slow
def test_an_installed_pattern_is_described_and_drawn(said: dict[str, Said]) -> None:
    done = said["describe"]
    assert done.code == 0, done.stderr
    assert "--set chunk:       512" in done.stdout
    assert "computed by:       reference, flex, masked" in done.stdout
    assert done.stdout.count("█") > 100


@pytest.mark.slow
def test_an_installed_pattern_is_verified_and_never_taken_for_dense(said: dict[str, Said]) -> None:
    done = said["chunked"]
    assert done.stdout.count("✓") == 2, done.stdout + done.stderr
    assert "chunked is not supported (has dilated)" in " ".join(done.stdout.split())


@pytest.mark.slow
def test_an_installed_pattern_is_planned_run_and_reported(said: dict[str, Said], site: Path) -> None:
    planned, done = said["plan"], said["run"]
    assert planned.code == 0, planned.stderr
    rows = {(row["implementation"], row["mode"]): row for row in json.loads(planned.stdout)}
    # Beside q, k and v the bias of 2 x 256 x 256 float32, which stays between calls, and at least out.
    needed = rows["masked", "forward"]
    assert needed["predicted_peak_bytes"] >= needed["inputs_bytes"] * 4 // 3 + 2 * 256 * 256 * 4
    assert done.code == 0, done.stdout + done.stderr
    assert "chunked chunk=20 chunks_before=2" in done.stdout
    assert "yardstick: dense, another function of the same shape" in done.stdout
    (folder,) = (site / "results").iterdir()
    assert (folder / "plots" / "chunked_256.png").stat().st_size > 0
    record = json.loads((folder / "run.json").read_text())
    assert [row["outcome"]["status"] for row in record["rows"]] == ["measured", "measured"]
    pattern = record["rows"][0]["planned"]["case"]["workload"]["pattern"]
    assert pattern == {"kind": "chunked", "chunk": 20, "chunks_before": 2}
    assert "plots/chunked_256.png" in (folder / "report.md").read_text()


def test_a_new_pattern_is_one_short_file() -> None:
    lines = (TESTS / "example_plugin" / "dilabench_example" / "chunked.py").read_text().splitlines()
    assert len(lines) <= 80
