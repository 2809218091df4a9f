"""Every hook is called, and what a plug-in returns from it is found in the catalogue under its name."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import create_model

from dilabench.patterns import registry
from dilabench.patterns.dense import DensePattern
from dilabench.plugins import (
    Backend,
    Implementation,
    PatternKind,
    Reporter,
    Suite,
    Timer,
    WorkloadPreset,
    hookimpl,
    hookspecs,
)
from dilabench.plugins.manager import HOOK_PREFIX, REGISTRIES, discover


def shelved(hook: str, descriptor: Any) -> Any:
    """The descriptor as found under its name after a plug-in returned it from this hook."""

    def returns() -> list[Any]:
        return [descriptor]

    returns.__name__ = hook
    plugin = SimpleNamespace(**{hook: hookimpl(returns)}, __name__="third-party")
    found = discover(strict=True, extra=[plugin])
    shelf = getattr(found.catalogue, hook.removeprefix(HOOK_PREFIX))
    assert shelf.origin(descriptor.name) == "third-party"
    assert found.plugins[-1].name == "third-party"
    return shelf.get(descriptor.name)


def test_dilabench_register_patterns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_types", dict(registry._types))
    mine = create_model("Mine", __base__=DensePattern, kind=(str, "mine"))
    monkeypatch.setitem(sys.modules, "a_package", SimpleNamespace(Mine=mine))
    descriptor = PatternKind("mine", "a summary", "a_package:Mine")
    assert shelved("dilabench_register_patterns", descriptor) is descriptor


def test_dilabench_register_implementations() -> None:
    descriptor = Implementation("mine", "a summary", "package.module:build")
    assert shelved("dilabench_register_implementations", descriptor) is descriptor


def test_dilabench_register_backends() -> None:
    descriptor = Backend("mine", "a summary", "package.module:attend")
    assert shelved("dilabench_register_backends", descriptor) is descriptor


def test_dilabench_register_workloads() -> None:
    descriptor = WorkloadPreset("mine", "a summary", {"seq_len": 640})
    assert shelved("dilabench_register_workloads", descriptor) is descriptor


def test_dilabench_register_suites() -> None:
    descriptor = Suite("mine", "a summary", "package.module:expand")
    assert shelved("dilabench_register_suites", descriptor) is descriptor


def test_dilabench_register_reporters() -> None:
    descriptor = Reporter("mine", "a summary", "package.module:render")
    assert shelved("dilabench_register_reporters", descriptor) is descriptor


def test_dilabench_register_timers() -> None:
    descriptor = Timer("mine", "a summary", "package.module:Mine", proves="nothing")
    assert shelved("dilabench_register_timers", descriptor) is descriptor


def test_every_hook_has_a_shelf_and_a_test() -> None:
    hooks = {name for name in dir(hookspecs) if name.startswith("dilabench_")}
    assert hooks == {HOOK_PREFIX + shelf for shelf in REGISTRIES}
    assert {f"test_{hook}" for hook in hooks} <= set(globals())


def test_what_we_ship_comes_through_the_hooks() -> None:
    catalogue = discover(strict=True).catalogue
    assert {"reference", "gather", "strided"} <= set(catalogue.implementations.names)
    for shelf in REGISTRIES:
        descriptors = list(getattr(catalogue, shelf))
        assert descriptors, shelf
        assert all(
            getattr(catalogue, shelf).origin(descriptor.name) in {"builtin", "peers"} for descriptor in descriptors
        )
