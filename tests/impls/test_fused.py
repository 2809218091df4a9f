"""`fused` against the oracle, through Triton's interpreter: outputs, lse and gradients."""

import pytest
import torch

from dilabench.contracts import BuildContext
from dilabench.workload.spec import Workload

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
    return interpreted("impls/fused_cases.py")


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_equals_the_oracle(errors: dict[str, dict[str, float]], case: str) -> None:
    found = dict(errors[case])
    assert found.pop("empty rows") == 0
    assert max(found.values()) < 5e-6, found


@pytest.mark.parametrize("merge_grad", ["exact", "detached"])
def test_zero_keys_of_the_latest_packings_alone_are_kept(merge_grad: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import JITFunction

    from dilabench.impls import fused

    # What writes them needs a GPU.
    monkeypatch.setattr(JITFunction, "run", lambda *_arguments, **_options: None)
    pattern = {"kind": "dilated", "segment_lengths": (12, 60), "dilation_rates": (2, 5), "padding": "zero_key"}
    workload = Workload.model_validate(
        {
            "pattern": {**pattern, "merge_grad": merge_grad},
            "batch_size": 1,
            "seq_len": 60,
            "num_heads": 4,
            "num_kv_heads": 4,
            "head_dim": 16,
            "dtype": "float16",
            "causal": False,
            "mode": "both",
            "layout": "packed",
            "cu_seqlens": (0, 20, 60),
        }
    )
    made = fused.build(workload, BuildContext(device=torch.device("cpu")))
    packings, q = made.packings, torch.zeros(1, 60, 4, 16)
    assert packings is not None
    for at in range(1, 50):
        packing = packings.of((0, at, 60)).packing
        found = packings.zero_keys(packing, q)
        assert len(found) == (1 if merge_grad == "exact" else 2)
        assert packings.zero_keys(packing, q) is found
        assert len(packings._kept) <= 2
