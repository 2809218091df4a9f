"""A null mass adds to the denominator and to nothing else, in every row and dtype."""

from itertools import accumulate
from random import Random

import pytest
import torch
from pydantic import ValidationError

from dilabench.impls.null_mass import ZeroKeysOfDocuments, log_zero_keys
from dilabench.kernels.lse import add_null_mass_
from dilabench.patterns.dilated import DilatedPattern
from dilabench.workload.spec import Workload


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_denominator_grows_by_the_mass(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    out = torch.randn(2, 13, 5, 3, generator=generator).to(dtype)
    lse = torch.randn(2, 5, 13, generator=generator, dtype=torch.promote_types(dtype, torch.float32))
    mass = torch.randint(4, (5, 13), generator=generator).to(lse.dtype)
    # Rows that see nothing at all, and rows that see nothing but a mass.
    out[:, 4], lse[..., 4], mass[:, 4] = 0.0, -torch.inf, 0.0
    out[:, 7], lse[..., 7], mass[:, 7] = 0.0, -torch.inf, 3.0
    before, lse_before = out.clone(), lse.clone()
    add_null_mass_(out, lse, mass.log())
    expected = (lse_before.double().exp() + mass).log()
    torch.testing.assert_close(lse.double(), expected, rtol=0, atol=4 * torch.finfo(lse.dtype).eps)
    share = (lse_before.double() - expected).nan_to_num(0.0).exp().transpose(1, 2)[..., None]
    torch.testing.assert_close(out.double(), before * share, rtol=4 * torch.finfo(dtype).eps, atol=0)
    untouched = (mass == 0).T
    assert torch.equal(out[:, untouched], before[:, untouched])
    assert not out[:, [4, 7]].any()
    assert (lse[..., 7] == torch.tensor(3.0, dtype=lse.dtype).log()).all()


@pytest.mark.parametrize("heads", ["all", "grouped"])
def test_zero_keys_of_documents_are_those_of_each(heads: str) -> None:
    """Of random patterns and packings, of all branches together and of each."""
    compared, device = 0, torch.device("cpu")
    for seed in range(60):
        choose = Random(seed)
        lengths = [choose.choice((1, 2, 15, 16, 17, 33, choose.randint(1, 100))) for _ in range(choose.randint(2, 6))]
        bounds = tuple(accumulate(lengths, initial=0))
        pattern = DilatedPattern(
            segment_lengths=(choose.choice((12, 24, 48)), choose.choice((60, 120, 30, 400))),
            dilation_rates=(choose.choice((1, 2, 3, 4)), choose.choice((2, 5, 6))),
            padding="zero_key",
            heads=heads,
            offset=choose.choice(("modulo", "blocked")),
            offset_by=choose.choice(("head", "kv_head")),
        )
        shape = {"batch_size": 1, "seq_len": bounds[-1], "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
        try:
            workload = Workload(pattern=pattern, causal=False, layout="packed", cu_seqlens=bounds, **shape)
        except ValidationError:
            # torchscale's function is defined for no such length.
            continue
        of_documents = ZeroKeysOfDocuments(pattern, 4, 2, device)
        for apart in {False, heads == "all"}:
            found = of_documents(torch.tensor(bounds, dtype=torch.int32), bounds[-1], apart)
            alone = log_zero_keys(workload, device, apart=apart)
            right = torch.full((len(found), 4, bounds[-1]), -torch.inf) if alone is None else alone
            assert torch.equal(torch.cat([x.view(1, 4, -1) for x in found]), right)
            compared += alone is not None
    assert compared > 10
