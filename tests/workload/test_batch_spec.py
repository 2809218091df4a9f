"""vLLM's grammar of batches names packed workloads, and last rows over a cache; what they cannot say is refused."""

import pytest

from dilabench.errors import ConfigError
from dilabench.request import read_assignments
from dilabench.validation import validated
from dilabench.workload.spec import WorkloadRequest


def workload(*assignments):
    return validated(WorkloadRequest, read_assignments(assignments)).resolve("float32")


@pytest.mark.parametrize(
    ("text", "bounds"),
    [
        ("2q2k_3q512", (0, 2048, 4096, 4608, 5120, 5632)),
        ("q1", (0, 1)),
        ("Q7s7_2q1ks1024", (0, 7, 1031, 2055)),
    ],
)
def test_a_batch_is_a_packed_workload(text, bounds):
    found = workload(f"batch={text}", "num_heads=4")
    assert (found.layout, found.batch_size, found.seq_len, found.cu_seqlens) == ("packed", 1, bounds[-1], bounds)
    assert found.num_heads == 4
    assert found == workload(
        "layout=packed", f"seq_len={bounds[-1]}", "batch_size=1", f"cu_seqlens={bounds}", "num_heads=4"
    )
    assert found == workload("layout=packed", "batch_size=1", f"cu_seqlens={bounds}", "num_heads=4")


@pytest.mark.parametrize(
    ("text", "shape"), [("64q1s32k", (64, 1, 32768)), ("q2ks128k", (1, 2048, 131072)), ("8Q4S97", (8, 4, 97))]
)
def test_queries_over_a_cache_are_its_last_rows(text, shape):
    found = workload(f"batch={text}", "num_heads=4")
    assert (found.layout, found.batch_size, found.query_len, found.seq_len) == ("padded", *shape)


@pytest.mark.parametrize(
    ("assignments", "why"),
    [
        (("batch=2q2k_32q1s1k",), "'32q1s1k' has 1 queries over 1024 keys of a cache; such a workload has sequences"),
        (("batch=32q1s1k_8q1s2k",), "'32q1s1k' has 1 queries over 1024 keys of a cache"),
        (("batch=q2ks1k",), "query_len 2048 is more than seq_len 1024"),
        (("batch=32q1s1k", "query_len=2"), "batch='32q1s1k' determines query_len; omit one of the two"),
        (("batch=2k",), "'2k' must be like 2q2k"),
        (("batch=0q5",), "'0q5' must be like 2q2k"),
        (("batch=q2k__q1",), "'' must be like 2q2k"),
        (("batch=999999q1",), "up to 65536 sequences in all"),
        (("batch=q2k", "seq_len=5"), "batch='q2k' determines seq_len; omit one of the two"),
    ],
)
def test_what_no_packed_workload_is_gets_refused(assignments, why):
    with pytest.raises(ConfigError, match=why):
        workload(*assignments)
