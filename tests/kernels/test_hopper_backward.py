"""The backward pass of dilated and block-sparse attention as the Hopper kernel is asked for it: what its launches are
given, walked through in torch. Its machine code is looked at in `test_sm90_compile`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

# How many launches there are: of each group of branches that the kernel takes, for some heads after the other, once
# alone and once added to what is there.
DILATED = {
    "one group": 4,
    "two groups, one in two passes": 4,
    "uncovered rows": 8,
    "odd length": 2,
    # Padded, and as it is.
    "tokens left over": 3,
}
BLOCKS = ("one mask", "mask per head", "shared tiles")


@pytest.fixture(scope="module")
def errors(interpreted: Callable[..., dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    pytest.importorskip("triton", reason="Triton is not installed: its interpreter makes what the launches are given")
    return interpreted("kernels/interpreted_hopper_backward.py")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("case", DILATED)
def test_gradients_of_dilated_attention(errors: dict[str, dict[str, float]], case: str, causal: bool) -> None:
    got = errors[f"{case}, {causal}"]
    assert got.pop("launches") == DILATED[case]
    forms = ("", "added ", "unpadded ") if case == "tokens left over" else ("", "added ")
    assert set(got) == {form + name for form in forms for name in ("dq", "dk", "dv")}
    # float16 results; those that are added to ones are rounded as sums are.
    assert max(error for name, error in got.items() if "added" not in name) < 5e-4, got
    assert max(got.values()) < 2e-3, got


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("case", BLOCKS)
def test_gradients_of_block_sparse_attention(errors: dict[str, dict[str, float]], case: str, causal: bool) -> None:
    got = errors[f"{case}, {causal}"]
    assert got.pop("launches") == 1
    assert set(got) == {"dq", "dk", "dv"}
    assert max(got.values()) < 5e-4, got
