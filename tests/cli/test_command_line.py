"""One request and its command line: each comes to the other."""

import random

import pytest

from dilabench.request import RunRequest, assignment, read_assignments, run_request

OPTIONS = {
    "quick": {},
    "optimization": {},
    "ring": {"sharding": "inside"},
    "extreme": {"max_seq_length": 2**16, "chunked": True, "offload": False, "memory_limit": 10**9},
    "all": {"tokens": 2**20, "shapes": 7, "chunked": False},
}
WORKLOAD = {
    "pattern": "dilated",
    "segment_lengths": (512, 1024),
    "dilation_rates": (1, 2),
    "batch_size": "auto",
    "num_heads": 6,
    "causal": False,
    "window": (5, 0),
    "scale": 0.1,
    "dtype": "float16",
    "mode": "both",
}
RUN = {
    "implementations": ["gather", "auto"],
    "backends": ["all"],
    "lengths": [1024, 777],
    "timing": "simple",
    "warmup_runs": 0,
    "timing_runs": 9,
    "nproc": 2,
    "device": "cpu",
    "budget_s": 0.1 + 0.2,
    "seed": 3,
    "shard": "2/8",
    "cuda_graph": True,
    "compile": True,
    "pattern_cache_entries": 10,
    "buffer_pool_bytes": 2**30,
}


def some(draw, fields):
    """Any of the fields."""
    return {name: value for name, value in fields.items() if draw.random() < 0.5}


@pytest.fixture
def read_back(cli, monkeypatch):
    """The request that `dilabench run` plans."""

    def call(words):
        planned = []
        monkeypatch.setattr("dilabench.suites.planner.plan_run", lambda found, request, nodes: planned.append(request))
        cli(*words, "--dry-run")
        return planned[0]

    return call


@pytest.mark.parametrize("seed", range(24))
def test_a_request_and_its_command_line_come_to_each_other(catalogue, read_back, seed):
    draw = random.Random(seed)
    suite = list(OPTIONS)[seed % len(OPTIONS)]
    run = {**some(draw, RUN), "options": some(draw, OPTIONS[suite])}
    if draw.random() < 0.3:
        run |= {"budget_s": "none", "pattern_cache_entries": 0, "buffer_pool_bytes": 5, "timing": "warmup"}
    configs = ["tiny", "medium"] if draw.random() < 0.3 else []
    request = run_request(catalogue, suite=suite, configs=configs, workload=some(draw, WORKLOAD), run=run)
    assert read_back(request.command_line()) == request


def test_every_field_of_a_request_is_written(catalogue):
    fields = {*RUN, "suite", "presets", "overrides", "options"}
    assert fields == RunRequest.model_fields.keys()
    assert all(RunRequest.model_fields[name].default != RUN[name] for name in RUN)


@pytest.mark.parametrize(
    "value",
    [5, 0.5, 1e-5, True, "a", "5", "true", " a ", "a=b", "a,b", '"', "\\", "ü\n", (1, 2), (1,), ["a", "b,c"], []],
    ids=repr,
)
def test_a_value_is_read_as_it_was_written(value):
    read = read_assignments([assignment("field", value)])["field"]
    assert type(read) is type(value) or isinstance(value, tuple)
    assert read == (list(value) if isinstance(value, tuple) else value)
