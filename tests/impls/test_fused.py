"""`fused` against the oracle, through Triton's interpreter: planned branches, branches on their own, and both."""

import pytest

pytest.importorskip("triton", reason="Triton is not installed: its interpreter runs these kernels on the CPU")

PER_BRANCH = {
    "planned": False,
    "gqa causal": False,
    "rates that do not divide": False,
    "window": False,
    "window of branches that nest": False,
    "wide rates": True,
    "wide rates, window": True,
    "rates without a common multiple, batch": True,
    "zero keys": False,
    "zero keys, ragged": False,
    "detached": False,
    "detached, zero keys": False,
    "detached, rates that do not divide": False,
    "detached, wide rates": True,
    "detached, window": False,
    "detached, packed": False,
    "detached, grouped": False,
    "packed": False,
    "grouped": False,
    "grouped, more branches than heads, gqa": False,
    "grouped, rates that do not divide": False,
}


@pytest.fixture(scope="module")
def errors(interpreted) -> dict[str, dict[str, float]]:
    return interpreted("impls/fused_cases.py", "-W", "ignore")


@pytest.mark.slow
@pytest.mark.parametrize("case", PER_BRANCH)
def test_equals_the_oracle(errors: dict[str, dict[str, float]], case: str) -> None:
    found = dict(errors[case])
    assert bool(found.pop("per branch")) == PER_BRANCH[case]
    assert found.pop("empty rows") == 0
    assert max(found.values()) < 5e-6, found
