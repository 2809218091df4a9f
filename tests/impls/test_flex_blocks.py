"""The block mask by arithmetic against `create_block_mask`, which looks at every pair."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention

from dilabench.contracts import BuildContext
from dilabench.impls.flex import blocks, flex
from dilabench.workload.spec import Workload

CPU = torch.device("cpu")
# Rates that divide segments in whole blocks once they are ordered by residue class.
FITTING: dict[str, dict[str, Any]] = {
    "local": {"seq_len": 1024, "segment_lengths": (256,), "dilation_rates": (1,)},
    "nested": {"seq_len": 1024, "segment_lengths": (512, 1024), "dilation_rates": (1, 4)},
    "longest first": {"seq_len": 1024, "segment_lengths": (512, 256), "dilation_rates": (2, 1)},
}
CASES = FITTING | {
    "ragged": {"seq_len": 805, "segment_lengths": (200, 805), "dilation_rates": (1, 3)},
    "shorter than a block": {"seq_len": 90, "segment_lengths": (32, 64), "dilation_rates": (1, 2)},
    "segments inside blocks": {"seq_len": 600, "segment_lengths": (20, 50), "dilation_rates": (1, 5)},
    "a residue without rows": {"seq_len": 514, "segment_lengths": (256,), "dilation_rates": (3,), "num_heads": 3},
    "shared keys": {
        "seq_len": 640,
        "segment_lengths": (128, 384),
        "dilation_rates": (1, 4),
        "offset_by": "kv_head",
        "num_kv_heads": 2,
    },
    "grouped heads": {"seq_len": 512, "segment_lengths": (128, 512), "dilation_rates": (1, 2), "heads": "grouped"},
    "blocked": {"seq_len": 768, "segment_lengths": (256, 768), "dilation_rates": (2, 3), "offset": "blocked"},
}
MASKS = (
    {"causal": False},
    {"causal": True},
    {"causal": False, "window": (150, 70)},
    {"causal": True, "window": (40, 0)},
)
ORDERS = {"natural": flex.build, "permuted": flex.build_permuted}
IN_PATTERN = ("segment_lengths", "dilation_rates", "heads", "offset", "offset_by")


def workload_of(case: str, **more: Any) -> Workload:
    fields = CASES[case] | more
    pattern = {"kind": "dilated"} | {name: fields.pop(name) for name in IN_PATTERN if name in fields}
    heads = fields.get("num_heads", 4)
    shape = {"batch_size": 1, "num_heads": heads, "num_kv_heads": heads, "head_dim": 8}
    return Workload.model_validate({"pattern": pattern, **shape, **fields})


def dense(counts: Tensor | None, indices: Tensor | None) -> Tensor:
    """bool [H, blocks, blocks]."""
    assert counts is not None
    assert indices is not None
    blocks = indices.shape[-1]
    marked = torch.zeros(*indices.shape[1:3], blocks + 1, dtype=torch.bool)
    listed = torch.where(torch.arange(blocks) < counts[0].unsqueeze(-1), indices[0], blocks)
    return marked.scatter_(2, listed.long(), True)[:, :, :blocks]


def by_query(mask: flex_attention.BlockMask) -> tuple[Tensor, Tensor]:
    """Partly and wholly visible blocks."""
    return dense(mask.kv_num_blocks, mask.kv_indices), dense(mask.full_kv_num_blocks, mask.full_kv_indices)


def masks(workload: Workload, order: str) -> tuple[flex_attention.BlockMask, flex_attention.BlockMask]:
    """Ours, and the one of every pair."""
    ours = ORDERS[order](workload, BuildContext(device=CPU)).mask
    N = workload.seq_len
    return ours, flex_attention.create_block_mask(ours.mask_mod, None, workload.num_heads, N, N, device="cpu")


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_nothing_visible_is_left_out_and_full_blocks_are_full(case: str, mask: dict[str, Any], order: str) -> None:
    workload = workload_of(case, **mask)
    ours, theirs = masks(workload, order)
    partly, full = by_query(ours)
    theirs_partly, theirs_full = by_query(theirs)
    assert not (partly & full).any()
    assert not ((theirs_partly | theirs_full) & ~(partly | full)).any()
    assert not (full & ~theirs_full).any()
    if "window" not in mask:
        assert torch.equal(partly | full, theirs_partly | theirs_full)
    assert ours.seq_lengths == theirs.seq_lengths
    assert torch.equal(dense(ours.q_num_blocks, ours.q_indices), partly.transpose(1, 2))
    assert torch.equal(dense(ours.full_q_num_blocks, ours.full_q_indices), full.transpose(1, 2))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("case", FITTING)
def test_ordered_by_residue_class_every_full_block_is_known(case: str, causal: bool) -> None:
    ours, theirs = masks(workload_of(case, causal=causal), "permuted")
    full, theirs_full = by_query(ours)[1], by_query(theirs)[1]
    assert theirs_full.any()
    assert torch.equal(full, theirs_full)
    assert causal or not by_query(ours)[0].any()


def test_patches_are_looked_at_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What long sequences need changes nothing."""
    workload = workload_of("ragged", causal=True)
    at_once = by_query(flex.build(workload, BuildContext(device=CPU)).mask)
    monkeypatch.setattr(blocks, "PAIRS_AT_ONCE", 1)
    in_parts = by_query(flex.build(workload, BuildContext(device=CPU)).mask)
    assert all(torch.equal(a, b) for a, b in zip(at_once, in_parts, strict=True))


def test_lists_have_the_kinds_that_torch_gives_them() -> None:
    ours, theirs = masks(workload_of("nested"), "natural")
    for name in ("kv_num_blocks", "kv_indices", "q_indices", "full_kv_indices", "full_q_num_blocks"):
        one, other = getattr(ours, name), getattr(theirs, name)
        assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())
