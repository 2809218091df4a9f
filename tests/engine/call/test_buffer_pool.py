"""The buffer pool and the pattern cache: bounded, never one live buffer twice, no deadlock, empty after a reset."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dilabench.contracts import NoPool, PatternCache
from dilabench.engine.call.buffer_pool import SizedBufferPool

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64)

shapes = st.lists(st.integers(0, 40), min_size=1, max_size=3).map(tuple)
# What a caller does: take a shape, or give back one of what it holds (-1: the same thing again).
steps = st.lists(st.tuples(shapes, st.sampled_from(DTYPES)) | st.integers(-1, 5), max_size=60)


def overlap(one, other):
    (start, size), (other_start, other_size) = (
        (storage.data_ptr(), storage.nbytes()) for storage in (one.untyped_storage(), other.untyped_storage())
    )
    return start < other_start + other_size and other_start < start + size


@settings(deadline=None, max_examples=100)
@given(steps=steps, max_bytes=st.sampled_from([0, 100, 4096, 2**20]))
def test_live_buffers_never_share_memory_and_the_bound_holds(steps, max_bytes):
    pool = SizedBufferPool(max_bytes)
    held, given_back = [], None
    for step in steps:
        if isinstance(step, tuple):
            shape, dtype = step
            buffer = pool.take(shape, dtype, CPU)
            assert (buffer.shape, buffer.dtype, buffer.is_contiguous()) == (torch.Size(shape), dtype, True)
            assert not any(overlap(buffer, other) for other in held)
            held.append(buffer)
        elif step < 0 and given_back is not None:
            pool.give(given_back)
        elif held:
            given_back = held.pop(step % len(held))
            pool.give(given_back)
        counters = pool.counters()
        assert counters["buffer_pool_held_bytes"] <= max_bytes
        assert counters["buffer_pool_reuses"] <= counters["buffer_pool_requests"]
        assert counters["buffer_pool_peak_bytes"] >= sum(buffer.nbytes for buffer in held)


@settings(deadline=None, max_examples=50)
@given(size=st.integers(1, 2**22), count=st.integers(1, 120))
def test_any_size_can_be_asked_for_any_number_of_times(size, count):
    """A pool that re-entered its own lock hung at the hundredth request of a size that it had no bucket for."""
    pool = SizedBufferPool(2**20)
    for _ in range(count):
        pool.give(pool.take((size,), torch.uint8, CPU))
    counters = pool.counters()
    # Sizes are rounded up to powers of two; what does not fit into the bound is never kept.
    kept = 1 << (size - 1).bit_length() <= 2**20
    assert counters["buffer_pool_requests"] == count
    assert counters["buffer_pool_reuses"] == (count - 1 if kept else 0)


def test_a_buffer_given_back_twice_is_lent_once():
    pool = SizedBufferPool(2**20)
    first = pool.take((64,), torch.float32, CPU)
    pool.give(first)
    second = pool.take((64,), torch.float32, CPU)
    pool.give(first)
    third = pool.take((64,), torch.float32, CPU)
    assert second.data_ptr() == first.data_ptr()
    assert third.data_ptr() != second.data_ptr()


def test_what_is_not_from_the_pool_is_not_taken():
    pool = SizedBufferPool(2**20)
    buffer = pool.take((8, 8), torch.float32, CPU)
    pool.give(torch.empty(8, 8))
    pool.give(buffer[:4])
    assert pool.counters()["buffer_pool_held_bytes"] == 0


def test_a_buffer_far_too_large_is_left_alone():
    pool = SizedBufferPool(2**20)
    pool.give(pool.take((4096,), torch.uint8, CPU))
    pool.take((16,), torch.uint8, CPU)
    assert pool.counters()["buffer_pool_reuses"] == 0


def test_clearing_forgets_free_and_lent():
    pool = SizedBufferPool(2**20)
    lent = pool.take((100,), torch.float32, CPU)
    pool.give(pool.take((1000,), torch.float32, CPU))
    pool.clear()
    pool.give(lent)
    assert pool.counters()["buffer_pool_held_bytes"] == 0
    pool.give(pool.take((1000,), torch.float32, CPU))
    assert pool.counters()["buffer_pool_reuses"] == 0


def test_threads_share_a_pool_without_sharing_a_buffer():
    pool = SizedBufferPool(2**16)

    def work(number):
        for turn in range(100):
            buffer = pool.take((1 + (number * turn) % 300,), torch.int64, CPU)
            buffer.fill_(number)
            if not bool((buffer == number).all()):
                return False
            pool.give(buffer)
        return True

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(4)))
    assert pool.counters()["buffer_pool_requests"] == 400
    assert pool.counters()["buffer_pool_held_bytes"] <= 2**16


def test_without_a_pool_buffers_are_plain_tensors():
    pool = NoPool()
    buffer = pool.take((3, 5), torch.float64, CPU)
    pool.give(buffer)
    pool.clear()
    assert (buffer.shape, buffer.dtype, pool.counters()) == ((3, 5), torch.float64, {})


@settings(deadline=None, max_examples=100)
@given(keys=st.lists(st.integers(0, 9), max_size=60), max_entries=st.integers(0, 5))
def test_a_cache_gives_what_was_made_and_stays_bounded(keys, max_entries):
    cache = PatternCache(max_entries)
    made = []
    for key in keys:
        assert cache.get(key, lambda key=key: made.append(key) or f"made {key}") == f"made {key}"
        assert cache.counters()["pattern_cache_entries"] <= max_entries
    assert (cache.hits, cache.misses) == (len(keys) - len(made), len(made))
    if max_entries == 0:
        assert made == keys


def test_the_entry_unused_for_longest_leaves():
    cache = PatternCache(2)
    for key in ("a", "b", "a", "c"):
        cache.get(key, lambda: 0)
    hits = cache.hits
    cache.get("a", lambda: 0)
    cache.get("b", lambda: 0)
    assert cache.hits == hits + 1


def test_bytes_are_those_of_distinct_storages():
    @dataclass(frozen=True, slots=True)
    class Table:
        rows: torch.Tensor
        part: torch.Tensor

    rows = torch.zeros(100, dtype=torch.int64)
    cache = PatternCache()
    cache.get("table", lambda: [Table(rows, rows[:10]), {"more": torch.zeros(3)}, "text"])
    assert cache.counters()["pattern_cache_bytes"] == 812
    cache.clear()
    assert cache.counters()["pattern_cache_bytes"] == 0
    assert cache.counters()["pattern_cache_entries"] == 0


def test_making_a_pattern_may_ask_for_another():
    cache = PatternCache()
    assert cache.get("outer", lambda: cache.get("inner", lambda: 1) + 1) == 2


@pytest.mark.timeout(60)
def test_threads_that_miss_together_get_one_entry():
    cache = PatternCache()
    together = threading.Barrier(4)

    def get(_):
        return cache.get("key", lambda: (together.wait(), object())[1])

    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(get, range(4)))
    assert len({id(one) for one in found}) == 1
    assert (cache.hits, cache.misses) == (0, 4)
