"""Shelves, requirements and reasons."""

import functools
import itertools
import re
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec

import pytest

from dilabench.choice.descriptors import installed_version, load_target, unmet
from dilabench.choice.ways import Registry
from dilabench.errors import ConfigError, PluginError
from dilabench.machine import Machine
from dilabench.patterns.registry import OWN_KINDS, load
from dilabench.plugins import manager
from dilabench.plugins.catalogue import Catalogue
from dilabench.plugins.descriptors import Backend, Capabilities, Implementation, WorkloadPreset
from dilabench.record import Case, GpuInfo
from dilabench.runs.verification import SHAPE
from dilabench.workload.spec import Workload, WorkloadRequest
from tests.conftest import half_are_slow

CPU = Machine(device="cpu", no_cuda="no NVIDIA GPU is visible")
H200 = GpuInfo(name="H200", compute_capability="9.0")
HOPPER = Machine(device="cuda", gpus=(H200, H200))
DILATED = {"kind": "dilated", "segment_lengths": [16, 40], "dilation_rates": [1, 3]}
ZERO_KEYS = {"kind": "dilated", "segment_lengths": [16, 39], "dilation_rates": [1, 3], "padding": "zero_key"}
WORKLOAD = Workload(pattern=DILATED, batch_size=1, seq_len=96, num_heads=6, num_kv_heads=3, head_dim=24)


def test_our_own_descriptors_hold_what_those_of_plug_ins_must():
    for module, kind in itertools.product(manager.OWN.values(), manager.REGISTRIES):
        hook = getattr(module, manager.HOOK_PREFIX + kind, None)
        for descriptor in hook() if hook else ():
            assert type(descriptor) is manager.REGISTRIES[kind]
            assert replace(descriptor) == descriptor
    for kind in OWN_KINDS:
        manager._refuse_shadowing(kind, load(kind))


def implementation(name, aliases=(), **fields):
    return Implementation(name, "for a test", "somewhere:build", aliases=aliases, **fields)


def test_a_descriptor_checks_its_own_fields_when_it_is_made():
    with pytest.raises(PluginError, match=r"^Implementation 'gather': aliases 'dilated' must be tuple\[str, \.\.\.\]$"):
        implementation("gather", aliases="dilated")
    with pytest.raises(PluginError, match=r"^Implementation 'gather': quirk is no field of it$"):
        implementation("gather", quirk="none")
    with pytest.raises(PluginError, match=r"^Backend 'math': target is missing$"):
        Backend("math", "for a test")
    with pytest.raises(
        PluginError, match=r"supports: on_cuda: modes both ways is not known; it may hold backward, both,"
    ):
        implementation("gather", supports=Capabilities(on_cuda=Capabilities(modes=frozenset({"both ways"}))))
    with pytest.raises(PluginError, match=r"sharding 3 must be str \| None$"):
        implementation("gather", sharding=3)
    with pytest.raises(PluginError, match="priority -1 must be at least 0"):
        replace(implementation("gather"), priority=-1)


@pytest.mark.parametrize("name", ["g\u0430ther", "gather\u200b", "\uff47ather", "gather\n", "größer", "a b", ""])
def test_names_are_ascii(name):
    shown = re.escape(ascii(name))
    for kind in manager.REGISTRIES.values():
        with pytest.raises(PluginError, match=rf"name {shown} is not a name; write letters from a to z, digits,"):
            kind(name, "for a test", *([] if kind is WorkloadPreset else ["somewhere:build"]))
    with pytest.raises(PluginError, match=rf"aliases {shown} is not a name"):
        implementation("gather", aliases=(name,))


@pytest.mark.parametrize(
    ("owners", "source"),
    [
        (("builtin", "builtin"), None),
        (("theirs", "builtin"), "pkg 2"),
        (("peers", "theirs"), "pkg 2"),
        (("x", "theirs"), "x, pkg 2"),
    ],
)
def test_a_case_says_which_packages_it_comes_from(owners, source):
    catalogue = Catalogue()
    catalogue.sources["theirs"] = "pkg 2"
    catalogue.implementations.add(implementation("one"), owners[0])
    catalogue.backends.add(Backend("two", "for a test", "somewhere:attend"), owners[1])
    assert catalogue.source_of(Case(implementation="one", backend="two", workload=WORKLOAD)) == source
    assert catalogue.source_of(Case(implementation="gone", workload=WORKLOAD)) is None


def test_names_and_aliases_lead_to_the_descriptor():
    shelf = Registry("implementation")
    shelf.add(implementation("gather", aliases=("dilated",)), "builtin")
    assert shelf.get("dilated") is shelf.get("gather")
    assert shelf.origin("dilated") == "builtin"
    assert "dilated" in shelf
    assert shelf.names == ("gather",)


@pytest.mark.parametrize(
    ("name", "aliases"), [("gather", ()), ("dilated", ()), ("new", ("gather",)), ("new", ("dilated",))]
)
def test_a_taken_name_is_an_error_that_names_both(name, aliases):
    shelf = Registry("implementation")
    shelf.add(implementation("gather", aliases=("dilated",)), "builtin")
    with pytest.raises(PluginError, match=r"of plug-in 'theirs' is already registered by 'builtin'"):
        shelf.add(implementation(name, aliases=aliases), "theirs")
    assert shelf.names == ("gather",)


def test_an_unknown_name_suggests_the_nearest():
    shelf = Registry("implementation")
    shelf.add(implementation("strided"), "builtin")
    with pytest.raises(ConfigError, match="unknown implementation 'stridet'; did you mean strided"):
        shelf.get("stridet")
    with pytest.raises(ConfigError, match="known: strided"):
        shelf.get("zzzzzz")


REASONS = [
    ({"patterns": frozenset({"dense"})}, {}, "pattern dilated is not supported (has dense)"),
    ({"devices": frozenset({"cuda"})}, {}, "device cpu is not supported (has cuda)"),
    ({"dtypes": frozenset({"float16"})}, {}, "dtype float32 is not supported (has float16)"),
    ({"modes": frozenset({"forward"})}, {"mode": "both"}, "mode both is not supported (has forward)"),
    ({"causal": frozenset({True})}, {"causal": False}, "causal False is not supported (has True)"),
    ({"window": False}, {"window": (5, 0)}, "window (5, 0) is not supported"),
    ({"gqa": False}, {}, "num_kv_heads 3 below num_heads 6 is not supported"),
    ({"head_dim_multiple": 16}, {}, "head_dim 24 is not a multiple of 16"),
    ({"max_head_dim": 16}, {}, "head_dim 24 is above 16"),
    ({}, {"layout": "packed", "cu_seqlens": (0, 96)}, "layout packed is not supported (has padded)"),
    ({"grouped_heads": False}, {"pattern": {**DILATED, "heads": "grouped"}}, "grouped heads are not supported"),
    ({}, {"pattern": {**DILATED, "merge_grad": "detached"}, "mode": "both"}, "merge_grad detached is not supported"),
    ({}, {"pattern": ZERO_KEYS}, "attended zero keys are not supported"),
    ({"check": lambda workload: f"seq_len {workload.seq_len} is odd here"}, {}, "seq_len 96 is odd here"),
]


@pytest.mark.parametrize(("limits", "change", "reason"), REASONS)
def test_capabilities_say_why_not(limits, change, reason):
    assert Capabilities(**limits).reasons(WORKLOAD.replace(**change), "cpu") == (reason,)


def no_rule(*_):
    raise KeyError("a field that only its own patterns have")


@pytest.mark.parametrize("limits", [{"check": no_rule}, {"check_ranks": no_rule}])
def test_rules_are_asked_about_their_own_patterns_only(limits):
    dense = Capabilities(patterns=frozenset({"dense"}), **limits)
    assert dense.reasons(WORKLOAD, "cpu") == ("pattern dilated is not supported (has dense)",)


@functools.cache
def tried_workloads():
    """What `verify --all` tries, of every pattern of ours."""
    return [
        WorkloadRequest.model_validate({**SHAPE, "pattern": kind.name, **fields}).resolve("bfloat16")
        for kind in OWN_KINDS
        for fields in load(kind).trials().values()
    ]


@pytest.mark.parametrize(
    ("name", "device"), half_are_slow(manager.discover().catalogue.implementations.names, ["cpu", "cuda"])
)
def test_our_own_capabilities_answer_for_every_pattern(name, device):
    """Rules of plug-ins that fail become reasons of the catalogue; those of dilabench must not fail."""
    implementation = manager.discover().catalogue.implementations.get(name)
    for limits in (implementation.supports, implementation.preferred_for, implementation.tried_for):
        for asked in tried_workloads():
            assert limits is None or isinstance(limits.reasons(asked, device), tuple)


def test_what_is_supported_has_no_reason_against_it():
    assert Capabilities().reasons(WORKLOAD, "cuda") == ()
    detached = WORKLOAD.replace(pattern={**DILATED, "merge_grad": "detached"})
    assert Capabilities().reasons(detached, "cpu") == (), "the merge has no gradient in a forward pass"
    assert Capabilities().reasons(WORKLOAD, "cpu", world_size=2) == ("runs on 1 device, not on 2",)


@pytest.mark.parametrize(
    ("requirement", "machine", "reason"),
    [
        ("cuda", CPU, "needs a CUDA GPU (no NVIDIA GPU is visible)"),
        ("cuda", HOPPER, None),
        ("cuda>=sm80", HOPPER, None),
        ("cuda>=sm100", HOPPER, "needs cuda sm100 or newer, have sm90"),
        ("gpus>=2", HOPPER, None),
        ("gpus>=3", HOPPER, "needs 3 GPUs, have 2"),
        ("json", CPU, None),
        ("no_such_module_at_all", CPU, "module no_such_module_at_all is not installed"),
        ("no_such_package.part", CPU, "module no_such_package is not installed"),
        ("pydantic>=2.0", CPU, None),
        ("what is this", CPU, "requirement 'what is this' cannot be read; write 'cuda>=sm80' or 'module>=1.2'"),
    ],
)
def test_requirements(requirement, machine, reason):
    assert unmet([requirement], machine) == ((reason,) if reason else ())


def test_a_requirement_names_the_version_that_is_there():
    (reason,) = unmet(["pydantic>=99.1"], CPU)
    assert reason.startswith("needs pydantic 99.1 or newer, have 2.")


@pytest.mark.parametrize(
    ("installed", "needed", "meets"),
    [
        ("2.10", "2.10", True),
        ("2.10rc1", "2.10", False),
        ("2.10rc1", "2.10rc1", True),
        ("2.10", "2.9", True),
        ("2.9.1", "2.10", False),
        ("2.10+cu128", "2.10", True),
        ("2.10.0a0+git1234567", "2.10", False),
        ("2.10.dev20250101", "2.10", False),
        ("2.7.4.post1", "2.7.4", True),
        ("4.0.0b1", "4.0.0b2", False),
        ("1!1.0", "2024.1", True),
        ("of our own", "0.1", False),
    ],
)
@pytest.mark.parametrize("package", ["flash-attn", "flash_attn"])
def test_versions_are_compared_by_pep_440(package, installed, needed, meets, monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: installed)
    monkeypatch.setattr("dilabench.choice.descriptors.installed_version", installed_version.__wrapped__)
    reasons = unmet([f"{package}>={needed}"], CPU, lambda name: ModuleSpec(name, None))
    assert reasons == (() if meets else (f"needs {package} {needed} or newer, have {installed}",))


def test_what_is_installed_is_looked_for_once(monkeypatch):
    looked = []
    monkeypatch.setattr("dilabench.plugins.catalogue.find_spec", lambda name: looked.append(name))
    catalogue = Catalogue()
    for _ in range(2):
        reasons = unmet(["no_such_module_at_all"], CPU, catalogue.find_module)
        assert reasons == ("module no_such_module_at_all is not installed",)
    assert looked == ["no_such_module_at_all"]


@pytest.mark.parametrize("name", ["no_such_module", "no-such-distribution", "no_such_package.module"])
def test_a_module_that_is_not_there_is_not_sought_in_every_distribution(name, monkeypatch):
    monkeypatch.setattr("dilabench.choice.descriptors._distributions_by_module", pytest.fail)
    assert installed_version.__wrapped__(name) is None


def test_a_module_has_the_version_of_the_distribution_that_holds_it():
    assert installed_version.__wrapped__("_pytest") == pytest.__version__


def test_a_required_version_that_is_none_is_refused():
    with pytest.raises(PluginError, match=r"'gather': requires 'torch>=two' cannot be read"):
        implementation("gather", requires=("torch>=two",))


def test_checking_a_requirement_does_not_import_the_module():
    sys.modules.pop("wave", None)
    assert unmet(["wave"], CPU) == ()
    assert "wave" not in sys.modules


def test_reasons_against_a_case_name_the_backend():
    catalogue = Catalogue()
    catalogue.implementations.add(implementation("gather", uses_backend=True), "test")
    catalogue.backends.add(Backend("fast", "no backward", "x:attend", requires=("cuda",)), "test")
    case = Case(implementation="gather", backend="fast", workload=WORKLOAD.replace(mode="both"))
    assert catalogue.reasons_against(case, CPU) == (
        "backend fast: needs a CUDA GPU (no NVIDIA GPU is visible)",
        "backend fast: mode both needs a backward pass, which it lacks",
    )
    forward = case.model_copy(update={"workload": WORKLOAD})
    assert catalogue.reasons_against(forward, HOPPER) == ()


def test_a_backend_is_asked_for_dense_attention_only():
    catalogue = Catalogue()
    catalogue.implementations.add(implementation("gather", uses_backend=True), "test")
    catalogue.backends.add(Backend("plain", "dense only", "x:attend"), "test")
    assert catalogue.reasons_against(Case(implementation="gather", backend="plain", workload=WORKLOAD), CPU) == ()


def test_targets():
    assert load_target("json:dumps")([1]) == "[1]"
    with pytest.raises(PluginError, match=r"has no attribute; write 'package\.module:name'"):
        load_target("json")
    with pytest.raises(PluginError, match="module 'json' has no 'nothing'"):
        load_target("json:nothing")
