"""A null mass adds to the denominator and to nothing else, in every row and dtype."""

import pytest
import torch

from dilabench.kernels.lse import add_null_mass_


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
