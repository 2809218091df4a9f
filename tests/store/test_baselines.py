import os
import tomllib

import pytest

from dilabench.errors import ConfigError, EnvironmentNotReady
from dilabench.store.baselines import FILENAME, Baselines

NOW = "2026-01-02T03:04:05+00:00"


@pytest.fixture
def baselines(tmp_path):
    return Baselines(tmp_path / "store")


def test_save_list_remove(baselines):
    baselines.save("main", ["a.json.gz"], NOW)
    baselines.save("v1.0", ["b.json.gz", "c.json.gz"], NOW)
    assert list(baselines.all()) == ["main", "v1.0"]
    assert baselines.get("v1.0").runs == ("b.json.gz", "c.json.gz")
    assert tomllib.loads(baselines.path.read_text())["main"] == {"runs": ["a.json.gz"], "saved_at": NOW}
    baselines.remove("main")
    assert list(baselines.all()) == ["v1.0"]


def test_a_name_is_never_overwritten_by_accident(baselines):
    baselines.save("main", ["a"], NOW)
    with pytest.raises(ConfigError, match=r"'main' exists.*--add.*--replace"):
        baselines.save("main", ["b"], NOW)
    assert baselines.save("main", ["b", "a"], NOW, add=True).runs == ("a", "b")
    assert baselines.save("main", ["c"], NOW, replace=True).runs == ("c",)


@pytest.mark.parametrize("name", ["", "../x", "a b", "a/b", '"]\nx=1', "x" * 100, "-x", "latest"])
def test_impossible_names(baselines, name):
    with pytest.raises(ConfigError, match="not a baseline name"):
        baselines.save(name, ["a"], NOW)
    assert not baselines.path.exists()


def test_unknown_names_get_a_suggestion(baselines):
    baselines.save("main", ["a"], NOW)
    for ask in (baselines.get, baselines.remove):
        with pytest.raises(ConfigError, match=r"'mian'; did you mean main.*see `dilabench baseline list`"):
            ask("mian")


@pytest.mark.parametrize("text", ["[main", "main = 3", "[main]\nruns = 5\nsaved_at = 'x'", "[main]\nrun = []"])
def test_a_file_that_cannot_be_understood_is_kept_and_told(baselines, text):
    baselines.path.parent.mkdir()
    baselines.path.write_text(text)
    with pytest.raises(ConfigError, match=FILENAME):
        baselines.save("main", ["a"], NOW, replace=True)
    assert baselines.path.read_text() == text


def test_a_full_disk_keeps_the_old_file(baselines, monkeypatch):
    baselines.save("main", ["a"], NOW)
    before = baselines.path.read_text()

    def no_space(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(EnvironmentNotReady, match="No space left"):
        baselines.save("other", ["b"], NOW)
    assert baselines.path.read_text() == before
    assert [path.name for path in baselines.path.parent.iterdir() if path.suffix == ".part"] == []


def test_a_store_that_is_a_file(tmp_path):
    (tmp_path / "store").write_text("")
    with pytest.raises(EnvironmentNotReady, match="DILABENCH_STORE"):
        Baselines(tmp_path / "store").save("main", ["a"], NOW)


def test_letters_beyond_16_bits(baselines):
    """A name of them once made the whole file unreadable."""
    baselines.save("main", ["a.json.gz"], NOW)
    baselines.save("a\U0001d400\u00e9", ["b\U0001d400.json.gz"], NOW)
    assert baselines.get("a\U0001d400\u00e9").runs == ("b\U0001d400.json.gz",)
    assert baselines.get("main").runs == ("a.json.gz",)
