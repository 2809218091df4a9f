from __future__ import annotations

import math as numbers

import pytest
import torch
from torch import Tensor

from dilabench.backends import math
from dilabench.backends.probe import probe
from dilabench.backends.trial import Finding, Layout, Trial, findings, laid_out

CPU = torch.device("cpu")


def test_a_right_backend_passes() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        assert all(f.passed for f in findings(math.attend, math.attend_backward, Trial(dtype=dtype), CPU))


def test_every_result_is_compared() -> None:
    names = {f.name for f in findings(math.attend, math.attend_backward, Trial(), CPU)}
    assert names == {"out", "lse", "dq", "dk1", "dv1", "dk2", "dv2"}


def test_a_forward_without_its_mask_is_found() -> None:
    def leaky(q: Tensor, k: Tensor, v: Tensor, **options: object) -> tuple[Tensor, Tensor]:
        return math.attend(q, k, v, **{**options, "causal": False})  # type: ignore[arg-type]

    wrong = {f.name for f in findings(leaky, math.attend_backward, Trial(), CPU) if not f.passed}
    assert {"out", "lse"} <= wrong


def test_a_backward_that_recomputes_its_own_lse_is_found() -> None:
    def local(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, **options: object) -> object:
        out, lse = math.attend(q, k, v, **options)  # type: ignore[arg-type]
        return math.attend_backward(dout, q, k, v, out, lse, **options)  # type: ignore[arg-type]

    wrong = {f.name for f in findings(math.attend, local, Trial(), CPU) if not f.passed}  # type: ignore[arg-type]
    assert wrong == {"dq", "dk1", "dv1", "dk2", "dv2"}


def test_nan_does_not_pass() -> None:
    assert not Finding("out", numbers.nan, 1.0).passed


@pytest.mark.parametrize("layout", ["contiguous", "diagonal", "every_other"])
def test_layouts_keep_the_values(layout: Layout) -> None:
    x = torch.randn(2, 5, 3, 8)
    view = laid_out(x, layout)
    assert torch.equal(view, x)
    assert view.is_contiguous() == (layout == "contiguous")


@pytest.mark.slow
def test_probe_answers_from_its_own_process() -> None:
    module = "dilabench.backends.math"
    assert probe(f"{module}:attend", f"{module}:attend_backward", "cpu") is None
    assert "no_such_library" in str(probe("no_such_library:attend", None, "cpu"))


def test_probe_is_bounded_in_time() -> None:
    assert probe("dilabench.backends.math:attend", None, "cpu", timeout_s=0.05) == "the probe did not end within 0.05 s"
