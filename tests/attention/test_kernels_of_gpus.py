"""Calls with the options of models by the kernels of a GPU, forward and backward, gradients of lse among them: through
Triton's interpreter in float32, and on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: its interpreter runs these kernels on the CPU")

from tests.attention.compared import BOUNDS
from tests.attention.every_call import CALLS
from tests.conftest import slow

# By what computes it: on a CPU, other kernels would.
QUICK = {
    "capped detached packed": "FusedDetached",
    "padded capped dilated": "Fused",
    "window_sink": "Planned",
    "selected_blocks": "selected-blocks",
}
REST = [name for name in CALLS if name not in QUICK]
# Of each kind of kernel one in float32, which takes longer to compile.
WIDE = ("dilated", "capped", "detached", "window_sink", "topk_blocks", "selected_blocks", "padded capped")
Found = dict[str, tuple[dict[str, float], list[str]]]


@pytest.fixture(scope="module", params=[pytest.param([*QUICK], id="quick"), slow(REST)], ids=["quick", "rest"])
def found(request: pytest.FixtureRequest, interpreted: Callable[..., Found]) -> Found:
    return interpreted("attention/interpreted_patterns.py", request.param)


def test_results_and_gradients_in_the_interpreter(found: Found) -> None:
    wrong = {name: errors for name, (errors, _) in found.items() if not max(errors.values()) <= BOUNDS[torch.float32]}
    assert not wrong
    assert all({"out", "query", "key", "value"} <= errors.keys() for errors, _ in found.values())
    used = {name: kernels for name, (_, kernels) in found.items() if name in QUICK}
    assert used == {name: [QUICK[name]] for name in used}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(pytest.param(name, torch.bfloat16, id=f"{name}-bfloat16") for name in CALLS),
        *(pytest.param(name, torch.float32, id=f"{name}-float32") for name in WIDE),
    ],
)
def test_results_and_gradients_on_a_gpu(monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype) -> None:
    # Other kernels would be compiled and measured first.
    monkeypatch.setenv("DILABENCH_FIRST_USE", "0")
    errors = CALLS[name](dtype, "cuda")
    assert max(errors.values()) <= BOUNDS[dtype], errors
