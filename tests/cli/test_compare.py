"""`dilabench compare`: what it prints, refuses and exits with."""

import json
from pathlib import Path

import pytest

from dilabench.metadata import LAUNCH_BOUND
from dilabench.record import Failed, Verification
from dilabench.store.archive import Archive

WRONG = Failed(stage="verify", code="wrong_output", why="out differs", verification=Verification(checks=()))
GOLDEN = Path(__file__).parents[1] / "golden" / "run_record.v1.json"


@pytest.fixture
def write(tmp_path):
    def write(record, name):
        path = tmp_path / f"{name}.json"
        path.write_text(record.model_dump_json())
        return str(path)

    return write


@pytest.fixture
def stored(make_row, make_record):
    """Six sessions of one case in the store, under the name main."""
    levels = (0.997, 1.002, 1.0, 0.999, 1.003, 1.001)
    archive = Archive()
    for index, level in enumerate(levels):
        archive.add(make_record([make_row("strided", seed=index, ns=1e7 * level)], run_id=f"base{index}"))
    return [f"base{index}" for index in range(len(levels))]


@pytest.mark.parametrize(
    ("ratio", "code", "word"), [(1.0, 0, "no change above 0."), (1.06, 6, "SLOWER"), (0.94, 0, "FASTER")]
)
def test_a_baseline_of_six_sessions_gates(cli, stored, write, make_row, make_record, ratio, code, word):
    assert cli("baseline", "save", "main", *stored).exit_code == 0
    new = write(make_record([make_row("strided", ns=1e7 * ratio, seed=77)], run_id="new"), "new")
    result = cli("compare", "main", new)
    assert result.exit_code == code, result.stdout
    assert word in result.stdout
    assert f"exit code {code}" in result.stdout.splitlines()[-1]


@pytest.mark.parametrize("command", ["compare", "report"])
def test_the_folder_of_the_store_is_no_run(cli, stored, write, make_row, make_record, command):
    """`benchmark_results/*/` names it, too."""
    base, new = (write(make_record([make_row(ns=ns)], run_id=f"r{ns:.0f}"), f"{ns:.0f}") for ns in (1e7, 2e7))
    with_store = cli(command, base, new, str(Archive().folder.parent))
    without = cli(command, base, new)
    assert (with_store.exit_code, with_store.stdout) == (without.exit_code, without.stdout)


@pytest.mark.parametrize(
    ("ratio", "code", "change", "verdict"),
    [
        (2.0, 6, "+100 %, 2.0x slower", "REGRESSION (1 SLOWER; exit code 6)"),
        (0.22, 0, "-78 %, 4.5x faster", "ok (1 FASTER; exit code 0)"),
        (1.1, 0, "+10 %", "UNDECIDED (1 undecided; exit code 0)"),
    ],
)
def test_two_files_are_decided_by_the_assumed_spread(cli, write, make_row, make_record, ratio, code, change, verdict):
    base, new = (
        write(make_record([make_row(ns=ns, spread=0.001)], run_id=name), name)
        for name, ns in (("base", 1e7), ("new", 1e7 * ratio))
    )
    result = cli("compare", base, new)
    assert result.exit_code == code
    assert change in result.stdout
    assert "one session each, assumed to spread by 5 %" in " ".join(result.stdout.split())
    last = result.stdout.splitlines()
    assert last[-1] == f"verdict: {verdict}"
    assert (f"to decide: `dilabench check --against {base}`" in last) is (ratio == 1.1)
    assert cli("compare", base, new, "--fail-on", "undecided").exit_code == (7 if ratio == 1.1 else code)
    document = json.loads(cli("compare", base, new, "--json").stdout)
    assert document["to_decide"] == ([f"`dilabench check --against {base}`"] if ratio == 1.1 else [])


def test_words_for_experts_are_in_the_details(cli, write, make_row, make_record):
    notes = (LAUNCH_BOUND.note("the host takes longer"),)
    base, new = (
        write(make_record([make_row(notes=notes)], run_id=name, soft={"gpu_uuid_hash": name}), name)
        for name in ("base", "new")
    )
    words = ("MDE", "A12", "launch_bound", "[wall, stored]", "sessions:")
    usual, details = cli("compare", base, new).stdout, cli("compare", base, new, "--details").stdout
    assert [word for word in (*words, "advisory", "slot", "cold, stored") if word in usual] == []
    assert [word for word in words if word not in details] == []
    assert "another GPU of the same kind" in usual
    columns = next(line for line in usual.splitlines() if "before" in line)
    assert columns.split() == ["verdict", "row", "before", "after", "change", "±"]


@pytest.mark.parametrize(
    ("field", "old", "new"), [("gpu", "H200", "H100"), ("driver", "570", "580"), ("power_limit_mw", "700000", "230000")]
)
def test_another_machine_is_refused(cli, write, make_row, make_record, field, old, new):
    hard = {"gpu": "H200", "driver": "570", "power_limit_mw": "700000"}
    base = write(make_record([make_row()], hard=hard, device="cuda"), "base")
    other = write(make_record([make_row()], hard={**hard, field: new}, device="cuda"), "new")
    result = cli("compare", base, other)
    assert result.exit_code == 2
    assert f"{field}: {old} against {new}" in result.stderr
    assert "baseline save" in result.stderr


def test_another_dtype_is_refused(cli, write, make_row, make_record):
    base, other = (write(make_record([make_row(dtype=one)]), one) for one in ("bfloat16", "float32"))
    result = cli("compare", base, other)
    assert result.exit_code == 2
    assert "dtype: bfloat16 against float32" in result.stderr


@pytest.mark.parametrize(
    ("outcome", "code"),
    [(WRONG, 5), (Failed(stage="time", code="crash", why="killed by SIGKILL"), 4)],
)
def test_failures_have_codes_of_their_own(cli, write, make_row, make_record, outcome, code):
    base = write(make_record([make_row(), make_row("gather")], run_id="a"), "base")
    new = write(make_record([make_row(), make_row("gather", outcome=outcome)], run_id="b"), "new")
    result = cli("compare", base, new)
    assert result.exit_code == code
    assert outcome.why in result.stdout


def test_larger_peak_is_a_regression(cli, write, make_row, make_record):
    base, new = (write(make_record([make_row(peak=peak)], run_id=f"p{peak}"), str(peak)) for peak in (2**30, 2**31))
    result = cli("compare", base, new)
    assert result.exit_code == 6
    assert "LARGER: strided over math" in result.stdout
    assert "1 larger peak" in result.stdout.splitlines()[-1]
    assert "LARGER +1.0 GiB" in cli("compare", base, new, "--details").stdout


def test_nothing_in_common(cli, write, make_row, make_record):
    base, new = (write(make_record([make_row(name)], run_id=name), name) for name in ("gather", "strided"))
    result = cli("compare", base, new)
    assert result.exit_code == 8
    assert "missing: gather" in result.stdout
    assert "new: strided" in result.stdout


def test_rows_of_one_record(cli, write, make_row, make_record):
    rows = [make_row("gather", position=0), make_row("strided", position=1, ns=2e7), make_row("dense", seq_len=7)]
    run = write(make_record(rows), "run")
    result = cli("compare", run, "--by", "implementation")
    assert result.exit_code == 0
    assert "strided over math against gather over math" in result.stdout
    assert "SLOWER" in result.stdout
    assert "not comparable: dense" in result.stdout
    assert cli("compare", run, "--by", "implementation", "--fail-on", "slower").exit_code == 6
    assert cli("compare", run, "--by", "implementation", "--base", "strided", "--fail-on", "slower").exit_code == 0
    assert cli("compare", run, "--by", "implementation", "--threshold", "150%").exit_code == 2
    wide = cli("compare", run, "--by", "implementation", "--threshold", "90%", "--fail-on", "slower")
    assert wide.exit_code == 6


@pytest.mark.parametrize(("margin", "code"), [("20%", 0), ("0.2", 0), ("5%", 6)])
def test_threshold_is_the_margin(cli, write, make_row, make_record, margin, code):
    rows = [make_row("gather", position=0), make_row("strided", position=1, ns=1.15e7)]
    run = write(make_record(rows), "run")
    result = cli("compare", run, "--by", "implementation", "--threshold", margin, "--fail-on", "slower")
    assert result.exit_code == code


def test_json_has_every_number(cli, write, make_row, make_record):
    rows = [make_row("gather", position=0), make_row("strided", position=1, ns=2e7)]
    run = write(make_record([*rows, make_row("dense", seq_len=7)]), "run")
    result = cli("compare", run, "--by", "implementation", "--json")
    document = json.loads(result.stdout)
    (cell,) = document["cells"]
    assert cell["verdict"]["code"] == "SLOWER"
    assert cell["verdict"]["numbers"]["ratio"] == pytest.approx(2, rel=0.01)
    assert cell["baseline"]["implementation"] == "gather"
    assert document["uncompared"][0]["lack"] == "not comparable"
    assert document["exit_code"] == 0


def test_only(cli, write, make_row, make_record):
    rows = [make_row(name, position=i, seq_len=n) for n in (96, 97) for i, name in enumerate(("gather", "strided"))]
    run = write(make_record(rows), "run")
    result = cli("compare", run, "--by", "implementation", "-k", "1x97", "--json")
    assert [cell["candidate"]["workload"]["seq_len"] for cell in json.loads(result.stdout)["cells"]] == [97]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["one"], "name two or more, BASE first"),
        (["one", "two", "--base", "gather"], "needs --by"),
        (["one", "two"], "'one' is no file, and no run is stored in"),
    ],
)
def test_refusals(cli, arguments, message):
    result = cli("compare", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_the_golden_record_compares(cli):
    result = cli("compare", str(GOLDEN), "--by", "implementation")
    assert result.exit_code == 5, result.stderr
    assert "wrong output: shifted" in result.stdout
    assert "skipped: fused" in result.stdout
    both = cli("compare", str(GOLDEN), str(GOLDEN))
    assert both.exit_code == 5
    assert "is on both sides" in both.stdout
    assert both.stdout.count("both sides failed at verify") == 1, "what ended alike is said once"


def test_torch_is_not_loaded(fresh):
    code = (
        "import sys\nfrom dilabench.cli import main\n"
        f"try:\n    main(['compare', {str(GOLDEN)!r}, '--by', 'implementation'])\nexcept SystemExit as end:\n"
        "    assert end.code == 5, end.code\nassert 'torch' not in sys.modules"
    )
    result = fresh("-c", code)
    assert result.returncode == 0, result.stderr


def test_two_machines_have_a_ratio_and_no_verdict(cli, tmp_path, make_row, make_record):
    host = [make_row(ns=8e7), make_row("gather", ns=9e7), make_row("dense", ns=1e7)]
    # On the GPU over two backends, of which the faster counts.
    gpu = [make_row(ns=2e7, backend="flash2"), make_row(ns=3e7), make_row("gather", ns=3e7, dtype="float32")]
    for name, rows, device in (("host", host, "cpu"), ("gpu", gpu, "cuda:0")):
        record = make_record(rows, run_id=name, device=device, hard={"device": device})
        (tmp_path / f"{name}.json").write_text(record.model_dump_json())
    refused = cli("compare", "host.json", "gpu.json")
    assert refused.exit_code == 2
    assert "--across-machines" in refused.stderr
    shown = cli("compare", "host.json", "gpu.json", "--across-machines")
    assert shown.exit_code == 0, shown.output
    assert "strided (math against flash2)" in shown.stdout
    assert not {"SLOWER", "FASTER", "SAME"} & set(shown.stdout.split())
    cells = json.loads(cli("compare", "host.json", "gpu.json", "--across-machines", "--json").stdout)["cells"]
    assert {one["new"]["implementation"]: round(one["base_over_new"]) for one in cells} == {"strided": 4, "gather": 3}
