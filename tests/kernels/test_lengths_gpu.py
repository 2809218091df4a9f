"""A new length compiles nothing: counted over twenty lengths, forward and backward."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: there is nothing to compile")


from dilabench.attention import dilated_attention

pytestmark = pytest.mark.gpu
LENGTHS = (
    10000,
    *range(10001, 10008),
    11111,
    12345,
    16384,
    17000,
    20000,
    20001,
    25000,
    31111,
    32768,
    40961,
    50000,
    65537,
)
# The first is Prov-GigaPath's; segments that nest, that do not, and head dims that are no power of two.
BRANCHES = {
    "gigapath": ((1024, 5792, 32768, 185363, 1048576), (1, 2, 4, 8, 16), 48, False),
    "nested": ((2048, 4096, 8192), (1, 2, 4), 64, True),
    "Hopper's kernel": ((2048, 4096, 8192), (1, 2, 4), 128, False),
}


@pytest.mark.parametrize("name", BRANCHES)
def test_lengths_after_the_first_compile_nothing(compiled_kernels: list[str], name: str) -> None:
    segments, rates, dim, causal = BRANCHES[name]

    def call(length: int) -> None:
        q, k, v = (torch.randn(1, length, 8, dim, device="cuda", dtype=torch.float16) for _ in range(3))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = dilated_attention(*leaves, segment_lengths=segments, dilation_rates=rates, causal=causal)
        torch.autograd.grad(out.float().sum(), leaves)

    call(LENGTHS[0])
    compiled_kernels.clear()
    for length in LENGTHS[1:]:
        call(length)
    assert compiled_kernels == []
