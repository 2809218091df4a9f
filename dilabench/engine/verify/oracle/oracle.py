"""The right results of a workload on its sampled rows, with tolerances; one oracle serves all its implementations."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dilabench.engine.call.inputs import TORCH_DTYPE, input_shapes
from dilabench.engine.verify.oracle.blocks import RowsOf, accumulation_dtype
from dilabench.engine.verify.oracle.formula import attend_rows, attend_rows_backward
from dilabench.engine.verify.oracle.planes import Planes, make_planes
from dilabench.engine.verify.oracle.rounding import Rows, alike_weights, gradient_sizes, sized_rows
from dilabench.engine.verify.oracle.sample import Sample, choose_sample
from dilabench.engine.verify.oracle.tolerance import (
    LSE_FLOOR_ULPS,
    Expected,
    eps,
    expect,
    gradient_floor_ulps,
    out_floor_ulps,
    plain_dtype,
)
from dilabench.workload.spec import Workload

# Rows on which the second call is compared; its other rows serve the dependency probe.
SECOND_CALL_ROWS = 16
# Rows that show how alike the weights are.
ALIKE_ROWS = 32
# Standard deviation of the scores of random rows in the call with large scores. The largest is about 90 of 500 keys,
# whose exponential no float32 holds.
LARGE_SCORES = 30.0


@dataclass(frozen=True)
class SecondCall:
    """The expected results of the calls with other inputs.

    rows: indices of the rows that are compared, spread over the sampled ones. expected: out of each call on them,
    [b, R', H, D]. ones_error: the largest error of the plain computation on them if v is 1.
    """

    rows: Tensor
    expected: tuple[Expected, ...]
    ones_error: float


class Oracle:
    """Inputs and expected results of one workload, seed and device; everything expected is computed on first use.

    Pass one Oracle to `verify` for all implementations of a workload. Inputs are as `takes` says
    (plugins/descriptors.py), packed ones without the batch axis; expected values always have it. `restore` draws the
    inputs again, for when a function has changed them. sample: the rows to compare, chosen by the seed by default.
    """

    def __init__(
        self,
        workload: Workload,
        *,
        takes: str = "heads",
        seed: int = 0,
        device: torch.device | str = "cpu",
        sample: Sample | None = None,
    ) -> None:
        self.workload = workload
        self.takes = takes
        self.seed = seed
        self.device = torch.device(device)
        self.dtype = TORCH_DTYPE[workload.dtype]
        self.sample = sample or choose_sample(workload, seed)
        self.inputs: tuple[Tensor, ...] = self._draw_inputs()
        # A module around an attention (cores.Shell) and what is expected of it, for the next equal module.
        self.around: tuple[Any, dict[str, Expected]] | None = None

    def restore(self) -> None:
        """Draw the inputs again, in new memory."""
        self.inputs = self._draw_inputs()

    def _draw_inputs(self) -> tuple[Tensor, ...]:
        generator = torch.Generator(self.device).manual_seed(self.seed)
        return tuple(
            torch.randn(shape, generator=generator, device=self.device, dtype=self.dtype)
            for shape in input_shapes(self.workload, self.takes)
        )

    def positions(self, rows: Tensor | None = None) -> Tensor:
        """The positions of some queries, by default of all: the last positions of the keys."""
        rows = torch.arange(self.workload.rows) if rows is None else rows
        return rows + self.workload.first_row

    @property
    def out_shape(self) -> torch.Size:
        """Shape that the function's out must have: the shape of its first input, in the width of its last."""
        return torch.Size((*self.inputs[0].shape[:-1], self.inputs[-1].shape[-1]))

    @cached_property
    def full_dout(self) -> Tensor:
        """A random gradient of out, in every row."""
        generator = torch.Generator(self.device).manual_seed(self.seed + 2**31)
        return torch.randn(self.out_shape, generator=generator, device=self.device, dtype=self.dtype)

    @cached_property
    def sampled_dout(self) -> Tensor:
        """`full_dout` on the sampled rows, zero elsewhere.

        The gradient is linear in dout: with this one, dq, dk and dv follow exactly from the sampled rows, even if all
        rows would be too many.
        """
        if self.sample.complete:
            return self.full_dout
        dout = torch.zeros_like(self.full_dout)
        rows = self.batched(self.full_dout)[self._place()]
        self.batched(dout)[self._place()] = rows
        return dout

    def batched(self, tensor: Tensor) -> Tensor:
        """A view with the batch axis that packed tensors lack."""
        return tensor[None] if self.workload.layout == "packed" else tensor

    def chosen(self, tensor: Tensor) -> Tensor:
        """The sampled batches of a tensor of any of these shapes; the tensor itself if all are sampled."""
        tensor, batches = self.batched(tensor), self.sample.batches
        return tensor if len(batches) == tensor.shape[0] else tensor[batches.to(self.device)]

    def sampled(self, tensor: Tensor) -> Tensor:
        """The sampled batches and rows of a tensor of out's shape, [b, R, ...]."""
        return self.batched(tensor) if self.sample.complete else self.batched(tensor)[self._place()]

    def sampled_keys(self, tensor: Tensor) -> Tensor:
        """The sampled batches and key positions of a tensor of k's shape, [b, S, K, D]."""
        tensor = self.chosen(tensor)
        return tensor if self.sample.keys is None else tensor[:, self.sample.keys.to(self.device)]

    def _place(self) -> tuple[Tensor, Tensor]:
        return self.sample.batches.to(self.device)[:, None], self.sample.rows.to(self.device)[None, :]

    @property
    def _heads(self) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (self.chosen(tensor) for tensor in self.inputs)
        return q, k, v

    @cached_property
    def expected(self) -> tuple[Expected, Expected]:
        """out [b, R, H, D] and lse [b, H, R] on the sampled rows."""
        return expected_rows(self.exact, self.workload, self.dtype, *self._plain)

    @cached_property
    def exact(self) -> Rows:
        """out and lse on the sampled rows with their natural sizes, without what they may be off by."""
        return exact_rows(self._heads, self.workload, self.sample.rows, self.dtype)

    @cached_property
    def _plain(self) -> tuple[tuple[Tensor, Tensor], float]:
        """out and lse of the plain computation on the sampled rows, and how alike their weights are."""
        plain = attend_rows(*self._heads, self.workload, self.sample.rows, plain_dtype(self.dtype))
        return plain, self._alike()

    def _alike(self) -> float:
        """`alike_weights` of some rows; 0 where a rounded weight is as exact as the result can be."""
        if eps(self.dtype) <= eps(torch.float32):
            return 0.0
        rows = self.sample.rows
        rows = rows[torch.linspace(0, len(rows) - 1, min(ALIKE_ROWS, len(rows))).long()]
        q, k, _ = self._heads
        _, lse = attend_rows(*self._heads, self.workload, rows)
        return alike_weights(q, k, lse, self.workload, rows)

    @cached_property
    def gradients(self) -> tuple[Expected, Expected, Expected]:
        """dq [b, R, H, D] on the sampled rows, dk and dv [b, S, K, D] on the sampled keys, for `sampled_dout`."""
        dout, rows, keys = self.sampled(self.full_dout), self.sample.rows, self.sample.keys
        exact, sizes = self.exact_gradients()
        dtype = plain_dtype(self.dtype)
        results, alike = self._plain
        plain = attend_rows_backward(dout, *self._heads, *results, self.workload, rows, keys, dtype)
        floor = gradient_floor_ulps(self.workload, self.dtype)
        dq, dk, dv = (
            expect(*parts, self.workload, self.dtype, floor, alike) for parts in zip(exact, sizes, plain, strict=True)
        )
        return dq, dk, dv

    def exact_gradients(self) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
        """dq, dk and dv as in `gradients`, and their natural sizes, without what they may be off by."""
        dout, rows, keys = self.sampled(self.full_dout), self.sample.rows, self.sample.keys
        out, lse = self.exact.out, self.exact.lse
        exact = attend_rows_backward(dout, *self._heads, out, lse, self.workload, rows, keys)
        return exact, gradient_sizes(dout, *self._heads, lse, self.workload, rows, keys, exact)

    @cached_property
    def planes(self) -> Planes:
        """Which keys the second call probes."""
        return make_planes(self.workload, self.seed)

    def second_inputs(self, call: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Other q and k, and the values of the planes (planes.py), not kept."""
        q, k, v = self.inputs
        # q·k then has a standard deviation of 1/2, so that no attention weight is too small to be seen.
        gain = 0.5 / (self.workload.softmax_scale * self.workload.head_dim**0.5)
        values = torch.zeros_like(v)
        self.planes.fill(self.batched(values), call)
        return q.roll(1, -1).mul_(-gain), k.flip(-1), values

    @cached_property
    def second(self) -> SecondCall:
        """The expected results of each call with `second_inputs`."""
        rows = self.sample.rows
        rows = rows[torch.linspace(0, len(rows) - 1, min(SECOND_CALL_ROWS, len(rows))).long()]
        results, dtype = [], plain_dtype(self.dtype)
        for call in range(self.planes.calls):
            q, k, v = (self.chosen(tensor) for tensor in self.second_inputs(call))
            plain = attend_rows(q, k, v, self.workload, rows, dtype)
            exact = exact_rows((q, k, v), self.workload, rows, self.dtype)
            results.append(expected_rows(exact, self.workload, self.dtype, plain)[0])
        q, k, v = (self.chosen(tensor) for tensor in self.second_inputs())
        ones, _ = attend_rows(q, k, v[..., :1], self.workload, rows, dtype)
        error = float((ones[..., 0].double() - results[0].value[..., 0]).abs().max())
        error *= eps(self.dtype) / eps(dtype) if self.dtype == torch.float64 else 1.0
        return SecondCall(rows, tuple(results), error)

    def large_inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """q of a scale that differs from row to row, so that some rows have large scores, and k and v; not kept."""
        q, k, v = self.inputs
        gain = LARGE_SCORES / (self.workload.softmax_scale * self.workload.head_dim**0.5)
        generator = torch.Generator().manual_seed(self.seed + 3)
        is_large = torch.randint(0, 2, (self.workload.rows, 1, 1), generator=generator).bool()
        # Every second one of the compared rows.
        is_large[self.second.rows] = (torch.arange(len(self.second.rows)) % 2 == 0)[:, None, None]
        return q * torch.where(is_large, gain, gain / LARGE_SCORES).to(q), k, v

    @cached_property
    def large_expected(self) -> Expected:
        """out of the call with large scores on the rows of `second`, [b, R', H, D]."""
        q, k, v = (self.chosen(tensor) for tensor in self.large_inputs())
        plain = attend_rows(q, k, v, self.workload, self.second.rows, plain_dtype(self.dtype))
        exact = exact_rows((q, k, v), self.workload, self.second.rows, self.dtype)
        return expected_rows(exact, self.workload, self.dtype, plain)[0]


def exact_rows(heads: tuple[Tensor, Tensor, Tensor], workload: Workload, rows: RowsOf, dtype: torch.dtype) -> Rows:
    """out and lse of the queries `rows`, from q [B, M, H, D] and k, v [B, N, K, D], with natural sizes in `dtype`."""
    return sized_rows(*heads, workload, rows, weight_ulps=eps(accumulation_dtype(dtype)) / eps(dtype))


def expected_rows(
    exact: Rows, workload: Workload, dtype: torch.dtype, plain: tuple[Tensor, Tensor], alike: float = 0.0
) -> tuple[Expected, Expected]:
    """The right out and lse. plain: the results of `attend_rows` in `plain_dtype(dtype)`. alike:
    `rounding.alike_weights`.
    """
    plain_out, plain_lse = plain
    lse_dtype = accumulation_dtype(dtype)
    lse = expect(exact.lse, exact.lse_size, plain_lse, workload, lse_dtype, LSE_FLOOR_ULPS)
    return expect(exact.out, exact.size, plain_out, workload, dtype, out_floor_ulps(dtype), alike), lse
