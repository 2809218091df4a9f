"""Every command that reads records knows the patterns of plug-ins, though it needs nothing else of them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dilabench.report import json as as_json

EXAMPLE = Path(__file__).parents[1] / "example_plugin" / "dilabench_example"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder that holds the example plug-in as pip installs it."""
    shutil.copytree(EXAMPLE, tmp_path / "site" / EXAMPLE.name)
    facts = tmp_path / "site" / "dilabench_example-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: dilabench-example\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[dilabench]\nexample = dilabench_example.plugin\n")
    return tmp_path / "site"


@pytest.mark.parametrize(
    "command", [("compare", "run.json", "again.json"), ("baseline", "save", "main", "run.json")], ids=" ".join
)
def test_a_record_of_a_pattern_of_a_plugin_is_read(site, tmp_path, make_row, make_record, command) -> None:
    for name, run_id in (("run", "aaaa"), ("again", "bbbb")):
        text = as_json.to_text(make_record([make_row("masked", pattern={"kind": "dense"})], run_id=run_id))
        (tmp_path / f"{name}.json").write_text(text.replace('"kind": "dense"', '"kind": "chunked", "chunk": 20'))
        assert "chunked" in (tmp_path / f"{name}.json").read_text()
    ended = subprocess.run(
        [sys.executable, "-m", "dilabench", *command],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site), "DILABENCH_STORE": str(tmp_path / "store")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
