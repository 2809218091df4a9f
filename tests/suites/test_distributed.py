from dilabench.machine import Machine
from dilabench.plugins.manager import discover
from dilabench.request import RunRequest
from dilabench.suites.distributed import cases as distributed
from dilabench.suites.planner import Planner

CPU = Machine(device="cpu", no_cuda="test")


def test_ranks_double_up_to_the_number_asked_for():
    assert distributed.rank_counts(2) == (2,)
    assert distributed.rank_counts(6) == (2, 4, 6)
    assert distributed.rank_counts(8) == (2, 4, 8)


def test_strong_scaling_keeps_the_length_and_weak_the_length_per_rank():
    catalogue = discover().catalogue
    request = RunRequest(suite="distributed", nproc=4, lengths=(512, 4096), overrides={"pattern": "dense"})
    cases = distributed.expand(request, Planner(catalogue, CPU, request))
    assert len({one.case.case_id for one in cases}) == len(cases)
    parallel = [one for one in cases if one.case.world_size > 1]
    strong = {(one.case.world_size, one.case.workload.seq_len) for one in parallel if one.labels["scaling"] == "strong"}
    weak = {(one.case.world_size, one.case.workload.seq_len) for one in parallel if one.labels["scaling"] == "weak"}
    assert strong == {(2, 512), (2, 4096), (4, 512), (4, 4096)}
    assert weak == {(2, 1024), (4, 2048)}
    # Every parallel row has its single-device row.
    single = {one.case.workload.seq_len for one in cases if one.case.world_size == 1}
    assert single == {512, 1024, 2048, 4096}
