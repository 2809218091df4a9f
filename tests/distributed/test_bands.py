"""Cuts of a band: each visible pair exactly once, each masked call a square."""

import itertools

import pytest

from dilabench.impls.ring.bands import cuts

SIZES = (1, 2, 3, 5, 7)
BOUNDS = (None, -9, -4, -2, -1, 0, 1, 3, 6, 9)


def seen_by(cut):
    left, right = cut.window
    for t, u in itertools.product(range(cut.queries), range(cut.keys)):
        if (not cut.causal or u <= t) and (left < 0 or u >= t - left) and (right < 0 or u <= t + right):
            yield cut.query + t, cut.key + u


@pytest.mark.parametrize(("queries", "keys"), list(itertools.product(SIZES, SIZES)))
def test_each_visible_pair_comes_once(queries, keys):
    for low, high in itertools.product(BOUNDS, BOUNDS):
        wanted = [
            (t, u)
            for t, u in itertools.product(range(queries), range(keys))
            if (low is None or low <= u - t) and (high is None or u - t <= high)
        ]
        made = cuts(queries, keys, low, high)
        assert sorted(pair for cut in made for pair in seen_by(cut)) == wanted
        assert all(cut.full or cut.queries == cut.keys for cut in made)
