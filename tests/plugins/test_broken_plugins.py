"""A plug-in that is broken, misspelt or clashes is left out with its reason; everything else stays usable."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import dilabench
from dilabench.errors import ExitCode, PluginError
from dilabench.plugins import Backend, Capabilities, Implementation, hookimpl
from dilabench.plugins.manager import DISABLE_VARIABLE, discover

MINE = Implementation("mine", "a summary", "package.module:build")
HOOK = "dilabench_register_implementations"


def plugin(function: Callable[..., Any], hook: str = HOOK, name: str = "third-party") -> SimpleNamespace:
    """A module-like plug-in whose `hook` is this function."""
    return SimpleNamespace(**{hook: hookimpl(function)}, __name__=name)


def raises() -> list[Implementation]:
    raise OSError("no licence file")


def returns_nothing() -> list[Implementation]:
    return []


def unmarked() -> list[Backend]:
    return []


def exits() -> list[Implementation]:
    raise SystemExit(3)


def wants_more(request: object) -> list[Implementation]:
    return [MINE]


def _limited(**limits: Any) -> Implementation:
    return Implementation("mine", "a summary", "package.module:build", supports=Capabilities(**limits))


BROKEN = {
    "raises in the hook": (plugin(raises), "OSError: no licence file"),
    "leaves the program in the hook": (plugin(exits), "SystemExit: 3"),
    "wants an argument that no hook has": (plugin(wants_more), "'request'"),
    "returns nothing": (plugin(lambda: None), "it registers nothing"),
    "returns an empty list": (plugin(returns_nothing), "it registers nothing"),
    "returns a descriptor alone": (plugin(lambda: MINE), "must return a list of Implementation"),
    "returns a number": (plugin(lambda: 3), "returned 3; it must return a list of Implementation"),
    "returns a text": (plugin(lambda: "mine"), "returned 'mine'; it must return a list of Implementation"),
    "returns bytes": (plugin(lambda: b"mine"), "returned b'mine'; it must return a list of Implementation"),
    "returns texts": (plugin(lambda: ["mine"]), "returned 'mine', which is no Implementation"),
    "returns another kind of descriptor": (
        plugin(lambda: [Backend("mine", "a summary", "package.module:attend")]),
        "which is no Implementation",
    ),
    "has a target without an attribute": (
        plugin(lambda: [Implementation("mine", "a summary", "package.module")]),
        "Implementation 'mine': target 'package.module' must be a text like 'package.module:name'",
    ),
    "has an empty name": (
        plugin(lambda: [Implementation("", "a summary", "package.module:build")]),
        "'' is not a name",
    ),
    "has an alias with a space": (
        plugin(lambda: [Implementation("mine", "a summary", "package.module:build", aliases=("my own",))]),
        "'my own' is not a name",
    ),
    "has one text for aliases": (
        plugin(lambda: [Implementation("mine", "a summary", "package.module:build", aliases="other")]),  # type: ignore[arg-type]
        "Implementation 'mine': aliases 'other' must be tuple[str, ...]",
    ),
    "has a number for a name": (
        plugin(lambda: [Implementation(3, "a summary", "package.module:build")]),  # type: ignore[arg-type]
        "Implementation 3: name 3 must be str",
    ),
    "has a text for a switch": (
        plugin(lambda: [Implementation("mine", "a summary", "package.module:build", compiles="yes")]),  # type: ignore[arg-type]
        "compiles 'yes' must be bool",
    ),
    "has a list of numbers for requirements": (
        plugin(lambda: [Implementation("mine", "a summary", "package.module:build", requires=(3,))]),  # type: ignore[arg-type]
        "requires (3,) must be tuple[str, ...]",
    ),
    "computes in a dtype that there is not": (
        plugin(lambda: [_limited(dtypes=frozenset({"bf16"}))]),
        "Implementation 'mine': supports: dtypes bf16 is not known; it may hold bfloat16",
    ),
    "looks for kernels by half an expression": (
        plugin(
            lambda: [Backend("mine", "a summary", "package.module:attend", kernels=("flash(",))],
            "dilabench_register_backends",
        ),
        "Backend 'mine': kernels 'flash(' is no regular expression",
    ),
    "has a priority for a device that there is not": (
        plugin(
            lambda: [Backend("mine", "a summary", "package.module:attend", priority={"sm99": 1})],  # type: ignore[dict-item]
            "dilabench_register_backends",
        ),
        "Backend 'mine': priority {'sm99': 1} must be ",
    ),
    "has a role of its own": (
        plugin(lambda: [Implementation("mine", "a summary", "package.module:build", role="best")]),  # type: ignore[arg-type]
        "role 'best' must be Literal['oracle', 'plain', 'method', 'yardstick']",
    ),
    "names a sharding without a module": (
        plugin(lambda: [Implementation("mine", "a summary", "package.module:build", sharding="halves")]),
        "Implementation 'mine': sharding 'halves' must be a text like 'package.module:name'",
    ),
    "has patterns in a list": (
        plugin(lambda: [_limited(patterns=["dense"])]),
        "supports: patterns ['dense'] must be frozenset[str]",
    ),
    "has head dims in multiples of nothing": (
        plugin(lambda: [_limited(on_cuda=Capabilities(head_dim_multiple=0))]),
        "supports: on_cuda: head_dim_multiple 0 must be at least 1",
    ),
    "has a check that cannot be called": (plugin(lambda: [_limited(check="no")]), "supports: check 'no' must be "),
    "misspells a hook": (
        plugin(lambda: [MINE], "dilabench_register_implementation"),
        "unknown hook 'dilabench_register_implementation'",
    ),
    "misspells the prefix of a hook": (
        plugin(lambda: [MINE], "dilabench_add_backends"),
        "known hooks: dilabench_register_",
    ),
    "forgets to mark a hook": (
        SimpleNamespace(
            dilabench_register_implementations=hookimpl(lambda: [MINE]),
            dilabench_register_backends=unmarked,
            __name__="third-party",
        ),
        "dilabench_register_backends is not marked with @hookimpl",
    ),
    "takes a built-in name": (
        plugin(lambda: [Implementation("gather", "a summary", "package.module:build")]),
        "implementation 'gather' of plug-in 'third-party' is already registered by 'builtin'",
    ),
    "takes the alias of a built-in": (
        plugin(lambda: [Implementation("improved", "a summary", "package.module:build")]),
        "implementation 'improved' of plug-in 'third-party' is already registered by 'builtin'",
    ),
    "takes a built-in name as an alias": (
        plugin(lambda: [Implementation("mine", "a summary", "package.module:build", aliases=("gather",))]),
        "implementation 'gather' of plug-in 'third-party' is already registered by 'builtin'",
    ),
    "registers one name twice": (plugin(lambda: [MINE, MINE]), "already registered by 'third-party'"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_plugin_is_left_out_with_its_reason(case: str) -> None:
    broken, reason = BROKEN[case]
    healthy = plugin(lambda: [Implementation("healthy", "a summary", "package.module:build")], name="healthy")
    untouched = discover(extra=[healthy])
    found = discover(extra=[broken, healthy])
    assert [problem.plugin for problem in found.problems] == ["third-party"]
    assert reason in found.problems[0].why
    assert found.catalogue.implementations.names == untouched.catalogue.implementations.names
    assert "healthy" in found.catalogue.implementations


@pytest.mark.parametrize("case", BROKEN)
def test_strict_makes_it_fatal(case: str) -> None:
    broken, reason = BROKEN[case]
    with pytest.raises(PluginError) as caught:
        discover(strict=True, extra=[broken])
    assert str(caught.value).startswith("plug-in 'third-party': ")
    assert reason in str(caught.value)
    assert caught.value.exit_code is ExitCode.ENVIRONMENT


def test_two_plugins_that_clash_keep_the_first_and_name_it() -> None:
    first, second = plugin(lambda: [MINE], name="first"), plugin(lambda: [MINE], name="second")
    found = discover(extra=[first, second])
    assert found.catalogue.implementations.origin("mine") == "first"
    assert [(problem.plugin, "already registered by 'first'" in problem.why) for problem in found.problems] == [
        ("second", True)
    ]


def test_a_clash_in_one_hook_takes_back_what_the_other_hooks_gave() -> None:
    clashing = SimpleNamespace(
        dilabench_register_implementations=hookimpl(lambda: [MINE]),
        dilabench_register_backends=hookimpl(lambda: [Backend("math", "a summary", "package.module:attend")]),
        __name__="third-party",
    )
    found = discover(extra=[clashing])
    assert "mine" not in found.catalogue.implementations
    assert [info.name for info in found.plugins if info.name == "third-party"] == []


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Puts a module with a `dilabench` entry point on the path, as an installed distribution."""
    monkeypatch.syspath_prepend(tmp_path)

    def put(name: str, source: str) -> None:
        (tmp_path / f"{name}.py").write_text(source)
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[dilabench]\n{name} = {name}\n")

    return put


@pytest.mark.parametrize(
    ("name", "source", "reason"),
    [
        (
            "no_module",
            "import a_module_that_is_not_there",
            "ModuleNotFoundError: No module named 'a_module_that_is_not_there'",
        ),
        ("bad_syntax", "def broken(:", "SyntaxError: invalid syntax"),
        ("raises_at_import", "1 / 0", "ZeroDivisionError: division by zero"),
        ("exits_at_import", "import sys; sys.exit('wrong Python')", "SystemExit: wrong Python"),
    ],
)
def test_an_entry_point_that_cannot_be_imported(
    install: Callable[[str, str], None], name: str, source: str, reason: str
) -> None:
    install(name, source)
    found = discover()
    assert [(problem.plugin, reason in problem.why) for problem in found.problems] == [(name, True)]
    assert "gather" in found.catalogue.implementations


def test_an_entry_point_is_found_with_its_version_and_can_be_disabled(
    install: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(
        "healthy_entry_point",
        "from dilabench.plugins import Implementation, hookimpl\n"
        "@hookimpl\n"
        "def dilabench_register_implementations():\n"
        "    return [Implementation('installed', 'a summary', 'healthy_entry_point:build')]\n",
    )
    found = discover(strict=True)
    assert found.catalogue.implementations.origin("installed") == "healthy_entry_point"
    info = found.plugins[-1]
    assert (info.name, info.distribution, info.version) == ("healthy_entry_point", "healthy_entry_point", "1.0")
    monkeypatch.setenv(DISABLE_VARIABLE, "1")
    assert "installed" not in discover().catalogue.implementations


def test_a_plugin_for_another_version_is_left_out_with_both_versions(tmp_path, monkeypatch):
    info = tmp_path / "old_one-2.0.dist-info"
    info.mkdir()
    needs = "Requires-Dist: dilabench<0.1,>=0.0.5\nRequires-Dist: dilabench-other>=3; extra == 'x'\n"
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: old-one\nVersion: 2.0\n{needs}")
    (info / "entry_points.txt").write_text("[dilabench]\nold = module_that_is_never_imported\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("DILABENCH_DISABLE_PLUGINS", raising=False)
    (why,) = [problem.why for problem in discover().problems if problem.plugin == "old"]
    assert why.startswith(f"old-one 2.0 was made for dilabench <0.1,>=0.0.5, this is {dilabench.__version__}; ")
