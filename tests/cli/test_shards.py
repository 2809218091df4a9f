"""`run --shard` and `merge`, and the script for SLURM that joins shards."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "examples" / "slurm_shards.sh"
ASKED = ("implementations", "-i", "gather,strided", "--lengths", "64,128,192", "--num-heads", "2", "--head-dim", "16")


def cases(cli, *more):
    result = cli("run", *ASKED, "--device", "cpu", "--dry-run", *more)
    assert result.exit_code == 0, result.stderr
    return [tuple(line.split()[1:5]) for line in result.stdout.splitlines() if line.strip()[:1].isdigit()][:-1]


def test_shards_part_the_cases_and_keep_workloads_whole(cli):
    whole, parts = cases(cli), [cases(cli, "--shard", f"{index}/2") for index in (1, 2)]
    assert [len(part) for part in parts] == [2, 4]
    assert parts[1] == [*parts[1][:2], *whole[4:]]
    assert sorted(parts[0] + parts[1]) == sorted(whole)
    assert not {case[2:] for case in parts[0]} & {case[2:] for case in parts[1]}


@pytest.mark.parametrize(
    ("suite", "shard", "why"),
    [
        ("implementations", "4/9", "the request has 3 workloads, so there can be at most as many shards"),
        ("implementations", "3/2", "shard 3/2 must be like 2/8"),
        ("implementations", "half", "shard 'half' must be like 2/8"),
        (
            "extreme",
            "1/2",
            "suite 'extreme' finds its next cases from its rows, so it has no shards",
        ),
    ],
)
def test_shards_that_cannot_be_are_refused(cli, suite, shard, why):
    result = cli("run", suite, *(ASKED[1:] if suite == ASKED[0] else ()), "--shard", shard, "--dry-run")
    assert result.exit_code == 2
    assert why in " ".join(result.stderr.split())


def test_merge_writes_one_record_and_names_what_it_refuses(cli, tmp_path, make_record, make_row):
    for name, length, config in (
        ("a", 32, {"shard": [1, 2]}),
        ("b", 64, {"shard": [2, 2]}),
        ("c", 32, {}),
    ):
        record = make_record([make_row(seq_len=length)], name, config=config)
        (tmp_path / f"{name}.json").write_text(record.model_dump_json())
    result = cli("merge", "a.json", "b.json", "-o", "joined")
    assert result.exit_code == 0, result.stderr
    (folder,) = (tmp_path / "joined").iterdir()
    assert str(folder.relative_to(tmp_path)) in result.stdout
    assert "2 rows of 2 runs (2 measured)" in result.stdout
    assert len(json.loads((folder / "run.json").read_text())["rows"]) == 2
    refused = cli("merge", "a.json", "c.json")
    assert refused.exit_code == 2
    assert "c.json is no shard" in refused.stderr
    (tmp_path / "a.json").write_text((tmp_path / "a.json").read_text()[:500])
    assert cli("merge", "a.json", "b.json").exit_code == 2


@pytest.mark.slow
def test_the_script_for_slurm_measures_the_shards_and_joins_them(tmp_path):
    """Each task of the array, then the job after it, as SLURM starts them."""
    (tmp_path / "dilabench").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m dilabench "$@"\n')
    (tmp_path / "dilabench").chmod(0o755)
    variables = {
        **os.environ,
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(SCRIPT.parents[2]), os.environ.get("PYTHONPATH")))),
        "SLURM_ARRAY_JOB_ID": "77",
        "SLURM_ARRAY_TASK_COUNT": "2",
        "DILABENCH_LOCK_DIR": str(tmp_path),
    }

    def started(task):
        asked = [*ASKED[:3], "--lengths", "64,128", *ASKED[5:], "--timing-runs", "4", "--device", "cpu", "--no-store"]
        command = ["bash", str(SCRIPT), *asked] if task else ["bash", str(SCRIPT.with_name("slurm_merge.sh")), "77"]
        one = {**variables, "SLURM_ARRAY_TASK_ID": str(task)}
        return subprocess.run(command, env=one, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)

    for task in (1, 2):
        done = started(task)
        assert done.returncode == 0, done.stdout + done.stderr
    done = started(0)
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = (tmp_path / "results" / "77-merged").iterdir()
    record = json.loads((folder / "run.json").read_text())
    assert [row["planned"]["case"]["workload"]["seq_len"] for row in record["rows"]] == [64, 64, 128, 128]
    assert "speed-up" in done.stdout, "it ends with the table"
    again = [
        str(tmp_path / "dilabench"),
        "check",
        "--against",
        str(folder),
        "--sessions",
        "1",
        "--only",
        "1x64",
        "--json",
    ]
    done = subprocess.run(again, env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    # One session of a shared machine may look slower; what it may not be is wrong, or another case.
    assert done.returncode in (0, 6), done.stdout + done.stderr
    assert len(json.loads(done.stdout)["cells"]) == 2
