"""`gather` keeps its indices in the pattern cache and its copies in the buffer pool."""

import pytest
import torch
from torch import Tensor

from dilabench.backends import math
from dilabench.contracts import BuildContext, LoadedBackend, NoPool, PatternCache
from dilabench.impls import gather
from dilabench.impls.union.gathered_rows import gathered_rows
from dilabench.workload.spec import Workload

CPU = torch.device("cpu")
BACKEND = LoadedBackend("math", math.attend, math.attend_backward)
WORKLOAD = Workload.model_validate(
    {
        "pattern": {"kind": "dilated", "segment_lengths": (10, 24, 60), "dilation_rates": (1, 3, 4)},
        "batch_size": 2,
        "seq_len": 60,
        "num_heads": 8,
        "num_kv_heads": 2,
        "head_dim": 5,
    }
)


class CountingPool:
    """Hands out fresh buffers full of NaN, fills what comes back with NaN, and remembers both."""

    def __init__(self) -> None:
        self.lent: dict[int, Tensor] = {}
        self.requests = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        self.requests += 1
        buffer = torch.full(shape, float("nan"), dtype=dtype, device=device)
        self.lent[id(buffer)] = buffer
        return buffer

    def give(self, buffer: Tensor) -> None:
        self.lent.pop(id(buffer)).fill_(float("nan"))

    def counters(self) -> dict[str, int]:
        return {}


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 60, heads, 5, generator=generator).requires_grad_() for heads in (8, 2, 2)]


def results(attention: object, tensors: list[Tensor]) -> tuple[Tensor, ...]:
    out, lse = attention.with_lse(*tensors)  # type: ignore[attr-defined]
    return (out, lse, *torch.autograd.grad(out, tensors, torch.ones_like(out)))


@pytest.mark.parametrize("merge_grad", ["exact", "detached"])
def test_every_buffer_goes_back_and_none_gets_out(merge_grad: str) -> None:
    workload = WORKLOAD.replace(pattern=WORKLOAD.pattern.model_copy(update={"merge_grad": merge_grad}))
    pool = CountingPool()
    tensors = inputs()
    pooled = results(gather.build(workload, BuildContext(device=CPU, backend=BACKEND, buffers=pool)), tensors)
    plain = results(gather.build(workload, BuildContext(device=CPU, backend=BACKEND)), tensors)
    assert pool.requests > 0
    assert not pool.lent
    for actual, value in zip(pooled, plain, strict=True):
        assert torch.equal(actual, value)


def test_indices_are_built_once_with_a_cache_and_every_pass_without() -> None:
    for size, misses in ((64, 1), (0, 2)):
        patterns = PatternCache(size)
        results(gather.build(WORKLOAD, BuildContext(device=CPU, backend=BACKEND, patterns=patterns)), inputs())
        assert patterns.misses == misses
        assert patterns.hits == 2 - misses


def test_no_index_comes_twice() -> None:
    """Otherwise adding gradients would depend on the order of additions."""
    for rows in gathered_rows(WORKLOAD, CPU, NoPool()):
        for flat in (rows.query_index, rows.key_index, rows.lse_index):
            assert len(flat.unique()) == len(flat)


def test_one_call_per_branch_where_heads_keep_equally_many_rows() -> None:
    workload = Workload.model_validate(
        {
            **WORKLOAD.model_dump(),
            "pattern": {"kind": "dilated", "segment_lengths": (12, 24), "dilation_rates": (2, 4)},
            "seq_len": 48,
            "num_kv_heads": 8,
        }
    )
    assert len(gathered_rows(workload, CPU, NoPool())) == 2
