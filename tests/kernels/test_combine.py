"""The kernels that combine parts through Triton's interpreter, against their plain form; and that against a formula."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: its interpreter runs these kernels on the CPU")

from dilabench.kernels.combine import combine_, sum_parts_

# A unit in the last place: the interpreter cuts bfloat16 off where a GPU rounds.
ROUNDED = {"float32": 1e-6, "float16": 2**-10, "bfloat16": 2**-7}


@pytest.fixture(scope="module")
def errors(interpreted: Callable[..., dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    return interpreted("kernels/interpreted_combine_cases.py")


CASES = [
    *(("float32", count) for count in range(1, 5)),
    *(("float16", count) for count in (1, 2, 4)),
    *(("bfloat16", count) for count in (1, 3, 4)),
]


@pytest.mark.parametrize(("dtype", "count"), CASES)
def test_kernels_equal_their_plain_form(errors: dict[str, dict[str, float]], dtype: str, count: int) -> None:
    found = errors[f"{dtype}, {count} parts"]
    assert found["empty rows"] > 0, "the case must hold rows that are empty in all parts"
    assert found["wrong empty rows"] == 0.0
    assert max(found["sum"], found["sum in place"], found["out"], found["lse"]) < 1e-6, found
    assert found["lse in place"] < 1e-6, found
    assert max(found["rounded sum"], found["rounded out"], found["rounded out in place"]) <= ROUNDED[dtype], found


def test_ranges_of_rows_become_the_whole_softmax() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 7, 9, dtype=torch.float64, generator=generator)
    values = torch.randn(2, 9, 3, 5, dtype=torch.float64, generator=generator)
    logits[:, :, :2, 4:] = float("-inf")
    parts = []
    for keys, first in ((slice(0, 4), 0), (slice(4, 6), 2), (slice(6, 9), 2)):
        seen = logits[..., first:, keys]
        out = torch.einsum("bhij,bjhd->bihd", torch.softmax(seen, -1), values[:, keys])
        parts.append((out, torch.logsumexp(seen, -1), first))
    out, lse = torch.empty(2, 7, 3, 5, dtype=torch.float64), torch.empty(2, 3, 7, dtype=torch.float64)
    combine_(out, lse, parts)
    whole = torch.einsum("bhij,bjhd->bihd", torch.softmax(logits, -1), values)
    torch.testing.assert_close(out, whole, rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(lse, torch.logsumexp(logits, -1), rtol=1e-13, atol=1e-14)


def test_parts_that_do_not_fit_are_refused() -> None:
    total, part = torch.zeros(1, 4, 2, 8), torch.zeros(1, 3, 2, 8)
    with pytest.raises(ValueError, match="rows from 2 is outside of the result"):
        sum_parts_(total, [(part, 2)])
    with pytest.raises(ValueError, match="at least one"):
        sum_parts_(total, [])
    with pytest.raises(ValueError, match="5 parts: there must be at least one, and at most 4"):
        sum_parts_(total, [(part, 0)] * 5)
    with pytest.raises(ValueError, match="it must be"):
        combine_(total, torch.zeros(1, 2, 4), [(part, torch.zeros(1, 3, 2), 0)])
