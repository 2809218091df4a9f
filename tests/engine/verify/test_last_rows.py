"""Queries that are the last rows of their keys: the oracle, the checks of `verify`, and queries in wrong places."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dilabench.contracts import BuildContext
from dilabench.engine.call.inputs import InputStore, make_inputs
from dilabench.engine.call.prepared_call import PreparedCall
from dilabench.engine.call.specs import CaseSpec
from dilabench.engine.verify import summary, verify
from dilabench.engine.verify.near_misses import WithoutLastKeys
from dilabench.engine.verify.oracle.oracle import Oracle
from dilabench.engine.verify.oracle.reference import build
from dilabench.engine.verify.oracle.sample import choose_sample
from dilabench.engine.verify.timed_outputs import TimedOutputs
from dilabench.patterns.pattern import Pattern, SequenceShape
from dilabench.patterns.registry import pattern_type
from dilabench.plugins.manager import discover
from dilabench.record import Case
from dilabench.workload.spec import Workload
from tests.conftest import half_are_slow, slow, slow_but_every

CPU = torch.device("cpu")
CONTEXT = BuildContext(device=CPU)
EXAMPLES = [example for kind in discover().catalogue.patterns for example in pattern_type(kind.name).examples()]
Function = Callable[[Tensor, Tensor, Tensor], Tensor]


def last_rows(pattern: Pattern, rows: int, **changes: Any) -> Workload:
    shape: dict[str, Any] = {"batch_size": 2, "seq_len": 61, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    shape |= changes
    causal = SequenceShape(shape["seq_len"], 4, 2, True, (-1, -1))
    return Workload(pattern=pattern, causal=pattern.why_not_over(causal) is None, query_len=rows, **shape)


def of_square(workload: Workload, begin: int | None = None) -> Function:
    """The last rows of the whole square, with queries of zeros before them; with `begin`, the rows from there on."""
    square = build(workload.replace(query_len=None), CONTEXT)
    first = workload.first_row if begin is None else begin

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        before, after = first, workload.seq_len - first - q.shape[1]
        whole = torch.nn.functional.pad(q, (0, 0, 0, 0, before, after))
        return square(whole, k, v)[:, first : first + q.shape[1]]

    return attend


@pytest.mark.parametrize(("pattern", "rows"), half_are_slow(EXAMPLES, [1, 13]), ids=str)
def test_results_and_gradients_are_the_last_rows_of_the_square(pattern: Pattern, rows: int) -> None:
    workload = last_rows(pattern, rows, dtype="float64", mode="both")
    inputs = make_inputs(workload, "heads", 1, CPU)
    assert [x.shape[1] for x in (inputs.q, inputs.k, inputs.v)] == [rows, 61, 61]
    given = inputs.distinct
    results = []
    for function in (build(workload, CONTEXT), of_square(workload)):
        out = function(*given)
        results.append((out, *torch.autograd.grad(out, given, out.detach().sin())))
    for ours, square in zip(*results, strict=True):
        torch.testing.assert_close(ours, square, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("pattern", "rows", "dtype"),
    [
        *slow_but_every(2, ((pattern, 13, "float32") for pattern in EXAMPLES)),
        *(slow(pattern, 1, "bfloat16") for pattern in EXAMPLES),
    ],
    ids=str,
)
def test_the_right_function_passes(pattern: Pattern, rows: int, dtype: str) -> None:
    workload = last_rows(pattern, rows, dtype=dtype, mode="both")
    verification = verify(of_square(workload), workload)
    assert verification.passed, summary(verification)
    assert {"dependency", "ones", "dk", "dv"} <= {check.name for check in verification.checks}


def without_last_keys(workload: Workload, missing: int) -> Function:
    short = WithoutLastKeys(inner=workload.pattern, missing=missing)
    function = build(workload.model_copy(update={"pattern": short}), CONTEXT)
    return lambda q, k, v: function(q, k, v)


FIRST = "queries that are the first rows of the keys, not the last"
EARLIER = "queries one position before the last rows (off by one)"
CHUNK = "queries that begin 16 rows before the end, as if 16 were there (a short last chunk)"
BLOCK = "the last 13 keys not read (a short last block of keys)"
MISTAKES: dict[str, Callable[[Workload], Function]] = {
    FIRST: lambda w: of_square(w, 0),
    EARLIER: lambda w: of_square(w, w.first_row - 1),
    CHUNK: lambda w: of_square(w, w.seq_len - 16),
    BLOCK: lambda w: without_last_keys(w, 13),
    "the last key not read": lambda w: without_last_keys(w, 1),
}


# Each mistake with every pattern, over one row or over several.
NEAR_MISSES = [(pattern, rows, mistake) for pattern in EXAMPLES for rows in (1, 11) for mistake in MISTAKES]


# One of seven: seven and ten have no common factor, so that each mistake comes up over one row and over several.
@pytest.mark.parametrize(("pattern", "rows", "mistake"), slow_but_every(7, NEAR_MISSES), ids=str)
def test_a_near_miss_is_caught(pattern: Pattern, rows: int, mistake: str) -> None:
    workload = last_rows(pattern, rows, dtype="float64")
    wrong = MISTAKES[mistake](workload)
    inputs = make_inputs(workload, "heads", 1, CPU).distinct
    same_function = torch.allclose(wrong(*inputs), build(workload, CONTEXT)(*inputs), rtol=1e-12, atol=1e-12)
    verification = verify(wrong, workload)
    assert verification.passed == same_function, summary(verification)


def test_every_near_miss_is_another_function_of_most_patterns() -> None:
    """So the test above compares little with itself."""
    for wrong in MISTAKES.values():
        differ = 0
        for pattern in EXAMPLES:
            workload = last_rows(pattern, 11, dtype="float64")
            inputs = make_inputs(workload, "heads", 1, CPU).distinct
            differ += not torch.equal(wrong(workload)(*inputs), build(workload, CONTEXT)(*inputs))
        assert differ > len(EXAMPLES) / 2


@pytest.mark.parametrize("mistake", [FIRST, EARLIER, CHUNK, BLOCK])
@pytest.mark.parametrize("rows", [1, 11])
@pytest.mark.parametrize("kind", ["dense", "dilated"])
def test_a_near_miss_is_named(kind: str, rows: int, mistake: str) -> None:
    workload = last_rows(pattern_type(kind).examples()[0], rows)
    assert verify(MISTAKES[mistake](workload), workload).diagnosis == f"out is that of {mistake}"


def test_a_late_query_is_caught(make_workload: Callable[..., Workload]) -> None:
    """One position after the last rows: every query but the last sees a key too many."""
    workload = make_workload(pattern={"kind": "dense"}, query_len=7)
    inside = build(workload.replace(seq_len=62), CONTEXT)

    def late(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return inside(torch.cat([q[:, :1], q], 1)[:, 1:], *(torch.cat([x, x[:, -1:]], 1) for x in (k, v)))

    assert not verify(late, workload).passed


def of_whole_tiles(workload: Workload, hidden: bool) -> Function:
    """Reads keys in tiles of 16, also behind the last one if there is memory. hidden: with weights of 0."""
    right = build(workload, CONTEXT)

    def tiled(x: Tensor) -> Tensor:
        room = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset() - (x.shape[0] - 1) * x.stride(0)
        length = min(-(-x.shape[1] // 16) * 16, room // x.stride(1))
        return x.as_strided((x.shape[0], length, *x.shape[2:]), x.stride())

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, behind = tiled(k), tiled(v)[:, v.shape[1] :]
        if hidden:
            return right(q, k[:, : v.shape[1]], v) + 0 * behind.sum()
        return right(q, k[:, : v.shape[1]], v) + behind.sum(1, keepdim=True).repeat_interleave(2, 2)

    return attend


@pytest.mark.parametrize("mode", ["forward", "both"])
@pytest.mark.parametrize("rows", [1, 13])
@pytest.mark.parametrize("hidden", [True, False])
def test_keys_behind_the_last_are_not_read(hidden: bool, rows: int, mode: str) -> None:
    """Nor is there anything behind them in tensors of their own, so that only a cache shows it."""
    workload = last_rows(pattern_type("dense")(), rows, mode=mode, batch_size=1)
    verification = verify(of_whole_tiles(workload, hidden), workload)
    failing = [check for check in verification.checks if not check.passed]
    assert [check.name for check in failing] == ["cache"]
    assert "NaN before and behind them: no other key may be read" in summary(verification)


@pytest.mark.parametrize(("pattern", "rows"), half_are_slow(EXAMPLES, [1, 5, 500]), ids=str)
def test_samples_are_drawn_among_the_queries(pattern: Pattern, rows: int) -> None:
    workload = last_rows(pattern, rows, seq_len=2**14, batch_size=2**8)
    sample = choose_sample(workload, 3)
    assert 0 <= int(sample.rows.min()) <= int(sample.rows.max()) == rows - 1
    if sample.keys is not None:
        assert set((sample.rows + workload.first_row).tolist()) <= set(sample.keys.tolist())


def test_places_in_messages_are_positions_of_the_keys() -> None:
    workload = last_rows(EXAMPLES[0].match(EXAMPLES[0]), 3)
    right = of_square(workload)

    def last_is_zero(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = right(q, k, v).clone()
        out[:, -1] = 0
        return out

    assert "position 60" in summary(verify(last_is_zero, workload))


def test_a_key_that_the_rows_see_is_probed() -> None:
    pattern = pattern_type("dilated")(segment_lengths=(64, 4096), dilation_rates=(1, 64))
    workload = last_rows(pattern, 1, seq_len=4096)
    seen = [key for head in range(4) for key in Oracle(workload).planes.keys if _sees(workload, head, key)]
    assert len(set(seen)) > 1


def _sees(workload: Workload, head: int, key: int) -> bool:
    from dilabench.workload.visibility import seen_by

    return len(seen_by(workload, head, key)) > 0


def build_wrong_later(workload: Workload, context: object) -> Function:
    """Right in the first calls, then from queries that are one position too early."""
    right, wrong, calls = build(workload, CONTEXT), of_square(workload, workload.first_row - 1), 0

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return (right if calls < 6 else wrong)(q, k, v)

    return attend


def build_remembering_keys(workload: Workload, context: object) -> Function:
    """Keys and values of the first call at an address, whatever they hold in later calls."""
    right, known = build(workload, CONTEXT), {}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kept = known.setdefault((k.data_ptr(), v.data_ptr()), (k.detach().clone(), v.detach().clone()))
        return right(q, *kept)

    return attend


def build_right(workload: Workload, context: object) -> Function:
    """The last rows of the square."""
    return of_square(workload)


@pytest.mark.parametrize("rows", [1, 13])
@pytest.mark.parametrize(
    ("target", "mode", "passed"),
    [
        ("build_right", "forward", True),
        ("build_right", "both", True),
        ("build_wrong_later", "forward", False),
        ("build_wrong_later", "both", False),
        ("build_remembering_keys", "forward", False),
    ],
)
def test_timed_calls_are_checked(target: str, mode: str, passed: bool, rows: int) -> None:
    workload = last_rows(pattern_type("dense")(), rows, mode=mode)
    spec = CaseSpec(case=Case(implementation="own", workload=workload), target=f"{__name__}:{target}", seed=3)
    call = PreparedCall(spec, CPU, InputStore(CPU))
    call.timed_calls.begin(last=True)
    for _ in range(12):
        call.fresh()()
    verification = TimedOutputs(call).check(call.timed_calls.end())
    assert verification.passed == passed, [check for check in verification.checks if not check.passed]
    assert all(row < rows for _, _, row, _ in verification.timed_rows)
