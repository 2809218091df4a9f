"""`fused` against the oracle, through Triton's interpreter: outputs, lse and gradients."""

import pytest

pytest.importorskip("triton", reason="Triton is not installed: its interpreter runs these kernels on the CPU")

CASES = (
    "planned",
    "gqa causal",
    "rates that do not divide",
    "window",
    "window of branches that nest",
    "zero keys",
    "zero keys, ragged",
    "detached",
    "detached, zero keys",
    "detached, rates that do not divide",
    "detached, window",
    "detached, packed",
    "detached, grouped",
    "packed",
    "grouped",
    "grouped, more branches than heads, gqa",
    "grouped, rates that do not divide",
)


@pytest.fixture(scope="module")
def errors(interpreted) -> dict[str, dict[str, float]]:
    return interpreted("impls/fused_cases.py", "-W", "ignore")


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_equals_the_oracle(errors: dict[str, dict[str, float]], case: str) -> None:
    found = dict(errors[case])
    assert found.pop("empty rows") == 0
    assert max(found.values()) < 5e-6, found
