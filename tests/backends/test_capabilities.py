"""What the built-in backends say they cannot do, before anything is imported."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import pytest

from dilabench.choice.descriptors import installed_version, unmet
from dilabench.machine import Machine
from dilabench.plugins.manager import discover
from dilabench.record import GpuInfo
from dilabench.workload.spec import Workload

BACKENDS = discover().catalogue.backends
CPU = Machine(device="cpu", no_cuda="no NVIDIA GPU is visible")
HOPPER = Machine(device="cuda", gpus=(GpuInfo(name="H200", compute_capability="9.0"),))
TURING = Machine(device="cuda", gpus=(GpuInfo(name="T4", compute_capability="7.5"),))


def workload(**changes: Any) -> Workload:
    shape = {"batch_size": 1, "seq_len": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "dtype": "bfloat16"}
    return Workload.model_validate({"pattern": {"kind": "dense"}, **shape, **changes})


@pytest.mark.parametrize(
    ("name", "device", "changes", "word"),
    [
        ("sdpa-flash", "cpu", {"dtype": "float64", "head_dim": 300}, None),
        ("sdpa-flash", "cuda", {}, None),
        ("sdpa-flash", "cuda", {"dtype": "float32"}, "float32"),
        ("sdpa-flash", "cuda", {"head_dim": 264}, "264"),
        ("sdpa-flash", "cuda", {"window": (5, 3), "causal": False}, None),
        ("sdpa-efficient", "cuda", {"dtype": "float32", "window": (5, 0)}, None),
        ("sdpa-efficient", "cuda", {"window": (5, -1)}, None),
        ("sdpa-efficient", "cuda", {"window": (5, -1), "causal": False}, "looks ahead"),
        ("sdpa-efficient", "cuda", {"window": (5, 3), "causal": False}, "looks ahead"),
        ("sdpa-efficient", "cpu", {}, "device cpu"),
        ("sdpa-cudnn", "cuda", {"window": (5, 0)}, "window"),
        ("sdpa-cudnn", "cuda", {"head_dim": 136}, "136"),
        ("sdpa-cudnn", "cuda", {"head_dim": 20}, None),
        ("flash4", "cuda", {"dtype": "float16", "window": (5, 3), "causal": False}, None),
        ("flex", "cuda", {"dtype": "float32"}, None),
        ("math", "cpu", {"dtype": "float64", "head_dim": 7, "window": (1, 1), "causal": False}, None),
    ],
)
def test_reasons(name: str, device: str, changes: dict[str, Any], word: str | None) -> None:
    reasons = BACKENDS.get(name).supports.reasons(workload(**changes), device)
    assert (not reasons) if word is None else (len(reasons) == 1 and word in reasons[0])


def test_sdpa_flash_runs_on_a_cpu_and_on_ampere_but_not_before() -> None:
    requires = BACKENDS.get("sdpa-flash").requires
    assert unmet(requires, CPU) == ()
    assert unmet(requires, HOPPER) == ()
    assert unmet(requires, TURING) == ("needs cuda sm80 or newer, have sm75 or needs cpu, have cuda",)


def test_distributions_that_share_a_module_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"flash-attn-4": "4.0.0b36"}

    def version(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr("dilabench.choice.descriptors.installed_version", installed_version.__wrapped__)
    modules = {"cutlass"}
    flash4 = BACKENDS.get("flash4").requires
    assert unmet(flash4, HOPPER, lambda name: name in modules or None) == ()
    modules.clear()
    assert unmet(flash4, HOPPER, lambda name: name in modules or None) == ("module cutlass is not installed",)
    assert unmet(BACKENDS.get("flash2").requires, HOPPER) == ("distribution flash-attn is not installed",)
    installed["flash-attn"] = "2.6.3"
    assert unmet(BACKENDS.get("flash2").requires, HOPPER) == ("needs flash-attn 2.7 or newer, have 2.6.3",)


def test_catalogue_names() -> None:
    ours = [b.name for b in BACKENDS if BACKENDS.origin(b.name) == "builtin"]
    of_libraries = ["sdpa-efficient", "sdpa-cudnn", "flash2", "flash3", "flash4", "xformers", "flex"]
    assert ours == ["math", "sdpa-flash", "sdpa", "flash-cpu", *of_libraries]
