"""Cuts of a band: each visible pair exactly once, each masked call a square or, where ends align, a causal oblong."""

import itertools

import pytest

from dilabench.impls.ring.schedule.bands import Cut, cuts
from dilabench.workload.spec import UNBOUNDED

SIZES = (1, 2, 3, 5, 7)
BOUNDS = (None, -9, -4, -2, -1, 0, 1, 3, 6, 9)


def seen_by(cut):
    left, right = cut.window
    for t, u in itertools.product(range(cut.queries), range(cut.keys)):
        if (
            (not cut.causal or u <= t + cut.keys - cut.queries)
            and (left < 0 or u >= t - left)
            and (right < 0 or u <= t + right)
        ):
            yield cut.query + t, cut.key + u


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize(("queries", "keys"), list(itertools.product(SIZES, SIZES)))
def test_each_visible_pair_comes_once(queries, keys, aligned):
    for low, high in itertools.product(BOUNDS, BOUNDS):
        wanted = [
            (t, u)
            for t, u in itertools.product(range(queries), range(keys))
            if (low is None or low <= u - t) and (high is None or u - t <= high)
        ]
        made = cuts(queries, keys, low, high, aligned=aligned)
        assert sorted(pair for cut in made for pair in seen_by(cut)) == wanted
        oblong = [cut for cut in made if (cut.causal or cut.window != UNBOUNDED) and cut.queries != cut.keys]
        assert all(aligned and cut.queries < cut.keys and cut.window == UNBOUNDED for cut in oblong)


def test_keys_before_a_causal_mask_are_part_of_one_call_where_ends_align():
    assert cuts(4, 12, None, 8, aligned=True) == [Cut(0, 4, 0, 12, causal=True)]
    assert cuts(4, 12, None, 8) == [Cut(0, 4, 0, 8), Cut(0, 4, 8, 4, causal=True)]
