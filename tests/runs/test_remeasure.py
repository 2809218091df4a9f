"""Measuring the cases of a record again."""

from contextlib import nullcontext

import pytest

from dilabench.errors import EnvironmentNotReady
from dilabench.machine import GpuInfo, detect
from dilabench.plugins.manager import discover
from dilabench.runs import remeasure
from dilabench.runs.remeasure import Remeasure


@pytest.mark.parametrize("gpu", ["NVIDIA H200", "NVIDIA H100 80GB HBM3"])
def test_a_record_of_another_device_names_both_before_anything_is_measured(
    make_row, make_record, monkeypatch, tmp_path, gpu
):
    def without_gpu(device="auto"):
        if device == "cuda":
            raise EnvironmentNotReady("no NVIDIA GPU is visible")
        return detect("cpu")

    monkeypatch.setattr(remeasure, "detect", without_gpu)
    record = make_record([make_row()], device="cuda")
    environment = record.environment.model_copy(update={"gpus": (GpuInfo(name=gpu),)})
    like = record.model_copy(update={"environment": environment})
    with pytest.raises(EnvironmentNotReady, match=f"^the baseline is from {gpu}, this is a CPU; "):
        Remeasure(discover(), like, tmp_path, None, nullcontext)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("given", "limit"), [(None, 30), (40, 40)])
def test_a_session_has_the_budget_that_was_given_now(make_row, make_record, tmp_path, given, limit):
    """A reason that a session gives for a missing row names this budget."""
    like = make_record([make_row()], config={"suite": "quick", "budget_s": 30})
    assert Remeasure(discover(), like, tmp_path, None, nullcontext, given).request.budget_s == limit
