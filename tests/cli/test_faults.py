"""Files, numbers, streams and signals that are not as they should be: a sentence and an exit code, and nothing lost."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

import dilabench
from dilabench.cli import SAVING
from dilabench.cli.terminal import print_table
from dilabench.engine.device.lock import device_lock
from dilabench.engine.progress import Progress
from dilabench.engine.temporary_folder import PREFIX, remove_left_over, temporary_folder
from dilabench.errors import ConfigError, EnvironmentNotReady
from dilabench.machine import Machine, detect
from dilabench.patterns.mask_files import mask_digest, named_file, read_mask_file
from dilabench.plugins.manager import discover
from dilabench.record import SCHEMA_VERSION
from dilabench.request import RunRequest
from dilabench.runs.execution import Reports, new_header
from dilabench.store.archive import Archive
from dilabench.store.baselines import Baselines
from dilabench.store.run_files import RunFolder, read_record
from dilabench.units import printable
from tests.conftest import slow

pytestmark = pytest.mark.faults

MANY = "9" * 5000
DEEP = "[" * 5000 + "]" * 5000


def refused(result, code=2):
    assert result.exit_code == code, result.output
    assert "internal error" not in result.stderr
    assert "Traceback" not in result.output
    return " ".join(result.stderr.split())


# Absurd values.


@pytest.mark.parametrize(
    "arguments",
    [
        ("--seq-length", MANY),
        ("--set", f"seq_len={MANY}"),
        ("--set", f"seq_len=0x{'f' * 5000}"),
        ("--set", f"window={MANY},0"),
        ("--set", f"window={10**30},0"),
        ("--set", f"scale={MANY}"),
        ("--set", f"seq_len={DEEP}"),
        ("--set", f"segment_lengths={DEEP}"),
        ("--lengths", f"{'9' * 400}.5K"),
        ("--budget", "9" * 400 + "s"),
        ("--seed", str(2**64)),
        ("--nproc", MANY),
    ],
    ids=lambda arguments: " ".join(arguments)[:24],
)
def test_an_absurd_value_is_refused(cli, arguments):
    text = refused(cli("run", "quick", "--dry-run", *arguments))
    assert len(text) < 6000


@pytest.mark.parametrize(
    "content", [f"[workload]\nseq_len = {MANY}\n", f"[workload]\nseq_len = {DEEP}\n", "[run]\nbudget_s = inf\n"]
)
def test_an_absurd_file_is_refused(cli, tmp_path, content):
    file = tmp_path / "absurd.toml"
    file.write_text(content)
    assert "absurd.toml" in refused(cli("run", "quick", "--dry-run", "--config", str(file)))


@pytest.mark.parametrize("content", ["tool = 3", "tool = []", "[tool]\ndilabench = 3", "[tool]\ndilabench = []"])
def test_a_project_file_with_another_kind_of_table(cli, content):
    Path("pyproject.toml").write_text(content)
    if "dilabench" in content:
        assert "is no table" in refused(cli("list", "suites"))
    else:
        assert cli("list", "suites").exit_code == 0


def test_a_value_of_a_file_of_defaults_moves_no_cursor(cli):
    for option in ("device", "budget", "timing", "dtype", "implementations"):
        Path("dilabench.toml").write_text(f'[run]\n{option} = "\\u001b[2J\\u202e\\u200f"\n')
        result = cli("run", "quick", "--dry-run")
        assert result.exit_code == 2
        assert not [letter for letter in result.output if letter != printable(letter)], option


# A pipe that is opened hangs.
@pytest.mark.parametrize("kind", ["fifo", slow("link"), slow("settings")])
def test_settings_of_matplotlib_in_the_working_folder_are_not_read(fresh, tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    if kind == "fifo":
        os.mkfifo("matplotlibrc")
    elif kind == "link":
        Path("matplotlibrc").symlink_to("/dev/zero")
    else:
        Path("matplotlibrc").write_text("figure.dpi: 1\n")
    code = "import os, dilabench.report.plots.drawing, matplotlib as m; print(m.rcParams['figure.dpi'], os.getcwd())"
    done = fresh("-c", code)
    assert done.stdout.split() == ["100.0", str(tmp_path)], done.stderr


@pytest.mark.parametrize("width", ["²", "0", "1e12", MANY])
def test_an_absurd_width_is_refused(cli, monkeypatch, width):
    monkeypatch.setenv("TERMINAL_WIDTH", width)
    assert "TERMINAL_WIDTH" in refused(cli("list", "suites"))


@pytest.mark.parametrize("visible", ["²", "٣", MANY, "-1", "0x1"])
def test_absurd_visible_devices_hide_all_as_for_cuda(cli, monkeypatch, visible):
    from dilabench.record import GpuInfo

    monkeypatch.setattr("dilabench.machine._nvml_gpus", lambda: (GpuInfo(name="H200", compute_capability="9.0"),))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert detect().device == "cpu"
    text = refused(cli("run", "quick", "--device", "cuda"), code=3)
    assert f"CUDA_VISIBLE_DEVICES='{visible[:20]}" in text


@pytest.mark.parametrize(("name", "value"), [("MASTER_PORT", "99999"), ("MASTER_PORT", "²"), ("LOCAL_RANK", "-1")])
def test_an_absurd_launch_is_refused(cli, monkeypatch, name, value):
    launch = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    for variable, usual in {**launch, name: value}.items():
        monkeypatch.setenv(variable, usual)
    text = refused(cli("run", "quick"), code=3)
    assert name in text
    assert value in text


# Mask files.


def npy(path, shape):
    import numpy as np

    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "|b1", "fortran_order": False, "shape": shape})
        file.write(bytes(16))


def several(path):
    import numpy as np

    with path.open("wb") as file:
        np.savez(file, a=np.ones((4, 4), bool))


NONSENSE = b"\x93NUMPY\x01\x00\xff\xff{" + b"[" * 70000
MASKS = {
    "npz": ("mask.npy", several, "holds several arrays"),
    "header of a petabyte": ("mask.npy", lambda path: npy(path, (2**25, 2**25)), "not a valid .npy file"),
    "header of nonsense": ("mask.npy", lambda path: path.write_bytes(NONSENSE), "not"),
    "deep": ("mask.json", lambda path: path.write_text(DEEP), "not a valid .json file: RecursionError"),
    "many digits": ("mask.json", lambda path: path.write_text(f"[[{MANY}]]"), "not a valid .json file"),
    "mixed": ("mask.json", lambda path: path.write_text("[[[0]], 3]"), "some heads are lists of rows"),
    "empty": ("mask.npy", lambda path: path.write_bytes(b""), "not a valid .npy file"),
}


@pytest.mark.parametrize("case", MASKS)
def test_a_file_that_is_no_mask_is_refused(tmp_path, case):
    name, write, reason = MASKS[case]
    write(tmp_path / name)
    with pytest.raises(ConfigError, match=reason):
        read_mask_file(tmp_path / name, 4)


@pytest.mark.parametrize("case", MASKS)
def test_what_comes_by_a_pipe_and_is_no_mask_is_refused_for_the_same_reason(tmp_path, monkeypatch, case):
    # Pipes of one number, in one process.
    monkeypatch.setattr("dilabench.patterns.mask_files._kept", {})
    monkeypatch.setenv("DILABENCH_CACHE", str(tmp_path))
    name, write, reason = MASKS[case]
    write(tmp_path / name)
    with subprocess.Popen(["cat", tmp_path / name], stdout=subprocess.PIPE) as sender:
        kept, _ = named_file(f"/dev/fd/{sender.stdout.fileno()}")
    # Nothing is of no kind.
    with pytest.raises(ConfigError, match="not a valid .json file" if case == "empty" else reason):
        read_mask_file(Path(kept), 4)


def test_a_pipe_is_no_mask_and_not_waited_for(cli, tmp_path):
    os.mkfifo(tmp_path / "mask.npy")
    with pytest.raises(ConfigError, match="it is no plain file"):
        mask_digest(tmp_path / "mask.npy")


# Locks.


def test_a_pipe_is_no_lock_and_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setenv("DILABENCH_LOCK_DIR", str(tmp_path))
    os.mkfifo(tmp_path / "dilabench-cpu.lock")
    with (
        pytest.raises(EnvironmentNotReady, match="it is no plain file"),
        device_lock(Machine(device="cpu"), "run", Progress()),
    ):
        pass
    os.mkfifo(tmp_path / ".baselines.toml.lock")
    with pytest.raises(EnvironmentNotReady, match="it is no plain file"):
        Baselines(tmp_path).save("main", ["a"], "now")


# The store.


def damage(folder: Path, record: dict[str, object]) -> None:
    """One file of every kind that is no run, all of them newer than what is."""
    deep = json.dumps(record).replace('"config": {', f'"config": {{"deep": {DEEP}, ')
    huge = json.dumps(record).replace('"seed": 0', f'"seed": {MANY}')
    for index, text in enumerate(("", "{}", DEEP, f"[{MANY}]", deep, huge)):
        (folder / f"2021010{index}T000000Z-bad{index}.json.gz").write_bytes(gzip.compress(text.encode()))
    (folder / "20210107T000000Z-cut.json.gz").write_bytes(b"\x1f\x8b")
    (folder / "20210108T000000Z-folder.json.gz").mkdir()
    os.mkfifo(folder / "20210109T000000Z-pipe.json.gz")
    for name in ("²0990101.json.gz", "bad+².json.gz", f"bad+{'9' * 200}.json.gz", "a\nb.json.gz", "\x1b[2J.json.gz"):
        (folder / name).write_bytes(b"")
    (folder / os.fsdecode(b"9\xff\xfe.json.gz")).write_bytes(b"")


@pytest.fixture
def archive(make_row, make_record):
    archive = Archive()
    record = make_record([make_row()], run_id="good", started_at="2020-01-02T03:04:05+00:00")
    archive.add(record)
    damage(archive.folder, record.model_dump(mode="json"))
    return archive


@pytest.mark.usefixtures("archive")
def test_damaged_and_odd_files_of_the_store_hide_no_run(cli):
    listed = cli("history", "--json")
    assert [run["run_id"] for run in json.loads(listed.stdout)] == ["good"], listed.stderr
    latest = cli("report", "latest", "-f", "json")
    assert json.loads(latest.stdout)["run_id"] == "good"
    assert "'latest' skips it" in latest.stderr
    assert cli("baseline", "save", "main", "good").exit_code == 0
    assert cli("compare", "main", "latest").exit_code == 0
    Path("benchmark_results/store/baselines.toml").write_text("[main")
    assert cli("report", "latest").exit_code == 0
    assert cli("report", "good").exit_code == 0
    assert "cannot be understood" in refused(cli("report", "main"))


OF_THIS_VERSION = f'{{"schema_version": "{SCHEMA_VERSION}", "run_id": "r", "rows": %s}}'


@pytest.mark.parametrize(
    "rows", ["0.1", "true", "1e999", "null", '"rows"', "{}", "[[]]", "[null]", "[0]", '{"planned": 1}']
)
def test_rows_of_another_kind_are_refused(cli, tmp_path, rows):
    (tmp_path / "run.json").write_text(OF_THIS_VERSION % rows)
    for command in (
        ("report", "."),
        ("compare", ".", "."),
        ("report", ".", "./run.json"),
        ("baseline", "save", "b", "."),
    ):
        refused(cli(*command))


@pytest.mark.parametrize("half", ["\\ud800", "\\udcff", slow("a\\udbffb")])
def test_half_a_surrogate_pair_is_spelt_out_wherever_a_record_goes(cli, make_row, make_record, half):
    document = make_record([make_row()], run_id="half", suite="HALF", argv=("HALF",)).model_dump_json()
    Path("run.json").write_text(document.replace("HALF", half))
    for command in (
        ("report", "run.json"),
        *(
            ("report", "run.json", "-f", form)
            for form in ("markdown", "csv", "json", "html", "bencher", "pull-request")
        ),
        ("compare", "run.json", "run.json", "-f", "markdown"),
        ("baseline", "save", "half", "run.json"),
        ("report", "half"),
        ("history",),
    ):
        result = cli(*command)
        assert result.exit_code == 0, (command, result.output)
        result.output.encode()


def test_a_command_line_may_hold_bytes_that_are_no_text():
    catalogue = discover()
    header = new_header(catalogue, Machine(device="cpu"), RunRequest(suite="quick"), argv=("run", "-o", "a\udcff"))
    header.model_dump_json()


@pytest.mark.parametrize("text", [DEEP, f'{{"rows": [{MANY}]}}', "3", '{"schema_version": "' + MANY + '"}'])
def test_a_record_that_is_none_is_refused(cli, tmp_path, text):
    (tmp_path / "run.json").write_text(text)
    assert "run.json" in refused(cli("report", str(tmp_path / "run.json")))


def test_a_folder_hides_no_baseline(cli, archive):
    assert cli("baseline", "save", "main", "good").exit_code == 0
    for name in ("main", "latest"):
        Path(name).mkdir()
        assert cli("report", name).exit_code == 0
    refused(cli("report", "./main"))


# What is printed.


@pytest.mark.parametrize("taken", ["plots", "report.md", "report.html"])
def test_a_report_that_cannot_be_written_takes_no_other_with_it(make_row, make_record, tmp_path, taken):
    catalogue = discover().catalogue
    reports = Reports.of(make_record([make_row()]), catalogue, {})
    place = tmp_path / taken
    if taken == "plots":
        place.write_text("")
    else:
        place.mkdir()
    paths, refusal = reports.written([catalogue.reporters.get("csv")], tmp_path)
    assert "cannot be written" in str(refusal)
    there = {path.name for path in paths if path.is_file()} - {"plots"}
    assert there == {"report.md", "report.html", "cases.csv"} - {taken}


def test_a_table_moves_no_cursor(capsys):
    print_table("t\x1b[2J", ["c\u202e"], [["x\x9b8m"]])
    out = capsys.readouterr().out
    assert "\\u001b[2J" in out
    assert not [letter for letter in out if letter != printable(letter)]


def test_a_baseline_without_runs_is_refused(cli, archive):
    (archive.root / "baselines.toml").write_text('[main]\nruns = []\nsaved_at = "now"\n')
    for command in (("report", "main"), ("compare", "main", "latest"), ("baseline", "list")):
        assert "baselines.toml" in refused(cli(*command))


def test_escape_sequences_of_a_record_are_spelt_out(cli, make_row, make_record, tmp_path):
    from dilabench.record import Failed

    nasty = "\x1b[2J\x1b]0;title\x07\x9b31m\u202etxt"
    row = make_row(outcome=Failed(stage="verify", code="exception", why=nasty, traceback=nasty))
    record = make_record([row, make_row("gather")], suite=nasty, run_id="nasty")
    (tmp_path / "run.json").write_text(record.model_dump_json())
    Archive().add(record)
    for command in (
        ("report", "run.json"),
        ("report", "run.json", "-f", "markdown"),
        ("report", "run.json", "-f", "json"),
        ("history",),
        ("history", "strided"),
        ("compare", "run.json", "run.json"),
        ("report", nasty),
    ):
        result = cli(*command)
        assert not [letter for letter in result.output if letter != printable(letter)], command
    assert "\\u001b[2J" in cli("report", "run.json").stdout


@pytest.mark.parametrize(
    ("redirection", "code", "text"),
    [
        (">/dev/full", 3, "standard output cannot be written: No space left on device"),
        (">&-", 3, "standard output cannot be written: it is closed"),
        ("| true", 0, ""),
        slow(">/dev/null 2>&-", 0, ""),
        slow(">/dev/null 2>/dev/full", 0, ""),
    ],
)
@pytest.mark.parametrize(
    "command",
    ["list --json", slow("plan quick -i gather --lengths 64 --device cpu")],
)
def test_an_output_that_cannot_be_written(redirection, code, text, command):
    line = f"set -o pipefail; {sys.executable} -m dilabench {command} {redirection}"
    done = subprocess.run(["bash", "-c", line], env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    assert text in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def environment(**variables):
    return {**os.environ, "PYTHONPATH": str(Path(dilabench.__file__).parents[1]), "OMP_NUM_THREADS": "1", **variables}


@pytest.mark.parametrize("encoding", ["ascii", slow("latin-1"), slow("cp1252")])
def test_letters_that_the_encoding_lacks(fresh, encoding):
    assert fresh("-m", "dilabench", "list", PYTHONIOENCODING=encoding).returncode == 0
    listed = fresh("-m", "dilabench", "list", "--json", PYTHONIOENCODING=encoding)
    assert listed.returncode == 0, listed.stderr
    assert json.loads(listed.stdout)["suites"]


@pytest.mark.slow
def test_what_a_plugin_writes_by_itself_is_not_in_the_json(tmp_path, monkeypatch):
    info = tmp_path / "loud-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: loud\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[dilabench]\nloud = loud\n")
    (tmp_path / "loud.py").write_text(
        "import os\nprint('by print')\nos.system('echo by a shell')\nos.write(1, b'raw')\n"
    )
    monkeypatch.delenv("DILABENCH_DISABLE_PLUGINS")
    paths = os.pathsep.join((environment()["PYTHONPATH"], str(tmp_path)))
    command = [sys.executable, "-m", "dilabench", "list", "suites", "--json"]
    done = subprocess.run(command, env=environment(PYTHONPATH=paths), capture_output=True, text=True, timeout=60)
    assert json.loads(done.stdout)["problems"][0]["plugin"] == "loud"
    assert all(text in done.stderr for text in ("by print", "by a shell", "raw"))


# Ends.


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_ends_a_run_with_its_record_and_a_second_one_loses_nothing(tmp_path, name):
    # The last takes a while, so that rows are left when the first is there, on a busy machine, too.
    lengths = ("--lengths", "96,112,128,4096", "--set", "segment_lengths=40,96")
    settings = (*lengths, "--timing", "simple", "--device", "cpu")
    command = [sys.executable, "-m", "dilabench", "run", "implementations", *settings, "-o", str(tmp_path / "out")]
    variables = {"DILABENCH_LOCK_DIR": str(tmp_path)}
    with subprocess.Popen(
        command,
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Whoever runs the tests under nohup, or behind an ampersand, ignores some of them, and so would this run.
        preexec_fn=partial(signal.signal, signal.Signals[name], signal.SIG_DFL),
    ) as run:
        deadline = time.monotonic() + 100
        while time.monotonic() < deadline and not any('"measured"' in row for row in rows_of(tmp_path / "out")):
            time.sleep(0.05)
        for _ in range(2):
            run.send_signal(signal.Signals[name])
            time.sleep(0.1)
        out, error = run.communicate(timeout=60)
    assert run.returncode == 130, error
    assert "INTERRUPTED, results so far are saved" in out, error
    (folder,) = (tmp_path / "out").iterdir()
    record = read_record(folder / "run.json")
    assert record.status == "interrupted"
    assert record.rows
    assert (folder / "report.md").exists()


def test_finalisers_neither_keep_a_command_that_has_ended_nor_change_its_exit_code():
    # Python runs them after it has given signals their default back.
    code = """
import builtins, os, signal, sys, time
from dilabench.cli import main

class Late:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGTERM, sleep=time.sleep):
        sleep(60)
        kill(pid, number)

builtins.late = Late()
sys.argv[1:] = ["list", "suites", "--no-such-option"]
main()
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=50)
    assert done.returncode == 2, done.stderr
    assert "No such option" in done.stderr


def rows_of(output):
    return [line for file in output.glob("*/rows.jsonl") for line in file.read_text().splitlines()[1:]]


def test_a_run_that_still_goes_is_waited_for(tmp_path, make_row):
    from threading import Thread

    from dilabench.engine.device.environment import snapshot
    from dilabench.record import RunHeader

    header = RunHeader(
        tool_version="0", run_id="r", suite="quick", started_at="now", environment=snapshot(Machine(device="cpu"))
    )
    first = RunFolder.create(tmp_path, "quick", "r")
    first.start(header)
    told: list[str] = []
    resumed: list[RunFolder] = []
    waiting = Thread(target=lambda: resumed.append(RunFolder.resume(first.path, told.append)))
    waiting.start()
    waiting.join(0.3)
    assert not resumed
    assert "still goes; waiting for its end" in told[0]
    first.row(make_row())
    first.close()
    waiting.join(20)
    resumed[0].close()


def test_a_removed_working_folder_is_told(tmp_path, fresh):
    gone = tmp_path / "gone"
    line = f"mkdir {gone}; cd {gone}; rmdir {gone}; {sys.executable} -m dilabench run quick --device cpu"
    done = subprocess.run(["bash", "-c", line], env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 3, done.stderr
    assert f"working folder '{gone}' cannot be used" in done.stderr
    assert "Traceback" not in done.stderr


DEEP_FOLDER = """
import os, sys
import dilabench.cli
for _ in range(25):
    os.mkdir("x" * 200)
    os.chdir("x" * 200)
dilabench.cli.main(sys.argv[1:])
"""


@pytest.mark.parametrize("arguments", [("list", "suites"), ("report", "latest"), slow(("run", "quick", "--dry-run"))])
def test_a_working_folder_whose_path_is_too_long_is_told(tmp_path, arguments):
    command = [sys.executable, "-c", DEEP_FOLDER, *arguments]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 3, done.stderr
    text = " ".join(done.stderr.split())
    assert text.startswith(f"error: working folder '{tmp_path}/xxx")
    assert text.endswith("cannot be used: File name too long; go to another")
    assert len(done.stderr) < 400


@pytest.mark.parametrize("error", [ConfigError, ValueError])
def test_a_text_of_any_length_is_shortened(cli, monkeypatch, error):
    def fail(*_):
        raise error("word " * 600_000)

    monkeypatch.setattr("dilabench.store.lookup.Store.records", fail)
    result = cli("report", "latest")
    assert result.exit_code == (2 if error is ConfigError else 1)
    assert "letters)" in result.stderr
    assert len(result.stderr) < 12_000


def test_temporary_folders_of_killed_runs_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    killed, young = tmp_path / f"{PREFIX}ranks-killed", tmp_path / f"{PREFIX}ranks-young"
    for folder in (killed, young):
        folder.mkdir()
        (folder / "store").write_text("left over")
    with temporary_folder("worker") as living:
        for folder in (killed, living):
            os.utime(folder, (0, 0))
        remove_left_over()
        assert living.is_dir()
    assert sorted(tmp_path.iterdir()) == [young]


EARLY = """
import os, signal, sys
import dilabench.cli

class Interrupted:
    def find_spec(self, name, *_):
        if name == "dilabench.cli.app":
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupted())
dilabench.cli.main(["list"])
"""


def test_an_interrupt_before_a_command_has_begun_prints_no_traceback():
    command = [sys.executable, "-c", EARLY]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=30, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


KEPT = """
import ctypes, os, signal, sys, time
from pydantic import BaseModel, ConfigDict
from dilabench.cli import end_by_signals, leave_by_signals
from dilabench.errors import heed

def interrupted(times):
    for _ in range(times):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.02)

class Deleted:
    def __del__(self):
        interrupted(1)

class DeletedTwice:
    def __del__(self):
        try:
            interrupted(1)
        finally:
            interrupted(1)

class Kind(type):
    def __instancecheck__(cls, instance):
        if instance == "interrupts":
            interrupted(2)
        return True

class Anything(metaclass=Kind):
    pass

class SwallowsAll:
    def __init__(self):
        try:
            interrupted(1)
        except BaseException:
            pass

class Unhashed:
    # PyDict_GetItem drops the error of a key.
    def __hash__(self):
        interrupted(1)
        return 1

def in_c():
    ctypes.pythonapi.PyDict_GetItem.argtypes = [ctypes.py_object, ctypes.py_object]
    ctypes.pythonapi.PyDict_GetItem.restype = ctypes.c_void_p
    ctypes.pythonapi.PyDict_GetItem({}, Unhashed())

class Named:
    def __set_name__(self, owner, name):
        interrupted(1)

def in_class_body():
    try:
        type("Owner", (), {"field": Named()})
    except Exception:
        pass

class Holder(BaseModel):
    model_config = ConfigDict(arbitrary_types_allowed=True)
    value: Anything

# As in the background of a shell.
signal.signal(signal.SIGINT, signal.SIG_IGN)
end_by_signals()
try:
    {
        "del": Deleted,
        "del, twice": DeletedTwice,
        "isinstance": lambda: print(Holder(value="interrupts")),
        "except": SwallowsAll,
        "C": in_c,
        "class body": in_class_body,
    }[sys.argv[1]]()
    time.sleep(60)
except KeyboardInterrupt as interrupt:
    heed(interrupt)
    print("ended")
leave_by_signals(0)
"""


@pytest.mark.parametrize("place", ["del", slow("del, twice"), "isinstance", "except", "C", slow("class body")])
def test_an_interrupt_that_a_library_keeps_to_itself_comes_again(place):
    command = [sys.executable, "-c", KEPT, place]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=50, check=False)
    answer = "value='interrupts'\n" if place == "isinstance" else ""
    assert (done.returncode, done.stdout) == (0, f"{answer}ended\n"), done.stderr
    # Inside `isinstance` no signal has arrived yet when the second comes.
    assert done.stderr == (SAVING.decode() if place == "del, twice" else "")


@pytest.mark.parametrize(
    ("mib", "arguments", "code"),
    [(146, ["run", "quick"], 3), (146, ["list"], 3), (700, ["verify"], 3), (300, ["list"], 0), (146, ["--help"], 0)],
)
def test_a_small_address_space_is_refused_before_anything_is_loaded(mib, arguments, code):
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_AS, ({mib << 20},) * 2); "
    command = [sys.executable, "-c", limit + "from dilabench.cli import main; main()", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=60, check=False)
    assert done.returncode == code, done.stderr
    if code:
        assert f"limited to {mib} MiB" in done.stderr
        assert "ulimit -v unlimited" in done.stderr


@pytest.mark.parametrize("arguments", [slow(["list"]), ["history"], slow(["doctor"])])
def test_no_warning_of_ours_where_warnings_are_errors(arguments):
    command = [sys.executable, "-X", "dev", "-W", "error", "-m", "dilabench", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr


def test_a_package_that_is_gone_is_no_bug(cli, monkeypatch):
    def fail(*_):
        raise ModuleNotFoundError("No module named 'dilabench.report.table'")

    monkeypatch.setattr("dilabench.store.lookup.Store.records", fail)
    assert "This is a bug" in cli("report", "latest").stderr
    monkeypatch.setattr("dilabench.cli.app.__file__", "/gone/app.py")
    text = refused(cli("report", "latest"), code=3)
    assert "dilabench was removed or replaced while it ran (ModuleNotFoundError: No module named" in text


def test_the_doctor_answers_where_no_file_can_be_written(tmp_path):
    limited = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))"
    code = f"{limited}; from dilabench.cli import main; main(['doctor'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (done.returncode, "temporary:" in done.stdout) == (0, True), done.stderr
