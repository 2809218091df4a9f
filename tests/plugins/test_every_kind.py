"""A package with a thing of every kind, installed by pip: in fresh processes its things are treated as ours are."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that pip installed the package into."""
    pytest.importorskip("hatchling", reason="needs [test]: hatchling is not installed")
    source = tmp_path_factory.mktemp("source") / "every_kind_plugin"
    shutil.copytree(TESTS / "every_kind_plugin", source, ignore=shutil.ignore_patterns("__pycache__"))
    target = tmp_path_factory.mktemp("site")
    options = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    install = [sys.executable, "-m", "pip", "install", *options, "--target", str(target), str(source)]
    subprocess.run(install, check=True, capture_output=True, text=True)
    return target


def dilabench(site: Path, *arguments: str) -> str:
    """What the command line prints in a fresh process that sees the package; it must succeed."""
    paths = [str(site), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    environment.pop("DILABENCH_DISABLE_PLUGINS", None)
    command = [sys.executable, "-m", "dilabench", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_all_of_it_is_listed(site: Path) -> None:
    listing = json.loads(dilabench(site, "list", "--json"))
    theirs = {
        kind: [one["name"] for one in entries if one.get("plugin") == "every-kind"] for kind, entries in listing.items()
    }
    assert theirs | {"plugins": [], "problems": []} == {
        "patterns": ["stripes"],
        "implementations": ["stripes-plain", "their-ring"],
        "backends": ["their-kernel"],
        "workloads": ["striped"],
        "suites": ["their-suite"],
        "reporters": ["their-report"],
        "timers": ["their-timer"],
        "plugins": [],
        "problems": [],
    }
    assert listing["problems"] == []


def test_their_suite_runs_by_their_timer_over_their_backend_into_their_report(site: Path, tmp_path: Path) -> None:
    where = ("--device", "cpu", "--no-store", "-o", str(tmp_path))
    text = dilabench(site, "run", "their-suite", "--timing", "their-timer", "-f", "their-report", "-f", "table", *where)
    assert "THEIRS stripes-plain their-kernel measured" in text, "auto takes what has the highest priority"
    assert "THEIRS dense their-kernel measured" in text
    assert "2 rows were measured." in text
    assert "yardstick: dense, another function of the same shape" in text
    (folder,) = tmp_path.iterdir()
    rows = json.loads((folder / "run.json").read_text())["rows"]
    assert [row["planned"]["role"] for row in rows] == ["plain", "yardstick"]
    assert {row["outcome"]["timings"][0]["timer"] for row in rows} == {"their-timer"}


def test_their_preset_and_auto_choose_their_implementation(site: Path) -> None:
    text = dilabench(
        site, "run", "implementations", "--config", "striped", "-i", "auto", "--dry-run", "--device", "cpu"
    )
    assert "stripes-plain" in text
    assert "their-kernel*" in text


def test_their_ring_has_balance_and_bytes(site: Path, tmp_path: Path) -> None:
    small = ("--set", "pattern=dense", "--set", "seq_len=128", "--set", "num_heads=2", "--mode", "forward")
    where = ("--device", "cpu", "--no-store", "-o", str(tmp_path), "-b", "math", "--budget", "60s")
    text = " ".join(dilabench(site, "run", "ring", "--nproc", "2", "-i", "their-ring", *small, *where).split())
    assert "1.000" in text, "λ of the sharding that it names"
    assert text.count("64.0 KiB") >= 2, "received bytes by formula, and counted"
