"""Suite `choice`: which shapes are drawn, who is planned for each, and when the next one follows."""

from collections import Counter

import pytest

from dilabench.choice import descriptors, first_use
from dilabench.errors import ConfigError
from dilabench.machine import Machine
from dilabench.metadata import SHAPE
from dilabench.plugins.manager import discover
from dilabench.record import Case, GpuInfo, Row, Skipped
from dilabench.request import run_request
from dilabench.suites.choice import cases
from dilabench.suites.choice.shapes import RANGES, shape
from dilabench.suites.planner import Planner, expand
from dilabench.workload.spec import flops

CATALOGUE = discover().catalogue
CPU = Machine(device="cpu", no_cuda="test")
GPU = Machine(device="cuda", gpus=(GpuInfo(name="a", compute_capability="9.0"),))
MEASURED = Skipped(code="unsupported", why="stands for any outcome that is final")


def drawn(machine, count=60, seed=0, **fixed):
    found = [shape(CATALOGUE, machine, seed, number, fixed) for number in range(1, count + 1)]
    return [one.resolve(machine.auto_dtype) for one in found]


def asked(*assignments, machine=CPU, **run):
    request = run_request(CATALOGUE, suite="choice", assignments=assignments, run=run)
    return request, Planner(CATALOGUE, machine, request)


def ended(planned, outcome=MEASURED):
    return [Row(planned=one, outcome=one.skip or outcome) for one in planned]


@pytest.mark.parametrize("machine", [CPU, GPU], ids=["cpu", "cuda"])
def test_shapes_are_those_of_the_seed_and_of_every_kind(machine):
    found, limits = drawn(machine), RANGES[machine.facts.size]
    assert found == drawn(machine)
    assert found[7] == drawn(machine, count=8)[7]
    assert set(found).isdisjoint(drawn(machine, seed=1))
    patterns = [one.pattern for one in found]
    kinds = Counter(
        {
            "dense": sum(one.is_dense for one in found),
            "windows": sum(one.window != (-1, -1) for one in found),
            "GQA": sum(one.num_kv_heads != one.num_heads for one in found),
            "grouped": sum(one.heads == "grouped" for one in patterns),
            "blocked": sum(one.offset == "blocked" for one in patterns),
            "odd rates": sum(any(rate % 2 and rate > 1 for rate in one.dilation_rates) for one in patterns),
            "rates that do not divide": sum(
                any(w % r for w, r in zip(one.segment_lengths, one.dilation_rates, strict=True)) for one in patterns
            ),
            "causal": sum(one.causal for one in found),
            "backward": sum(one.mode == "both" for one in found),
            "batches": sum(one.batch_size > 1 for one in found),
        }
    )
    assert min(kinds.values()) > 0, kinds
    assert {one.dtype for one in found} == set(limits.dtypes)
    assert {len(one.segment_lengths) for one in patterns} >= {1, 2, 3, 4}
    assert all(limits.lengths[0] <= one.seq_len <= limits.lengths[1] for one in found)
    assert max(one.tokens for one in found) <= limits.lengths[1]
    assert max(map(flops, found)) <= limits.most_flops


def test_a_field_that_is_given_is_not_drawn_and_takes_nothing_from_the_others():
    free, fixed = drawn(CPU), drawn(CPU, head_dim=1)
    assert {one.head_dim for one in fixed} == {1}
    # Where too much work is drawn again, fewer numbers in a head may make it little enough.
    as_free = [one.model_copy(update={"head_dim": 1}) == other for one, other in zip(free, fixed, strict=True)]
    assert sum(as_free) > len(free) / 2
    assert sum(one.is_dense for one in drawn(CPU, seq_len=1000)) > 1
    assert {one.seq_len for one in drawn(CPU, seq_len=1)} == {1}
    with pytest.raises(ConfigError, match=r"no shape can be drawn with causal, window as given: .*looks 8 positions"):
        drawn(CPU, count=1, causal=True, window=(8, 8))


@pytest.mark.usefixtures("with_a_compiler")
def test_the_choice_stands_beside_every_way_that_can_serve_it():
    planned = expand(CATALOGUE, CPU, asked()[0])
    assert [(one.case.implementation, one.case.backend) for one in planned] == [
        *[(name, backend) for name in ("gather", "strided") for backend in ("flash-cpu", "sdpa-flash", "math")],
        ("library", None),
    ]
    assert {SHAPE.of(one) for one in planned} == {1}
    assert len({one.case.group_id for one in planned}) == 1


def test_on_a_gpu_the_ways_are_ours_and_over_what_may_be_chosen(monkeypatch):
    monkeypatch.setattr(descriptors, "_unmet_package", lambda *_: None)
    fixed = ("dtype=bfloat16", "head_dim=64", "heads=all", "window=-1,-1", "mode=both")
    request, planner = asked(*fixed, machine=GPU, nproc=2)
    ways = {(one.case.implementation, one.case.backend) for one in cases.expand(request, planner)}
    # Both are tried for other work.
    preferred = set(CATALOGUE.preferred_backends(GPU)) - {"math", "flex"}
    assert ways == {
        ("library", None),
        ("fused", None),
        *((name, one) for name in ("gather", "strided") for one in preferred),
    }


@pytest.mark.parametrize(
    ("dtype", "backends", "there"), [("float32", (), False), ("float32", ("math",), True), ("float64", (), True)]
)
def test_plain_products_are_tried_on_a_gpu_by_name_or_where_no_kernel_serves(dtype, backends, there):
    request, planner = asked(f"dtype={dtype}", "window=-1,-1", machine=GPU, backends=backends)
    ways = {(one.case.implementation, one.case.backend) for one in cases.expand(request, planner)}
    assert (("strided", "math") in ways) is there


def test_what_is_known_to_be_far_slower_is_neither_tried_nor_taken(monkeypatch):
    monkeypatch.setattr(descriptors, "_unmet_package", lambda *_: None)
    for head_dim, there in ((128, True), (192, False)):
        request, planner = asked("dtype=float32", f"head_dim={head_dim}", "heads=all", "window=-1,-1", machine=GPU)
        planned = cases.expand(request, planner)
        workload = planned[0].case.workload
        assert ("fused" in {one.case.implementation for one in planned}) is there
        ways = first_use.ways_to_measure(planner.catalogue, planner.machine, workload)
        assert ("fused" in {way.implementation for way in ways}) is there
        case = Case(implementation="fused", workload=workload)
        assert not CATALOGUE.reasons_against(case, GPU), "who names it gets it"
        assert there or "registers" in CATALOGUE.reasons_untried(case, GPU)[0]


def test_shapes_follow_one_by_one_until_there_are_enough_or_no_time():
    request, planner = asked("shapes=2")
    first = cases.expand(request, planner)
    second = [one for one in cases.follow_up(ended(first), request, planner) if one not in first]
    assert {SHAPE.of(one) for one in second} == {2}
    assert second[-1].case.implementation == "library"
    rows = [*ended(first), *ended(second)]
    assert {one.case.case_id for one in cases.follow_up(rows, request, planner)} == {
        row.case.case_id for row in ended(second)
    }
    cut = [*ended(first), *ended(second[:1]), *ended(second[1:], Skipped(code="budget", why="no time"))]
    assert cases.follow_up(cut, request, planner) == ()
    # A run that goes on has dropped the rows without time: they are asked for again, with the rest of their shape.
    again = cases.follow_up([*ended(first), *ended(second[:1])], request, planner)
    assert [one.case.case_id for one in again] == [one.case.case_id for one in second]
    assert cases.follow_up([], request, planner) == ()


def test_shards_deal_the_shapes_by_their_numbers():
    found = []
    for index in (1, 2):
        request, planner = asked("shapes=3", shard=f"{index}/2")
        rows, more = [], expand(CATALOGUE, CPU, request)
        while more:
            rows += ended(more)
            measured = {row.case.case_id for row in rows}
            more = [one for one in cases.follow_up(rows, request, planner) if one.case.case_id not in measured]
        found.append({SHAPE.of(row.planned): row.case.workload for row in rows})
    assert [sorted(one) for one in found] == [[1, 3], [2]]
    assert [one for _, one in sorted((found[0] | found[1]).items())] == drawn(CPU, count=3)


@pytest.mark.parametrize(
    ("assignments", "run", "why"),
    [
        (("shapes=2",), {"shard": "2/3"}, "shard 2/3: the request has 2 shapes, so there can be at most as many"),
        (("shapes=0",), {}, "shapes 0 must be at least 1"),
        (("shapes=6.5",), {}, "not a whole number"),
        (("shape=6",), {}, "shape: unknown key"),
        ((), {"lengths": [512]}, "takes neither presets nor --lengths"),
        (("pattern=block_sparse",), {}, "the library has no choice for pattern 'block_sparse'"),
    ],
)
def test_what_is_asked_wrongly_is_refused(assignments, run, why):
    with pytest.raises(ConfigError, match=why):
        expand(CATALOGUE, CPU, asked(*assignments, **run)[0])
