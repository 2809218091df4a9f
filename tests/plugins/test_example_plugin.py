"""A third party's package, installed by pip, is found by a fresh process, and what it adds passes verification."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
REPOSITORY = TESTS.parent


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that pip installed the example plug-in into."""
    pytest.importorskip("hatchling", reason="hatchling is part of the test extra")
    source = tmp_path_factory.mktemp("source") / "example_plugin"
    shutil.copytree(TESTS / "example_plugin", source, ignore=shutil.ignore_patterns("__pycache__"))
    target = tmp_path_factory.mktemp("site")
    options = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    install = [sys.executable, "-m", "pip", "install", *options, "--target", str(target), str(source)]
    subprocess.run(install, check=True, capture_output=True, text=True)
    return target


def dilabench(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command line in a fresh process that sees the installed plug-in."""
    paths = [str(site), str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    environment.pop("DILABENCH_DISABLE_PLUGINS", None)
    command = [sys.executable, "-m", "dilabench", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.slow
def test_an_installed_plugin_is_listed(site: Path) -> None:
    done = dilabench(site, "list", "--json")
    assert done.returncode == 0, done.stderr
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
def test_an_installed_plugin_passes_verification(site: Path, mode: str) -> None:
    assignments = ("seq_len=193", "num_heads=6", "head_dim=24", "segment_lengths=50,128", "dilation_rates=2,3")
    settings = [word for assignment in assignments for word in ("--set", assignment)]
    done = dilabench(site, "verify", "masked", "--device", "cpu", "--mode", mode, *settings)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "masked" in done.stdout


CHUNKED = ("--set", "pattern=chunked", "--set", "chunk=20", "--set", "chunks_before=2")


@pytest.mark.slow
def test_an_installed_pattern_is_described_and_drawn(site: Path) -> None:
    done = dilabench(site, "describe", "chunked")
    assert done.returncode == 0, done.stderr
    assert "--set chunk:       512" in done.stdout
    assert "computed by:       reference, flex, masked" in done.stdout
    assert done.stdout.count("█") > 100


@pytest.mark.slow
def test_an_installed_pattern_is_verified_and_never_taken_for_dense(site: Path) -> None:
    shape = ("--device", "cpu", "--set", "seq_len=97", "--set", "num_heads=4", "--set", "num_kv_heads=2")
    done = dilabench(site, "verify", "masked", "reference", "gather", *CHUNKED, *shape)
    assert done.stdout.count("✓") == 2, done.stdout + done.stderr
    assert "chunked is not supported (has dilated)" in " ".join(done.stdout.split())


@pytest.mark.slow
def test_an_installed_pattern_is_planned_run_and_reported(site: Path, tmp_path: Path) -> None:
    chosen = ("-i", "masked", "-i", "dense", *CHUNKED, "--set", "batch_size=1", "--set", "num_heads=2")
    planned = dilabench(site, "plan", *chosen, "--lengths", "256", "--device", "cpu", "--json")
    assert planned.returncode == 0, planned.stderr
    rows = {(row["implementation"], row["mode"]): row for row in json.loads(planned.stdout)}
    # Beside q, k and v the bias of 2 x 256 x 256 float32, which stays between calls, and at least out.
    needed = rows["masked", "forward"]
    assert needed["predicted_peak_bytes"] >= needed["inputs_bytes"] * 4 // 3 + 2 * 256 * 256 * 4
    where = ("--device", "cpu", "--no-store", "-o", str(tmp_path))
    done = dilabench(site, "run", "implementations", *chosen, "--lengths", "256", *where)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "chunked chunk=20 chunks_before=2" in done.stdout
    assert "yardstick: dense, another function of the same shape" in done.stdout
    (folder,) = tmp_path.iterdir()
    assert (folder / "plots" / "chunked_256.png").stat().st_size > 0
    record = json.loads((folder / "run.json").read_text())
    assert [row["outcome"]["status"] for row in record["rows"]] == ["measured", "measured"]
    pattern = record["rows"][0]["planned"]["case"]["workload"]["pattern"]
    assert pattern == {"kind": "chunked", "chunk": 20, "chunks_before": 2}
    assert "plots/chunked_256.png" in (folder / "report.md").read_text()


def test_a_new_pattern_is_one_short_file() -> None:
    lines = (TESTS / "example_plugin" / "dilabench_example" / "chunked.py").read_text().splitlines()
    assert len(lines) <= 80
