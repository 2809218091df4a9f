import pytest

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


@pytest.mark.parametrize(("preset", "weak"), [("packed_documents_32k", set()), ("tiny", {(2, 2), (4, 4)})])
def test_a_preset_has_its_own_length_and_grows_where_its_sequences_can(preset, weak):
    catalogue = discover().catalogue
    request = RunRequest(suite="distributed", nproc=4, presets=(preset,))
    parallel = [one for one in distributed.expand(request, Planner(catalogue, CPU, request)) if one.case.world_size > 1]
    own = catalogue.workloads.get(preset).fields["seq_len"]
    times = {
        scaling: {
            (one.case.world_size, one.case.workload.seq_len / own) for one in parallel if scaling in one.labels.values()
        }
        for scaling in ("strong", "weak")
    }
    assert times == {"strong": {(2, 1), (4, 1)}, "weak": weak}
