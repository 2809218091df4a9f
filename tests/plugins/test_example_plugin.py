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
    assert listing["problems"] == []


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["forward", "both"])
def test_an_installed_plugin_passes_verification(site: Path, mode: str) -> None:
    assignments = ("seq_len=193", "num_heads=6", "head_dim=24", "segment_lengths=50,128", "dilation_rates=2,3")
    settings = [word for assignment in assignments for word in ("--set", assignment)]
    done = dilabench(site, "verify", "masked", "--device", "cpu", "--mode", mode, *settings)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "masked" in done.stdout
