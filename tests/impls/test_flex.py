"""`flex` and `flex-permuted`: mask and score give the function. On a CPU, FlexAttention only goes forward."""

import pytest
import torch

from dilabench.contracts import BuildContext
from dilabench.impls import reference
from dilabench.impls.flex import flex
from dilabench.workload.spec import WorkloadRequest

CASES = {
    "nested": {"seq_len": 256, "segment_lengths": (64, 128, 256), "dilation_rates": (1, 2, 4), "causal": False},
    "gqa": {"seq_len": 192, "num_kv_heads": 2, "segment_lengths": (64, 96, 192), "dilation_rates": (1, 2, 6)},
    "window": {"seq_len": 150, "segment_lengths": (64, 100), "dilation_rates": (2, 3), "window": (30, 0)},
    "grouped": {"seq_len": 130, "segment_lengths": (64, 128), "dilation_rates": (2, 4), "heads": "grouped"},
    "blocked": {"seq_len": 131, "segment_lengths": (50, 200), "dilation_rates": (1, 3), "offset": "blocked"},
}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("build", [flex.build, flex.build_permuted])
@pytest.mark.parametrize("case", CASES)
def test_equals_the_oracle(build, case: str) -> None:
    request = WorkloadRequest.model_validate({"batch_size": 2, "num_heads": 4, "head_dim": 24, **CASES[case]})
    workload = request.resolve("float32")
    context = BuildContext(device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(3)
    shape = (workload.batch_size, workload.seq_len)
    q = torch.randn(*shape, 4, 24, generator=generator)
    k, v = (torch.randn(*shape, workload.num_kv_heads, 24, generator=generator) for _ in range(2))
    out = build(workload, context)(q, k, v)
    right = reference.build(workload, context)(q, k, v)
    torch.testing.assert_close(out, right, rtol=2e-6, atol=2e-6)
