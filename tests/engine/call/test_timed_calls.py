"""What timed calls are given, that the numbers of a kept call are known later, and what calls leave running."""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from dilabench.engine.call.inputs import InputSet
from dilabench.engine.call.timed_calls import MOST_KEPT, TimedCalls
from dilabench.workload.spec import Workload
from tests.conftest import half_are_slow

LENGTH = 40


def workload(**changes: object) -> Workload:
    shape = {"batch_size": 2, "seq_len": LENGTH, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    return Workload.model_validate({"pattern": {"kind": "dense"}, **shape, **changes})


def inputs_of(one: Workload) -> InputSet:
    shapes = [(2, one.seq_len, heads, 8) for heads in (4, 2, 2)]
    tensors = [torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed, shape in enumerate(shapes)]
    return InputSet(*(x[0] if one.layout == "packed" else x for x in tensors))


@pytest.fixture
def always_due(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TimedCalls, "_due", lambda *_: True)


@pytest.mark.parametrize(
    ("stands_still", "changed"),
    [((), True), (("process_time",), False), (("perf_counter",), False), (("perf_counter", "process_time"), False)],
)
def test_inputs_change_once_time_has_gone_by_for_this_process_too(
    monkeypatch: pytest.MonkeyPatch, stands_still: tuple[str, ...], changed: bool
) -> None:
    seconds = {"perf_counter": 1.0, "process_time": 1.0}
    for name in seconds:
        monkeypatch.setattr(f"time.{name}", lambda name=name: seconds[name])
    one = workload()
    inputs, calls = inputs_of(one), TimedCalls(0, one)
    draw = calls._random_numbers

    def in_a_second(data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seconds.update({name: now + 1.0 for name, now in seconds.items()})
        return draw(data)

    monkeypatch.setattr(calls, "_random_numbers", in_a_second)
    seconds.update(perf_counter=2.0, process_time=2.0)
    calls.begin(count=3)
    calls._renew_from = 0
    calls.before(inputs)
    assert calls.renewed == [0]
    before = [x.clone() for x in inputs.distinct]
    seconds.update({name: now + 1e6 for name, now in seconds.items() if name not in stands_still})
    calls.before(inputs)
    assert any(not torch.equal(x, then) for x, then in zip(inputs.distinct, before, strict=True)) is changed


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_a_row_changes_in_the_inputs_of_every_call_of_a_sample(monkeypatch: pytest.MonkeyPatch, batch: int) -> None:
    """Else a result kept by its inputs would save most calls of each sample, and samples would differ little."""
    # Asked for all numbers, then for a row; in a batch all numbers change without being due.
    answers = itertools.cycle([False, True])
    monkeypatch.setattr(TimedCalls, "_due", lambda *_: next(answers))
    one = workload()
    sets, calls = [inputs_of(one) for _ in range(batch)], TimedCalls(0, one)
    calls.batch = batch
    calls.begin(count=20)
    calls._renew_from = 20
    for sample in range(4):
        changes = []
        for inputs in sets:
            then = [x.clone() for x in inputs.distinct]
            calls.before(inputs).keep(inputs.q * 2)
            changes.append([int((x != old).any((0, 2, 3)).sum()) for x, old in zip(inputs.distinct, then, strict=True)])
        rows = 1 if batch == 1 or sample % 2 else 0
        assert changes == [[rows] * 3] * batch
    assert calls.changed == [sample * batch for sample in range(4) if batch == 1 or sample % 2]
    calls.end()


@pytest.mark.usefixtures("always_due")
@pytest.mark.parametrize("layout", ["padded", "packed"])
# Of 1 to 3 tokens, the values that keep their signs lie in the second batch item, too.
@pytest.mark.parametrize("length", [1, 2, 3, LENGTH])
def test_the_numbers_of_a_kept_call_follow_from_the_changes_since(layout: str, length: int) -> None:
    packed = {"layout": "packed", "batch_size": 1, "cu_seqlens": (0, length)} if layout == "packed" else {}
    one = workload(seq_len=length, **packed)
    inputs, calls = inputs_of(one), TimedCalls(0, one)
    given: dict[int, list[torch.Tensor]] = {}
    for _ in range(3):
        calls.begin()
        for _ in range(20):
            kept = calls.before(inputs)
            given[kept.number] = [x.clone() for x in inputs.distinct]
            kept.keep(inputs.q * 2)
        calls.end()
    known = calls.take_kept()
    found = [kept for kept in known if kept.drawn]
    assert found[0].number == 0
    assert 8 <= sum(bool(kept.digests) for kept in known) <= MOST_KEPT
    assert 8 <= len(found) <= MOST_KEPT
    for kept in found:
        assert kept.count is not None
        for index, then in enumerate(given[kept.number]):
            batched = (lambda x: x[None]) if layout == "packed" else (lambda x: x)
            for batch in range(one.batch_size):
                earlier = inputs.changes.earlier(index, batched(inputs.distinct[index]), kept.count, batch, 1)
                assert torch.equal(earlier, batched(then)[batch, :, 1])
        for row in kept.rows:
            expected = 2 * (given[kept.number][0] if layout == "padded" else given[kept.number][0][None])
            assert torch.equal(row.copies[0], expected[row.batch, row.position, row.head])
    calls.release()
    assert not inputs.changes.holders


@pytest.mark.parametrize(("length", "dtype"), half_are_slow([1, 40, 9000], [torch.float32, torch.bfloat16]), ids=str)
def test_over_ranks_all_numbers_are_new_before_every_call_and_known_later(dtype: torch.dtype, length: int) -> None:
    one = workload(seq_len=length)
    shapes = [(2, length, heads, 8) for heads in (4, 2, 2)]
    ranks = [InputSet(*(torch.zeros(shape, dtype=dtype) for shape in shapes)) for _ in range(2)]
    timed = [TimedCalls(0, one, local_row=lambda position: position) for _ in ranks]
    given: list[list[list[torch.Tensor]]] = [[], []]
    for calls, inputs, own in zip(timed, ranks, given, strict=True):
        calls.begin(count=6, seed=1)
        for _ in range(6):
            calls.before(inputs).keep(inputs.q * 2)
            own.append([x.clone() for x in inputs.distinct])
        calls.end()
    assert timed[0].drawn == timed[1].drawn
    for calls, inputs, own in zip(timed, ranks, given, strict=True):
        for kept in calls.take_kept():
            assert kept.count is not None
            for index, then in enumerate(own[kept.number]):
                for batch, head in ((0, 0), (1, 1)):
                    earlier = inputs.changes.earlier(index, inputs.distinct[index], kept.count, batch, head)
                    assert torch.equal(earlier, then[batch, :, head])
                    row = inputs.changes.earlier(index, inputs.distinct[index], kept.count, batch, head, length - 1)
                    assert torch.equal(row[0], then[batch, -1, head])
    if length < 9000:
        return
    # Of neither the call before nor another rank.
    known = [*itertools.pairwise(given[0]), *zip(*given, strict=True)]
    for first, second in known:
        for x, y in zip(first, second, strict=True):
            assert abs(float(torch.corrcoef(torch.stack([x.flatten(), y.flatten()]).float())[0, 1])) < 0.05
            assert float((x.abs() == y.abs()).float().mean()) < 0.05


def test_calls_are_kept_alike_whenever_they_come() -> None:
    one = workload()
    inputs, numbers = inputs_of(one), []
    for _ in range(60):
        calls = TimedCalls(0, one)
        calls.begin()
        for _ in range(200):
            calls.before(inputs).keep(inputs.q)
        calls.end()
        numbers += [kept.number for kept in calls.take_kept() if kept.drawn]
    late = sum(number >= 100 for number in numbers) / len(numbers)
    assert 0.35 < late < 0.6


def test_which_calls_are_kept_is_drawn_after_they_have_returned() -> None:
    one = workload()
    inputs, calls = inputs_of(one), TimedCalls(0, one)
    calls.begin()
    for _ in range(400):
        kept = calls.before(inputs)
        assert not kept.drawn
        kept.keep(inputs.q)
        assert (kept.out is None) is not kept.drawn
    # In the same state half of them are kept.
    calls._row_share = 0.5
    drawn = []
    for _ in range(64):
        kept = calls.before(inputs)
        kept.keep(inputs.q)
        drawn.append(kept.drawn)
        calls._row_share = 0.5
    assert 8 < sum(drawn) < 56
    calls.end()


def test_every_batch_item_and_head_group_comes_up() -> None:
    one = workload()
    inputs, calls = inputs_of(one), TimedCalls(0, one)
    calls.begin()
    for _ in range(MOST_KEPT):
        kept = calls.before(inputs)
        kept.keep(inputs.q)
    calls.end()
    drawn = {(row.batch, row.head // 2) for kept in calls.take_kept() for row in kept.rows[1:]}
    assert drawn == {(batch, group) for batch in range(2) for group in range(2)}


def test_a_batch_of_calls_is_digested_as_it_is_called() -> None:
    """All calls of a batch are asked for before the first is made."""
    one = workload()
    inputs, calls = inputs_of(one), TimedCalls(0, one)
    calls.begin(last=True)
    batch = [calls.before(inputs) for _ in range(5)]
    for kept in batch:
        kept.keep(inputs.q)
    calls.end()
    for kept in calls.take_kept():
        if not kept.digests:
            continue
        before, after = kept.digests
        assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


@pytest.mark.parametrize("finishes", [True, False])
def test_a_pool_may_start_its_threads_late_but_must_have_finished(finishes: bool) -> None:
    one = workload()
    inputs, calls = inputs_of(one), TimedCalls(0, one)
    may_end = threading.Event()
    with ThreadPoolExecutor(8) as pool:
        calls.begin(last=True)
        for _ in range(200):
            kept = calls.before(inputs)
            kept.keep(inputs.q)
            pool.submit(may_end.is_set).result()
        if not finishes:
            pool.submit(may_end.wait)
        last = calls.end()
        may_end.set()
    assert last is not None
    assert last.threads == (not finishes)


def test_a_thread_of_a_call_that_is_not_kept_is_told_though_it_has_ended() -> None:
    one = workload()
    inputs, calls = inputs_of(one), TimedCalls(0, one)
    may_end = threading.Event()
    calls.begin(last=True)
    kept = calls.before(inputs)
    kept.keep(inputs.q)
    assert calls.before(inputs) is not None
    thread = threading.Thread(target=may_end.wait)
    thread.start()
    last = calls.before(inputs)
    last.keep(inputs.q)
    may_end.set()
    thread.join()
    assert calls.end() is last
    assert last.threads == 1
