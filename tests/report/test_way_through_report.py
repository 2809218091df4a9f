"""`dilabench report RUN` passes few files of ours, so that the way from a record to its report can be read."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dilabench.report import json as as_json
from dilabench.store.run_files import read_record
from tests.conftest import slow, stored_record

# The goal is 40 files.
MOST_FILES = 50

WATCHED = """
import os, sys
import dilabench
from dilabench.cli import main

home, files = os.path.dirname(dilabench.__file__) + os.sep, set()

def watch(frame, event, argument):
    # Code of functions, and of no module or class body.
    if event == "call" and frame.f_code.co_flags & 1 and frame.f_code.co_filename.startswith(home):
        files.add(frame.f_code.co_filename.removeprefix(home))

sys.setprofile(watch)
try:
    main(sys.argv[1:])
finally:
    sys.setprofile(None)
    print("\\n".join(sorted(files)), file=sys.stderr)
"""


@pytest.mark.parametrize("record", ["cpu-flash", slow("cpu-half")])
def test_a_report_passes_few_files(record: str, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(as_json.to_text(read_record(stored_record(record))))
    assert json.loads(path.read_text())["rows"]
    ended = subprocess.run(
        [sys.executable, "-c", WATCHED, "report", str(path)], capture_output=True, text=True, check=False
    )
    assert "time: the median of all samples" in ended.stdout, ended.stderr
    files = [line for line in ended.stderr.splitlines() if line.endswith(".py")]
    assert len(files) <= MOST_FILES, "\n".join(files)
