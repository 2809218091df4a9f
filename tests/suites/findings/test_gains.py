"""Speed-ups of optimizations: what helps reads as helping, what costs as costing."""

import pytest

from dilabench.metadata import VARIANT
from dilabench.suites.optimization import NONE, analyse, gains_of

OFF = {"pattern_cache_entries": 0}
CACHE = {"pattern_cache_entries": 64}
POOL = {"pattern_cache_entries": 0, "buffer_pool_bytes": 2**20}
POOL_COUNTERS = {
    "buffer_pool_requests": 200,
    "buffer_pool_reuses": 198,
    "buffer_pool_reused_bytes": 0,
    "buffer_pool_peak_bytes": 3 * 2**20,
    "buffer_pool_held_bytes": 2**20,
}


@pytest.fixture
def variant(row):
    def make(name, ms, optimizations, at, **fields):
        return row("gather", ms, at=at, optimizations=optimizations, labels=VARIANT.entry(name), **fields)

    return make


@pytest.fixture
def found(variant, record):
    rows = (
        variant(NONE, 10.0, OFF, 0, peak_mib=50),
        variant(
            "pattern cache", 5.0, CACHE, 1, peak_mib=40, counters={"pattern_cache_hits": 99, "pattern_cache_misses": 1}
        ),
        variant("buffer pool", 20.0, POOL, 2, peak_mib=80, counters=POOL_COUNTERS),
        variant("CUDA graph", None, {**OFF, "cuda_graph": True}, 3),
    )
    return record(*rows, suite="optimization")


def test_speedups_and_memory_are_against_everything_off(found):
    cache, pool = gains_of(found)
    assert (cache.speedup, pool.speedup) == (pytest.approx(2.0), pytest.approx(0.5))
    assert (cache.saved_bytes, pool.saved_bytes) == (10 * 2**20, -30 * 2**20)
    assert cache.interval[0] <= 2.0 <= cache.interval[1]


def test_a_slower_pool_reads_as_slower(found):
    effects, _ = analyse(found)
    assert "pattern cache: helps in 1 of 1 case (up to 2.00x at gather 384)." in effects.sentence
    assert "buffer pool: costs in 1 of 1 case (down to 0.50x at gather 384)." in effects.sentence
    rows = {cells[2]: dict(zip(effects.columns, cells, strict=True)) for cells in effects.rows}
    assert (rows["buffer pool"]["verdict"], rows["buffer pool"]["peak saved"]) == ("COSTS", "-30.0 MiB")
    assert (rows["pattern cache"]["verdict"], rows["pattern cache"]["cache hits"]) == ("helps", "99.0%")
    assert "CUDA graph" not in rows


def test_the_pool_tells_requests_reuse_peak_and_what_it_holds(found):
    _, pool = analyse(found)
    assert pool.rows == (("gather", "384", "buffer pool", "200", "99.0%", "3.0 MiB", "1.0 MiB"),)
    assert pool.sentence.startswith("99.0% of 200 requests")


def test_who_asks_the_pool_for_nothing_is_named(variant, record):
    idle = dict.fromkeys(POOL_COUNTERS, 0)
    rows = [variant(NONE, 10.0, OFF, 0), variant("buffer pool", 10.0, POOL, 1, counters=idle)]
    effects, pool = analyse(record(*rows, suite="optimization"))
    assert "buffer pool: no proven difference in 1 of 1 case." in effects.sentence
    assert "No buffer was requested" in pool.sentence


def test_plots_have_a_line_of_no_change(found):
    effects, _ = analyse(found)
    impact, memory = effects.plots
    assert (impact.reference, memory.reference) == (1.0, 0.0)
    assert [bars.values[0] for bars in memory.bars] == [10.0, -30.0]


def test_without_the_rows_to_compare_there_is_nothing_to_say(variant, record):
    assert analyse(record(variant("buffer pool", 10.0, POOL, 0), suite="optimization")) == ()
    assert analyse(record(variant(NONE, None, OFF, 0), suite="optimization")) == ()
