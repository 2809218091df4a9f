"""`flex`: blocks, mask and score of any pattern give its function. On a CPU, FlexAttention only goes forward."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import flex_attention

from dilabench.contracts import BuildContext
from dilabench.engine.verify.oracle import reference
from dilabench.impls.flex import documents, flex
from dilabench.impls.flex.blocks import BLOCK, CountedBlocks, counted_blocks
from dilabench.impls.visible_keys import multiplicity
from dilabench.patterns.dilated import DilatedPattern
from dilabench.patterns.pattern import KeyGroup, Pattern, Positions, SequenceShape
from dilabench.patterns.registry import known_kinds, pattern_type
from dilabench.workload.spec import Workload
from tests.conftest import slow, slow_but_every

CONTEXT = BuildContext(device=torch.device("cpu"))
SHAPE = {"batch_size": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "dtype": "float32"}
MASKS: tuple[dict[str, Any], ...] = (
    {"causal": False},
    {"causal": True},
    {"causal": False, "window": (150, 70)},
    {"causal": True, "window": (40, -1)},
)
DILATED: dict[str, dict[str, Any]] = {
    "nested": {"segment_lengths": (128, 512), "dilation_rates": (1, 4)},
    "ragged": {"segment_lengths": (200, 805), "dilation_rates": (1, 3)},
    "segments inside blocks": {"segment_lengths": (20, 50), "dilation_rates": (1, 5)},
    "rows without a key": {"segment_lengths": (256,), "dilation_rates": (3,)},
    "a rate above a block": {"segment_lengths": (20, 600), "dilation_rates": (1, 150)},
    "shared residues": {"segment_lengths": (128, 384), "dilation_rates": (1, 4), "offset_by": "kv_head"},
    "grouped heads": {"segment_lengths": (128, 512), "dilation_rates": (1, 2), "heads": "grouped"},
    "blocked": {"segment_lengths": (256, 768), "dilation_rates": (2, 3), "offset": "blocked"},
}


def computed(pattern: Pattern) -> bool:
    (shape,) = Workload.model_validate({"pattern": {"kind": "dense"}, "seq_len": 300, **SHAPE}).shapes
    return not (pattern.has_zero_keys or pattern.summands(shape))


EXAMPLES = {
    f"{kind}, example {number}": pattern
    for kind in known_kinds()
    for number, pattern in enumerate(pattern_type(kind).examples())
    if computed(pattern)
} | {f"dilated, {name}": DilatedPattern(**fields) for name, fields in DILATED.items()}


def workload_of(pattern: Pattern, seq_len: int = 300, **fields: Any) -> Workload:
    return Workload.model_validate({"pattern": pattern, "seq_len": seq_len, **SHAPE, **fields})


def cases(masks: Iterable[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Examples under masks, without those that mean nothing under a causal one."""
    for (name, pattern), mask in product(EXAMPLES.items(), masks):
        shape = SequenceShape(300, 4, 2, mask["causal"], mask.get("window", (-1, -1)))
        if pattern.why_not_over(shape) is None:
            yield name, mask


def counts_of(blocks: CountedBlocks, workload: Workload, head: int) -> np.ndarray:
    """C [N, N] as listed: tiles in visible blocks, under causal mask and window in those seen in part."""
    N = workload.seq_len
    kind = blocks.kind_of_head[head]
    at = np.arange(N)
    rows, keys = at[:, None], at[None]
    place = kind, rows // BLOCK, keys // BLOCK
    first, stop = workload.shapes[0].bounds(at)
    band = (keys >= first[:, None]) & (keys < stop[:, None])
    visible = blocks.full[place] | (blocks.partly[place] & band)
    return np.where(visible, blocks.tiles[blocks.tile_of[place], rows % BLOCK, keys % BLOCK], 0)


# One of three, so that each mask comes up.
@pytest.mark.parametrize(("name", "mask"), slow_but_every(3, cases(MASKS)), ids=str)
def test_blocks_hold_what_the_pattern_counts(name: str, mask: dict[str, Any]) -> None:
    workload = workload_of(EXAMPLES[name], **mask)
    blocks = counted_blocks(workload)
    assert not (blocks.partly & blocks.full).any()
    right = np.stack([multiplicity(workload, head, torch.arange(300)).numpy() for head in range(4)])
    for head in range(4):
        assert np.array_equal(counts_of(blocks, workload, head), right[head])
    padded = np.zeros((4, 384, 384), dtype=bool)
    padded[:, :300, :300] = right > 0
    seen = padded.reshape(4, 3, BLOCK, 3, BLOCK)
    of_heads = np.array(blocks.kind_of_head)
    assert np.array_equal((blocks.partly | blocks.full)[of_heads], seen.any((2, 4)))
    assert np.array_equal(blocks.full[of_heads], seen.all((2, 4)))


@pytest.fixture
def untraced(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention's formula is called as it is: Dynamo would trace every call anew before that."""
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize(
    ("name", "mask"),
    # Each mask comes up, as five and two have no common factor.
    slow_but_every(5, cases(MASKS[1:3])),
    ids=str,
)
def test_equals_the_oracle(name: str, mask: dict[str, Any]) -> None:
    workload = workload_of(EXAMPLES[name], **mask)
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, 300, heads, 16, generator=generator) for heads in (4, 2, 2))
    out, lse = flex.build(workload, CONTEXT).with_lse(q, k, v)
    right, right_lse = reference.build(workload, CONTEXT).with_lse(q, k, v)
    torch.testing.assert_close(out, right, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(lse, right_lse, rtol=2e-6, atol=2e-6, check_dtype=False)


@pytest.mark.parametrize("causal", [False, True])
def test_lists_are_those_of_torch(causal: bool) -> None:
    workload = workload_of(EXAMPLES["dilated, nested"], 640, causal=causal)
    ours = flex.build(workload, CONTEXT).mask
    theirs = flex_attention.create_block_mask(ours.mask_mod, None, 4, 640, 640, device="cpu")
    assert ours.seq_lengths == theirs.seq_lengths
    for name in ("kv_num_blocks", "q_num_blocks", "full_kv_num_blocks", "full_q_num_blocks"):
        one, other = getattr(ours, name), getattr(theirs, name)
        assert (one.dtype, one.stride()) == (other.dtype, other.stride())
        assert torch.equal(one, other)
    for name in ("kv", "q", "full_kv", "full_q"):
        one, other = (getattr(mask, f"{name}_indices") for mask in (ours, theirs))
        listed = torch.arange(5) < getattr(ours, f"{name}_num_blocks").unsqueeze(-1)
        assert (one.dtype, one.stride()) == (other.dtype, other.stride())
        assert torch.equal(one[listed], other[listed])


def test_blocks_alike_share_a_tile_and_heads_alike_a_kind() -> None:
    fields = {"segment_lengths": (1024, 4096), "dilation_rates": (1, 4)}
    blocks = counted_blocks(workload_of(DilatedPattern(**fields), 4096, num_heads=8, causal=False))
    # For each residue inside and beyond the segments of the first branch, and zeros.
    assert (len(blocks.partly), len(blocks.tiles)) == (4, 4 * 2 + 1)
    local = counted_blocks(workload_of(DilatedPattern(segment_lengths=(512,), dilation_rates=(1,)), 1024))
    assert (local.kind_of_head, len(local.tiles)) == ((0,) * 4, 2)


def test_tiles_are_read_only_if_there_is_something_in_them() -> None:
    def read(segment_lengths: tuple[int, ...], dilation_rates: tuple[int, ...]) -> tuple[bool, bool]:
        pattern = DilatedPattern(segment_lengths=segment_lengths, dilation_rates=dilation_rates)
        workload = workload_of(pattern, 512, causal=True, window=(200, 0))
        blocks = counted_blocks(workload)
        assert (flex.build(workload, CONTEXT).score is not None) == blocks.counts_twice
        return blocks.has_holes, blocks.counts_twice

    assert read((512,), (1,)) == (False, False)
    assert read((256,), (1,)) == (True, False)
    assert read((512, 512), (1, 1)) == (False, True)
    assert read((512, 512), (1, 2)) == (False, True)
    assert read((512,), (2,)) == (True, False)


PACKED = {"layout": "packed", "cu_seqlens": (0, 1, 90, 128, 300), "batch_size": 1}


@pytest.mark.parametrize(
    ("build", "name", "fields"),
    [
        (flex.build, "dilated, nested", {}),
        slow(flex.build, "dilated, shared residues", {}),
        (flex.build, "window_sink, example 0", {}),
        slow(documents.build, "dense, example 0", PACKED),
        (documents.build, "dilated, nested", PACKED),
    ],
)
def test_dynamo_takes_it_as_one_graph(build: Any, name: str, fields: dict[str, Any]) -> None:
    """As on CUDA, where the graph goes to Inductor besides."""
    workload = workload_of(EXAMPLES[name], **fields)
    function = build(workload, CONTEXT)
    whole = replace(function, run=torch.compile(function.run, backend="eager", fullgraph=True, dynamic=False))
    lead = (300,) if fields else (2, 300)
    q, k, v = (torch.randn(*lead, heads, 16) for heads in (4, 2, 2))
    right, right_lse = reference.build(workload, CONTEXT).with_lse(q, k, v)
    out, lse = whole.with_lse(q, k, v)
    torch.testing.assert_close(out, right, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(lse, right_lse, rtol=2e-6, atol=2e-6, check_dtype=False)


class Thrice(Pattern):
    """What a third party may define: rows in any order of groups, and one of them without keys."""

    kind: str = "thrice"

    def counts(self, shape: SequenceShape, head: int, rows: Positions):
        odd, even = rows[rows % 2 == 1], rows[(rows % 2 == 0) & (rows > 0)]
        yield KeyGroup(odd, (range(0, shape.length, 2), np.array([1, 5, 290])))
        yield KeyGroup(even[:0], (range(3),))
        yield KeyGroup(even, (range(0), range(7, 200), range(100, 250), np.arange(150, 160)))


def test_a_pattern_that_only_counts_is_computed() -> None:
    workload = workload_of(DilatedPattern(segment_lengths=(300,), dilation_rates=(1,)), causal=False)
    asked = workload.model_copy(update={"pattern": Thrice()})
    blocks = counted_blocks(asked)
    for head in range(4):
        right = multiplicity(asked, head, torch.arange(300)).numpy()
        assert right.max() == 3
        assert np.array_equal(counts_of(blocks, asked, head), right)


def test_more_parts_than_a_byte_counts_are_refused() -> None:
    class Often(Thrice):
        def counts(self, shape: SequenceShape, head: int, rows: Positions):
            yield KeyGroup(rows, (range(3),) * 256)

    workload = workload_of(EXAMPLES["dilated, nested"]).model_copy(update={"pattern": Often()})
    with pytest.raises(ValueError, match="may count 256 times here"):
        counted_blocks(workload)


def test_kernel_options_reach_flex_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = workload_of(EXAMPLES["dilated, nested"])
    seen = []

    def called(q: Any, *_: Any, kernel_options: Any, **_more: Any) -> tuple[Any, Any]:
        seen.append(kernel_options)
        return q, SimpleNamespace(lse=q[..., 0])

    monkeypatch.setattr(flex_attention, "flex_attention", called)
    q, k, v = (torch.zeros(2, 300, heads, 16) for heads in (4, 2, 2))
    monkeypatch.setattr(flex, "_has_flash4", lambda: True)
    for tiles in ("", "BACKEND=FLASH", "BLOCK_M=64, BLOCK_N=32"):
        flex.build(workload, BuildContext(device=torch.device("cpu"), tiles=tiles))(q, k, v)
    assert seen == [None, {"BACKEND": "FLASH"}, {"BLOCK_M": 64, "BLOCK_N": 32}]
    monkeypatch.setattr(flex, "_has_flash4", lambda: False)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'dilabench\[flash4\]'"):
        flex.build(workload, BuildContext(device=torch.device("cpu"), tiles="BACKEND=FLASH"))


@pytest.mark.parametrize("text", ["FLASH", "BLOCK_M=", "=64"])
def test_kernel_options_of_another_form_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not NAME=VALUE, for example BACKEND=FLASH"):
        flex.read_options(text)


@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize(
    ("name", "mask"),
    [
        *(("dilated, ragged", mask) for mask in MASKS),
        ("dense, example 0", MASKS[1]),
        ("dilated, grouped heads", MASKS[0]),
        ("dilated, blocked", MASKS[-1]),
        ("dilated, shared residues", MASKS[1]),
        ("dilated, segments inside blocks", MASKS[0]),
    ],
    ids=str,
)
@pytest.mark.parametrize("build", [flex.build, documents.build], ids=["counts", "document ids"])
def test_packed_sequences_see_nothing_of_each_other(build: Any, name: str, mask: dict[str, Any]) -> None:
    workload = workload_of(EXAMPLES[name], **mask, **PACKED)
    q, k, v = (torch.randn(300, heads, 16) for heads in (4, 2, 2))
    out, lse = build(workload, CONTEXT).with_lse(q, k, v)
    right, right_lse = reference.build(workload, CONTEXT).with_lse(q, k, v)
    torch.testing.assert_close(out, right, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, right_lse, rtol=1e-5, atol=1e-5, check_dtype=False)
