import pytest

from dilabench.comparison.fingerprint import machine_key
from dilabench.errors import ConfigError
from dilabench.store.calibrations import Calibration
from dilabench.store.lookup import Store


@pytest.fixture
def store(tmp_path, make_row, make_record):
    store = Store(tmp_path / "store")
    files = [store.archive.add(make_record([make_row()], run_id=name)) for name in ("abcd", "abff", "xyzw")]
    store.baselines.save("main", files[:2], "2026-01-01")
    return store


def run_ids(records):
    return [record.run_id for record in records]


def test_what_a_text_may_mean(store, tmp_path, make_record):
    assert run_ids(store.records("main")) == ["abcd", "abff"]
    assert run_ids(store.records("xy")) == ["xyzw"]
    assert run_ids(store.records("latest")) == ["xyzw"]
    assert run_ids(store.records(str(store.archive.folder / store.archive.names()[0]))) == ["abcd"]
    plain = tmp_path / "run.json"
    plain.write_text(make_record([], run_id="file").model_dump_json())
    assert run_ids(store.records(str(plain))) == ["file"]


def test_a_text_that_fits_several_runs(store):
    with pytest.raises(ConfigError, match=r"'ab' fits 2 stored runs"):
        store.records("ab")


def test_a_text_that_fits_nothing(store):
    with pytest.raises(
        ConfigError, match=r"'mian' is neither a file, nor a baseline \(known: main\).*did you mean main\?"
    ):
        store.records("mian")


@pytest.mark.parametrize(
    ("text", "way_out"),
    [
        ("latest", "`dilabench run quick` makes one"),
        ("main", "`dilabench run quick` makes one, then `dilabench baseline save main` gives it this name"),
    ],
)
def test_an_empty_store_names_the_command_that_fills_it(tmp_path, text, way_out):
    with pytest.raises(ConfigError, match=f"no run is stored in .*; {way_out}$"):
        Store(tmp_path / "empty").records(text)


@pytest.mark.parametrize("text", ["nightly.json", "runs/nightly", "nightly.json.gz"])
@pytest.mark.parametrize("stored", [True, False])
def test_a_path_that_is_missing_is_no_name_for_a_baseline(store, tmp_path, text, stored):
    with pytest.raises(ConfigError, match=f"^there is no file or folder '{text}'"):
        (store if stored else Store(tmp_path / "empty")).records(text)


def test_a_name_without_a_run_comes_with_the_command_that_gives_it_one(store):
    with pytest.raises(ConfigError, match="`dilabench baseline save nightly` gives the newest run this name"):
        store.records("nightly")


def test_a_text_too_long_for_a_file_name(store):
    with pytest.raises(ConfigError, match="is neither a file, nor a baseline"):
        store.records("a" * 300)


def test_a_baseline_whose_run_is_gone(store):
    (store.archive.folder / store.archive.names()[0]).unlink()
    with pytest.raises(ConfigError, match="does not exist"):
        store.records("main")


def test_a_calibration_belongs_to_a_machine(store, make_record):
    here, there = make_record([]), make_record([], hard={"device": "cpu", "cpu": "other"})
    calibration = Calibration(
        machine=machine_key(here), fields={}, device="cpu", sigma_aa=0.01, sessions=10, measured_at="", tool_version="0"
    )
    path = store.calibrations.save(calibration)
    assert store.calibration_of([here, here]) == calibration
    assert store.calibration_of([there]) is None
    assert store.calibration_of([here, there]) is None
    told = []
    telling = Store(store.root, tell=told.append)
    path.write_text('{"sigma_aa": ')
    assert telling.calibration_of([here]) is None
    assert "dilabench calibrate" in told[0]
    path.unlink()
    path.mkdir()
    assert telling.calibration_of([here]) is None
    assert "cannot be read: it is a folder" in told[1]
