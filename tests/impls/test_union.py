"""What every union of branches promises, whichever way it takes rows."""

from types import ModuleType

import pytest
import torch

from dilabench.backends import math
from dilabench.contracts import BuildContext, LoadedBackend
from dilabench.impls import gather, strided
from dilabench.workload.spec import Workload

CPU = torch.device("cpu")
CONTEXT = BuildContext(device=CPU, backend=LoadedBackend("math", math.attend, math.attend_backward))
DENSE, DILATED = {"kind": "dense"}, {"kind": "dilated", "segment_lengths": (10, 24), "dilation_rates": (2, 3)}
MODULES = pytest.mark.parametrize(
    ("module", "pattern"),
    [(strided, DENSE), (gather, DILATED), (strided, DILATED)],
    ids=["dense", "gather", "strided"],
)


def workload(pattern: dict[str, object] = DILATED) -> Workload:
    return Workload.model_validate(
        {
            "pattern": pattern,
            "batch_size": 2,
            "seq_len": 37,
            "num_heads": 5,
            "num_kv_heads": 5,
            "head_dim": 4,
        }
    )


def inputs() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 37, 5, 4, generator=generator).requires_grad_() for _ in range(3)]


@MODULES
def test_inputs_stay_and_calls_repeat_bitwise(module: ModuleType, pattern: dict[str, object]) -> None:
    tensors = inputs()
    before = [x.detach().clone() for x in tensors]
    attention = module.build(workload(pattern), CONTEXT)
    runs = []
    for _ in range(2):
        out = attention(*tensors)
        dout = out.detach().cos()
        runs.append((out, *torch.autograd.grad(out, tensors, dout)))
        assert torch.equal(dout, out.detach().cos())
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


@MODULES
def test_results_are_fresh_contiguous_tensors(module: ModuleType, pattern: dict[str, object]) -> None:
    tensors = inputs()
    attention = module.build(workload(pattern), CONTEXT)
    out, lse = attention.with_lse(*tensors)
    results = [out, lse, *torch.autograd.grad(out, tensors, torch.ones_like(out))]
    again = attention(*tensors)
    assert all(x.is_contiguous() for x in results)
    assert len({x.untyped_storage().data_ptr() for x in [*results, *tensors, again]}) == 9
    assert lse.dtype == torch.float32
    assert lse.requires_grad


@MODULES
def test_a_backend_without_backward_serves_forward_only(module: ModuleType, pattern: dict[str, object]) -> None:
    context = BuildContext(device=CPU, backend=LoadedBackend("one-way", math.attend))
    tensors = inputs()
    out = module.build(workload(pattern), context)(*tensors)
    with pytest.raises(ValueError, match=r"backend one-way has no backward pass; use mode=forward"):
        out.sum().backward()


@MODULES
def test_no_backend_is_refused_when_building(module: ModuleType, pattern: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="calls a backend"):
        module.build(workload(pattern), BuildContext(device=CPU))


def test_rows_that_no_branch_covers_are_zero_and_have_no_gradient() -> None:
    asked = workload().replace(
        pattern={"kind": "dilated", "segment_lengths": (10,), "dilation_rates": (5,), "offset": "modulo"}
    )
    tensors = inputs()
    for module in (gather, strided):
        out, lse = module.build(asked, CONTEXT).with_lse(*tensors)
        covered = torch.zeros(37, 5, dtype=torch.bool)
        for head in range(5):
            covered[torch.arange(37) % 10 % 5 == head, head] = True
        assert torch.equal(lse > float("-inf"), covered.T.expand(2, -1, -1))
        assert torch.equal((out != 0).any(-1), covered.expand(2, -1, -1))
        for gradient in torch.autograd.grad(out, tensors, torch.ones_like(out)):
            assert not gradient[:, ~covered].any()


def test_only_the_lse_is_used() -> None:
    """A loss that does not reach out has the gradients of lse alone, none for values."""
    tensors = inputs()
    out, lse = strided.build(workload(), CONTEXT).with_lse(*tensors)
    dq, dk, dv = torch.autograd.grad(lse.nan_to_num(neginf=0.0).sum(), tensors, retain_graph=True)
    assert dq.abs().max() > 0
    assert dk.abs().max() > 0
    assert dv.abs().max() == 0
    assert torch.autograd.grad((out * 0).sum(), tensors)[0].abs().max() == 0
