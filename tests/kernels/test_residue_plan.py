"""Plan tables against the definition: every pair listed exactly once, with its multiplicity."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path
from statistics import mean

import numpy as np
import pytest
import torch

from dilabench.choice.implementations import no_residue_plan
from dilabench.kernels import tuning
from dilabench.kernels.fused import tile_tables as tile_tables_module
from dilabench.kernels.fused.branch_group import CLASS_BITS, TILE_BITS, BranchGroup, head_offset
from dilabench.kernels.fused.residue_plan import ResiduePlan, residue_plan
from dilabench.kernels.fused.tile_lists import computed_pairs
from dilabench.kernels.fused.tile_tables import TileTables, tile_tables
from dilabench.patterns.dilated import DilatedPattern
from dilabench.workload.spec import WorkloadRequest
from tests.conftest import half_are_slow, slow, slow_but_every

SHAPES = [
    (256, 5, 5, (64, 128, 256), (1, 2, 4), "modulo", "head"),
    (320, 3, 3, (128, 256), (1, 2), "modulo", "head"),
    (192, 6, 2, (64, 1000), (2, 4), "blocked", "head"),
    (192, 6, 2, (64, 192), (1, 2), "blocked", "kv_head"),
    (144, 4, 4, (48, 144), (1, 3), "modulo", "head"),
    (128, 3, 3, (64, 64, 128), (1, 2, 2), "modulo", "head"),
    (200, 5, 5, (64, 128), (1, 2), "modulo", "head"),
    (212, 3, 3, (64, 128, 256), (1, 2, 4), "modulo", "head"),
    (36, 4, 2, (64, 1000), (2, 4), "blocked", "head"),
    # Lengths that no rate divides, and segments that no tile divides.
    (211, 3, 3, (64, 128, 256), (1, 2, 4), "modulo", "head"),
    (241, 4, 2, (64, 1000, 3000), (1, 4, 8), "modulo", "head"),
    (197, 3, 3, (90, 256), (1, 2), "modulo", "head"),
    (239, 4, 4, (20, 90, 150), (1, 2, 3), "modulo", "head"),
    (150, 2, 2, (16,), (2,), "modulo", "head"),
    # Segments that no rate divides, and the last two of which only together with that length.
    (211, 4, 2, (50, 64, 95), (3, 4, 7), "modulo", "head"),
    (216, 3, 3, (37, 37, 72), (2, 3, 5), "blocked", "head"),
    (150, 2, 2, (17,), (8,), "modulo", "head"),
]
# The last: the only branch of each head.
GROUPED = [
    (256, 4, 4, (64, 128, 256), (1, 2, 4), "modulo", "head", (0, 0, 1, 2)),
    (211, 6, 2, (64, 128), (1, 2), "modulo", "head", (0, 0, 0, 1, 1, 1)),
    (192, 6, 3, (64, 1000, 64), (2, 4, 1), "blocked", "kv_head", (0, 0, 1, 1, 2, 2)),
    # Neither nested nor with heads for all branches.
    (197, 3, 3, (90, 64, 256, 128), (1, 2, 2, 4), "modulo", "head", (0, 1, 2)),
]


# Before and behind each query: of one class and of others, none on one side, wider than a tile, wider than segments.
WINDOWS = [(5, 3), (0, 70)]
SLOW_WINDOWS = [(33, -1), (100, 40), (400, 400)]


def within(window: tuple[int, int], queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Which keys a window lets queries see."""
    left, right = window
    behind = keys[None, :] - queries[:, None]
    return ((left < 0) | (-behind <= left)) & ((right < 0) | (behind <= right))


def defined(n, heads, kv_heads, segments, rates, offset, offset_by, causal, branches, branch_of_head=None):
    t = np.arange(n)
    count = np.zeros((heads, n, n), dtype=np.int64)
    for h in range(heads):
        for i in branches if branch_of_head is None else {branch_of_head[h]} & {*branches}:
            w, r = min(segments[i], n), rates[i]
            on = t % w % r == head_offset(h, r, heads, kv_heads, offset, offset_by)
            count[h] += (t[:, None] // w == t // w) & on[:, None] & on
    return count * (t <= t[:, None]) if causal else count


def listed(group: BranchGroup, n: int, heads: int, own: int, other: int, causal: bool, by_key: bool, window=(-1, -1)):
    """Multiplicities that the tables spell out, query by key; a pair listed twice fails."""
    tables = tile_tables(group, own, other, causal, by_key, torch.device("cpu"))
    entries = tables.entries.numpy()
    r = group.modulus
    count = np.zeros((heads, n, n), dtype=np.int64)

    def tokens(tile: int, rows: int, u: int, seg: int, h: int) -> np.ndarray:
        """Of a tile; -1 beyond the segment or the sequence, where kernels mask what is masked."""
        inside = (tile * rows + np.arange(rows)) * r + (u + group.head_shift[h]) % r
        token = seg * group.super_tokens + inside
        return np.where((inside < group.super_tokens) & (token < n), token, -1)

    for h in range(heads):
        for seg in range(group.n_supers):
            variant = int(seg >= group.full_supers)
            for u, tile, first, full, masked in tables.items[variant, group.head_kind[h]].tolist():
                if u < 0:
                    continue
                mine = tokens(tile, own, u, seg, h)
                for place, entry in enumerate(entries[first : first + full + masked]):
                    m, partner = entry >> (TILE_BITS + CLASS_BITS), (entry >> TILE_BITS) & ((1 << CLASS_BITS) - 1)
                    theirs = tokens(entry & ((1 << TILE_BITS) - 1), other, partner, seg, h)
                    seen = (theirs >= 0)[None] & np.ones((own, 1), bool)
                    if causal:
                        seen = seen & (theirs[None] >= mine[:, None] if by_key else theirs[None] <= mine[:, None])
                    seen = seen & (within(window, theirs, mine).T if by_key else within(window, mine, theirs))
                    assert place >= full or seen[mine >= 0].all(), "a tile listed as wholly visible is cut"
                    i, j = np.nonzero(seen & (mine >= 0)[:, None])
                    at = (h, theirs[j], mine[i]) if by_key else (h, mine[i], theirs[j])
                    assert not count[at].any(), "a pair is listed twice"
                    count[at] = m
    return count


@pytest.mark.parametrize(
    ("shape", "causal", "by_key"), half_are_slow([*SHAPES, *GROUPED], [False, True], [False, True]), ids=str
)
def test_tables_spell_out_the_pattern(shape, causal: bool, by_key: bool) -> None:
    n, heads, kv_heads, segments, rates, offset, offset_by, *grouped = shape
    only = grouped[0] if grouped else None
    plan = residue_plan(segments, rates, n, heads, kv_heads, causal, offset, offset_by, tile=16, branch_of_head=only)
    assert sorted(i for group in plan.groups for i in group.branches) == sorted(set(only or range(len(rates))))
    for group in plan.groups:
        got = listed(group, n, heads, 16, 16, causal, by_key)
        want = defined(n, heads, kv_heads, segments, rates, offset, offset_by, causal, group.branches, only)
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("shape", "window", "causal", "by_key"),
    [
        *half_are_slow(SHAPES, WINDOWS, [False, True], [False, True]),
        *itertools.starmap(slow, itertools.product(SHAPES, SLOW_WINDOWS, [False, True], [False, True])),
    ],
    ids=str,
)
def test_tables_of_windows(shape, window: tuple[int, int], causal: bool, by_key: bool) -> None:
    n, heads, kv_heads, segments, rates, *offsets = shape
    if causal:
        window = window[0], -1
    plan = residue_plan(segments, rates, n, heads, kv_heads, causal, *offsets, tile=16, window=window)
    t = np.arange(n)
    for group in plan.groups:
        assert group.is_windowed == (0 <= min(w for w in window if w >= 0) < group.super_tokens - 1)
        got = listed(group, n, heads, 16, 32 if group.largest_tile > 16 else 16, causal, by_key, window)
        want = defined(n, heads, kv_heads, segments, rates, *offsets, causal, group.branches)
        np.testing.assert_array_equal(got, want * within(window, t, t))


def test_a_window_costs_what_its_pairs_cost() -> None:
    whole = residue_plan((1 << 15,), (1,), 1 << 15, 4, 4, True)
    windowed = residue_plan((1 << 15,), (1,), 1 << 15, 4, 4, True, window=(1024, 0))
    assert computed(windowed, 64) == 4 * 64**2 * (17 * 512 - sum(range(17)))
    assert computed(windowed, 64) < 0.07 * computed(whole, 64)
    assert residue_plan((512,), (1,), 1 << 15, 4, 4, True, window=(511, 0)).groups[0].window is None


def test_grouped_heads_share_a_launch_where_that_computes_no_more() -> None:
    """Heads of a branch are idle in the lists of the others, so that no branch makes work for heads of another."""
    only = (0, 0, 1, 1)
    together = residue_plan((1024, 4096), (1, 4), 16384, 4, 4, False, branch_of_head=only)
    assert [group.branches for group in together.groups] == [(0, 1)]
    pairs = 2 * 16384 * (1024 + 4096 // 4**2)
    assert computed(together, 64) == pairs
    with pytest.raises(ValueError, match="3 branches of heads for 4 heads"):
        residue_plan((1024, 4096), (1, 4), 16384, 4, 4, False, branch_of_head=only[:3])


def test_unequal_tiles_spell_out_the_pattern() -> None:
    plan = residue_plan((128, 256), (1, 2), 320, 3, 3, True, cut=((0, 1),))
    want = defined(320, 3, 3, (128, 256), (1, 2), "modulo", "head", True, (0, 1))
    for own, other in ((32, 16), (16, 32)):
        np.testing.assert_array_equal(listed(plan.groups[0], 320, 3, own, other, True, False), want)
        np.testing.assert_array_equal(listed(plan.groups[0], 320, 3, own, other, True, True), want)


GEOMETRIC = ((2048, 4096, 8192, 16384, 32768), (1, 2, 4, 8, 16), 65536, 4, 4)


def computed(plan: ResiduePlan, tile: int) -> int:
    return sum(computed_pairs(group, tile, plan.causal) for group in plan.groups)


def test_non_causal_saves_what_deduplication_can() -> None:
    plan = residue_plan(*GEOMETRIC, causal=False)
    assert [group.branches for group in plan.groups] == [(0, 1, 2, 3, 4)]
    # kernels.md section 1: 3008 distinct of 3968 keys per query.
    assert computed(plan, 128) == 3008 * 65536 * 4


def test_causal_groups_compute_fewer_pairs_than_the_multiset() -> None:
    plan = residue_plan(*GEOMETRIC, causal=True)
    together = residue_plan(*GEOMETRIC, causal=True, cut=((0, 1, 2, 3, 4),))
    apart = residue_plan(*GEOMETRIC, causal=True, cut=((0,), (1,), (2,), (3,), (4,)))
    assert 1 < len(plan.groups) < 5
    assert computed(plan, 64) < min(computed(together, 64), computed(apart, 64))
    assert computed(plan, 64) < 0.87 * 1985 * 65536 * 4


@pytest.mark.parametrize(
    ("segments", "rates", "length", "reason"),
    [
        ((2048,), (1025,), 12288, "lcm of the dilation rates is 1025, above 1024"),
        ((1024, 1 << 20), (1, 1), 1 << 21, "segment length 1048576 has more than 32768 tiles per class"),
        # Tensors are not copied to a length that all rates divide whatever these are.
        ((500, 600, 700, 800), (5, 7, 11, 13), 2000, "the lcm of the dilation rates is 5005, above 4096"),
    ],
)
def test_branches_that_do_not_fit_say_why(segments, rates, length: int, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        residue_plan(segments, rates, length, 4, 4, False)


def test_fused_is_refused_exactly_where_branches_have_no_plan() -> None:
    drawn, found = random.Random(5), {True: 0, False: 0}
    for _ in range(300):
        count = drawn.randint(1, 3)
        segments, rates = (
            [round(2 ** drawn.uniform(4, 21)) for _ in range(count)],
            [round(2 ** drawn.uniform(0, drawn.choice((4, 11)))) for _ in range(count)],
        )
        pattern = {"segment_lengths": segments, "dilation_rates": rates, "heads": drawn.choice(("all", "grouped"))}
        shape = {"batch_size": 1, "seq_len": round(2 ** drawn.uniform(4, 21)), "num_heads": 4, "head_dim": 64}
        workload = WorkloadRequest.model_validate({**shape, **pattern}).resolve("bfloat16")
        only = DilatedPattern.of(workload).branch_of_head(4)
        try:
            residue_plan(
                tuple(segments), tuple(rates), workload.seq_len, 4, 4, True, separate=True, branch_of_head=only
            )
        except ValueError:
            planned = False
        else:
            planned = True
        assert (no_residue_plan(workload) is None) == planned, workload
        found[planned] += 1
    assert min(found.values()) > 30, found


def test_a_rate_that_does_not_divide_its_segment_takes_a_group_of_its_own() -> None:
    plan = residue_plan((1024, 2048, 4096), (2, 6, 4), 12290, 4, 4, False)
    assert sorted(group.branches for group in plan.groups) == [(0, 2), (1,)]
    assert [group.is_shifted for group in plan.groups] == [group.branches == (1,) for group in plan.groups]
    with pytest.raises(ValueError, match="segment length 1024 is not a multiple of 6"):
        residue_plan((1024, 2048), (2, 6), 12290, 4, 4, False, cut=((0, 1),))


@pytest.mark.parametrize(
    ("segments", "rates", "causal", "window", "branch_of_head"),
    [
        ((64, 256), (1, 2), False, (-1, -1), None),
        ((64, 256), (2, 4), False, (-1, -1), None),
        ((256,), (1,), False, (40, 9), None),
        ((256,), (2,), True, (40, 0), None),
        ((128, 256), (1, 2), True, (-1, -1), (0, 1, 1, 1)),
    ],
)
def test_keys_of_a_query_are_those_that_its_branches_show_it(
    segments: tuple[int, ...],
    rates: tuple[int, ...],
    causal: bool,
    window: tuple[int, int],
    branch_of_head: tuple[int, ...] | None,
) -> None:
    n, heads = 1024, 4
    more = {"cut": (tuple(range(len(segments))),), "branch_of_head": branch_of_head, "window": window}
    (group,) = residue_plan(segments, rates, n, heads, heads, causal, **more).groups
    left, right = (n if side < 0 else side for side in window)
    at = np.arange(n)
    apart = at[None] - at[:, None]
    seen = (apart <= (0 if causal else right)) & (apart >= -left)
    pairs = queries = 0
    for head in range(heads):
        shown = np.zeros((n, n), int)
        for branch, (segment, rate) in enumerate(zip(segments, rates, strict=True)):
            if branch_of_head is None or branch_of_head[head] == branch:
                mine = at % segment % rate == head % rate
                shown += mine[:, None] & mine[None] & (at[:, None] // segment == at[None] // segment) & seen
        pairs += shown.sum()
        queries += (shown.sum(1) > 0).sum()
    # At the ends of segments a window shows fewer keys, and of causal ones a query sees itself, too.
    assert group.keys_of_a_query(causal) == pytest.approx(pairs / queries, rel=0.12)
    assert group.queries_of_a_key(causal) == pytest.approx(pairs / n / heads, rel=0.12)
    (shared,) = residue_plan(segments, rates, n, heads, 2, causal, **more).groups
    assert shared.queries_of_a_key(causal) == pytest.approx(2 * pairs / n / heads, rel=0.12)


def test_segments_that_do_not_nest_go_to_groups_of_their_own() -> None:
    plan = residue_plan((1024, 1536), (1, 2), 6144, 4, 4, False)
    assert [group.branches for group in plan.groups] == [(0,), (1,)]
    with pytest.raises(ValueError, match="not nested"):
        residue_plan((1024, 1536), (1, 2), 6144, 4, 4, False, cut=((0, 1),))


def test_a_tile_that_does_not_divide_the_segment_is_refused() -> None:
    group = residue_plan((64,), (1,), 192, 1, 1, False).groups[0]
    with pytest.raises(ValueError, match="use at most 64"):
        tile_tables(group, 128, 64, False, False, torch.device("cpu"))


@pytest.mark.parametrize("length", [2**17, 150_000, 185_363, 185_364])
def test_a_segment_that_only_longer_sequences_cut_is_planned(length: int) -> None:
    segments, rates = (1024, 5792, 32768, 185363, 1048576), (1, 2, 4, 8, 16)
    plan = residue_plan(segments, rates, length, 16, 16, False)
    assert any(group.is_shifted for group in plan.groups) == (length > 185_363)


@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize("n", [3000, 3001, 3333, 4097])
def test_tables_stand_where_no_length_has_a_kernel_compiled_anew(n: int, by_key: bool) -> None:
    """Triton compiles once more for addresses that are no multiple of 16 bytes."""
    for group in residue_plan((1024, 1000, 4096), (1, 2, 4), n, 3, 3, False).groups:
        tables = tile_tables(group, 128, 64, False, by_key, torch.device("cpu"))
        all_of_them = (tables.items, tables.lookup, tables.order, tables.entries, tables.heads)
        assert [x.data_ptr() % 16 for x in all_of_them] == [0] * 5


def test_the_latest_tables_are_kept_up_to_so_many_bytes() -> None:
    def tables(entries: int) -> tile_tables_module._ByTail:
        """Of two tails, in the same memory."""
        none = torch.zeros(0, dtype=torch.int32)
        of_one = TileTables(none, none, none, torch.zeros(entries, dtype=torch.int32), none)
        return tile_tables_module._ByTail(dict.fromkeys((0, 16), of_one))

    kept = tile_tables_module._Kept(most_bytes=400)
    first, second = (kept.put(name, tables(40)) for name in ("first", "second"))
    assert kept.get("first") is first, "used again, so that the second is the oldest"
    kept.put("third", tables(40))
    assert (kept.get("first"), kept.get("second")) == (first, None)
    large = kept.put("large", tables(1000))
    assert (kept.get("large"), kept.get("first"), kept.get("third")) == (large, None, None)
    assert second[0].nbytes == 160
    # Two threads may have made the same: it counts once.
    for _ in range(3):
        third = kept.put("third", tables(40))
    fourth = kept.put("fourth", tables(40))
    assert (kept.get("third"), kept.get("fourth")) == (third, fourth)


@pytest.mark.parametrize(
    ("case", "few"), [*slow_but_every(2, ((case, 0) for case in SHAPES)), *(slow(case, 1 << 16) for case in SHAPES)]
)
def test_lengths_share_tables(case, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of the length that many have in common are those of each, made here or on the device."""
    n, heads, kv_heads, segments, rates, offset, offset_by = case
    monkeypatch.setattr(tuning, "FEW_ENTRIES", few)
    make, cpu, made = tile_tables_module._tables, torch.device("cpu"), set()
    lengths = range(n, n + 70, 5)
    for length in lengths:
        for group in residue_plan(segments, rates, length, heads, kv_heads, False, offset, offset_by, tile=16).groups:
            own, other = group.largest_tile, min(group.largest_tile, 32)
            shared = group.in_tiles(min(own, other))
            made.add(shared)
            for causal, by_key in ((False, False), (True, False), (True, True)):
                mine, theirs = (
                    make(one, (tail,), own, other, causal, by_key, cpu)[tail]
                    for one, tail in ((group, group.tail_tokens), shared)
                )
                for name in ("items", "lookup", "order", "entries", "heads"):
                    assert torch.equal(getattr(mine, name), getattr(theirs, name)), (length, name)
    assert len(made) < len(lengths)


@pytest.mark.parametrize("case", [*SHAPES, *GROUPED])
@pytest.mark.parametrize("few", [0, slow(1 << 16)])
def test_tables_of_all_tails_are_those_of_each(case, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    n, heads, kv_heads, segments, rates, offset, offset_by, *grouped = case
    only = grouped[0] if grouped else None
    monkeypatch.setattr(tuning, "FEW_ENTRIES", few)
    make, cpu = tile_tables_module._tables, torch.device("cpu")
    shape = (segments, rates, n, heads, kv_heads, False, offset, offset_by)
    plans = [residue_plan(*shape, tile=16, branch_of_head=only, window=window) for window in ((-1, -1), (70, 20))]
    for group in (group for plan in plans for group in plan.groups if group.full_supers):
        own, other = group.largest_tile, min(group.largest_tile, 32)
        whole, _ = group.in_tiles(min(own, other))
        tails = whole.tails_in_tiles(min(own, other))
        lengths = range(group.super_tokens, 3 * group.super_tokens)
        assert {replace(group, length=length).in_tiles(min(own, other)) for length in lengths} == {
            (whole, tail) for tail in tails
        }
        for causal, by_key in ((False, False), (True, False), (True, True)):
            all_of_them = make(whole, tails, own, other, causal, by_key, cpu)
            assert tuple(all_of_them) == tails
            for tail, mine in all_of_them.items():
                alone = make(whole, (tail,), own, other, causal, by_key, cpu)[tail]
                assert torch.equal(mine.items[..., :2], alone.items[..., :2])
                assert torch.equal(mine.order, alone.order)
                assert torch.equal(mine.heads, alone.heads)
                for name in ("items", "lookup"):
                    lists = zip(*(spelled_out(x, getattr(x, name)[..., -3:]) for x in (mine, alone)), strict=True)
                    assert all(a == b for a, b in lists)
                    assert getattr(mine, name).is_contiguous()
                    assert getattr(mine, name).data_ptr() % 16 == 0


def spelled_out(tables: TileTables, spans: torch.Tensor) -> list[tuple[int, int, list[int]]]:
    """Of every list (first entry, full and masked ones) how many of both it has, and the entries."""
    entries = tables.entries.tolist()
    return [
        (full, masked, entries[first : first + full + masked]) for first, full, masked in spans.reshape(-1, 3).tolist()
    ]


def test_a_length_makes_the_tables_of_others_where_they_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """GigaPath's two shortest branches, from the first length on that cuts them; the longest one holds all of it."""
    monkeypatch.setattr(tile_tables_module, "_kept", tile_tables_module._Kept(1 << 28))
    made, make = [], tile_tables_module._tables
    monkeypatch.setattr(tile_tables_module, "_tables", lambda *key: made.append(key) or make(*key))
    for length in (10000, 12345, 31111):
        groups = residue_plan((1024, 5792, 1 << 20), (1, 2, 16), length, 16, 16, False).groups
        for group in groups:
            tile_tables(group, 128, 64, False, False, torch.device("cpu"))
    assert [len(group.branches) for group in groups] == [1, 1, 1]
    assert [len(tails) for _, tails, *_ in made] == [32, 92, 1, 1, 1]


def test_the_cut_is_nearly_always_the_fastest_one() -> None:
    """Of forward and backward together, as an H100 took them."""
    figures = Path(__file__).parents[2] / "docs" / "figures" / "h100-cuts.json"
    lost = []
    for row in json.loads(figures.read_text())["rows"]:
        shape = (row["tokens"], row["heads"], row["kv_heads"], row["causal"])
        window_left, window_right = row["window"], 0 if row["causal"] else row["window"]
        window = (window_left, window_right) if window_left >= 0 else (-1, -1)
        plan = residue_plan(tuple(row["segments"]), tuple(row["rates"]), *shape, window=window)
        taken = sorted(sorted(group.branches) for group in plan.groups)
        took = {json.dumps(cut["cut"]): cut["forward_ms"] + cut["backward_ms"] for cut in row["cuts"]}
        lost.append(took[json.dumps(taken)] / min(took.values()))
    assert len(lost) > 90
    assert mean(lost) < 1.04, sorted(lost)[-10:]
