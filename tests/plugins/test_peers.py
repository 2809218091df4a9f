"""Public projects as peers: found like everything else, and skipped with the reason where they cannot be used."""

import sys

import pytest

from dilabench.choice import descriptors
from dilabench.errors import ConfigError
from dilabench.machine import Machine
from dilabench.plugins.manager import discover
from dilabench.record import Case, GpuInfo
from dilabench.request import RunRequest
from dilabench.suites.planner import Planner
from dilabench.workload.spec import Workload, WorkloadRequest

CATALOGUE = discover().catalogue
PEERS = [one.name for one in CATALOGUE.implementations if one.project and one.takes != "model"]
OVER_RANKS = [name for name in PEERS if CATALOGUE.implementations.get(name).supports.max_world_size != 1]
CPU = Machine(device="cpu", no_cuda="no NVIDIA GPU is visible")
HOPPERS = Machine(device="cuda", gpus=(GpuInfo(name="H200", compute_capability="9.0"),) * 4)
SHAPE = {"batch_size": 1, "seq_len": 512, "num_heads": 8, "num_kv_heads": 4, "head_dim": 64, "dtype": "bfloat16"}


def reasons(name, machine=HOPPERS, ranks=4, backend="sdpa-flash", **fields):
    workload = Workload.model_validate({"pattern": {"kind": "dense"}, "mode": "both", **SHAPE, **fields})
    case = Case(implementation=name, backend=backend, workload=workload, world_size=ranks)
    return CATALOGUE.reasons_against(case, machine)


@pytest.fixture
def installed(monkeypatch):
    """Every module is there; distributions (a dash in the name) are those of this machine."""
    unmet = descriptors._unmet_package
    monkeypatch.setattr(
        descriptors, "_unmet_package", lambda name, *others: unmet(name, *others) if "-" in name else None
    )


def test_the_projects_that_there_are_adapters_for():
    assert [name for name in PEERS if CATALOGUE.implementations.origin(name) != "peers"] == []
    assert all(CATALOGUE.implementations.get(name).install for name in PEERS)
    assert PEERS == [
        "torchscale",
        "flex-documents",
        "dilated-attention-pytorch",
        "torch-context-parallel",
        "torch-context-parallel-alltoall",
        "ring-flash-attn-zigzag",
        "ring-flash-attn-ring",
        "yunchang-ulysses",
        "yunchang-usp",
        "flashinfer",
        "flashinfer-vsa",
        "fla-nsa",
        "native-sparse-attention-pytorch",
    ]


@pytest.mark.parametrize("name", OVER_RANKS)
def test_a_causal_dense_workload_over_ranks_can_be_computed(installed, name):
    assert reasons(name) == ()


@pytest.mark.parametrize(
    ("name", "asked", "reason"),
    [
        ("torch-context-parallel", {"ranks": 1}, "needs at least 2 ranks, not 1 (--nproc)"),
        ("torch-context-parallel", {"seq_len": 500}, "seq_len 500 is not a multiple of 8, which 4 ranks need here"),
        ("ring-flash-attn-ring", {"seq_len": 510}, "seq_len 510 is not a multiple of 4, which 4 ranks need here"),
        ("ring-flash-attn-zigzag", {"causal": False}, "causal False is not supported (has True)"),
        ("ring-flash-attn-zigzag", {"window": (64, 0)}, "window (64, 0) is not supported"),
        ("ring-flash-attn-ring", {"dtype": "float16"}, "dtype float16 is not supported (has bfloat16)"),
        (
            "yunchang-ulysses",
            {"num_kv_heads": 2},
            "both must be multiples of 4, the number of ranks that divide the heads",
        ),
        ("yunchang-usp", {"num_kv_heads": 1, "num_heads": 3}, "both must be multiples of 2"),
        ("torch-context-parallel", {"machine": CPU}, "device cpu is not supported (has cuda)"),
        (
            "torch-context-parallel",
            {"backend": "sdpa-efficient"},
            "backend sdpa-efficient: torch-context-parallel calls only sdpa-cudnn or sdpa-flash",
        ),
    ],
)
def test_what_cannot_be_used_says_why(installed, name, asked, reason):
    assert reason in "; ".join(reasons(name, **asked))


BLOCKS = {"kind": "block_sparse", "block_size": 128}
BLOCKS_OF_64 = {"kind": "block_sparse", "block_size": 64}
SELECTED = {"kind": "selected_blocks", "block_size": 64, "top_k": 4}
FOR_FLA = {"pattern": SELECTED, "num_heads": 32, "num_kv_heads": 2}
LUCIDRAINS = "native-sparse-attention-pytorch"
FOR_CAKE = {"pattern": BLOCKS_OF_64, "causal": False, "mode": "forward", "num_kv_heads": 8, "head_dim": 128}


@pytest.mark.parametrize(
    ("name", "asked", "reason"),
    [
        ("flashinfer", {"pattern": BLOCKS, "causal": False, "mode": "forward"}, None),
        ("flashinfer", {"pattern": BLOCKS, "mode": "forward"}, "causal True is not supported (has False)"),
        ("flashinfer", {"pattern": BLOCKS, "causal": False}, "mode both is not supported (has forward)"),
        (
            "flashinfer",
            {"pattern": {**BLOCKS, "per_head": True}, "causal": False, "mode": "forward"},
            "FlashInfer has one mask for all heads, or one for each key/value head",
        ),
        (
            "flashinfer",
            {"pattern": BLOCKS, "causal": False, "mode": "forward", "seq_len": 500},
            "seq_len 500 is not a multiple of block_size 128",
        ),
        ("flashinfer-vsa", FOR_CAKE, None),
        ("flashinfer-vsa", {**FOR_CAKE, "num_kv_heads": 4}, "num_kv_heads 4 below num_heads 8 is not supported"),
        ("flashinfer-vsa", {**FOR_CAKE, "head_dim": 64}, "head_dim 64 is not a multiple of 128"),
        ("flashinfer-vsa", {**FOR_CAKE, "seq_len": 500}, "seq_len 500 is not a multiple of block_size 64"),
        ("flashinfer-vsa", {**FOR_CAKE, "pattern": BLOCKS}, "has blocks of 64, not of 128"),
        (
            "flashinfer-vsa",
            {**FOR_CAKE, "pattern": {**BLOCKS_OF_64, "sparsity": 0.0}, "seq_len": 8192},
            "1 to 64 blocks for each block of queries, here 128 to 128",
        ),
        ("fla-nsa", FOR_FLA, None),
        ("fla-nsa", {**FOR_FLA, "causal": False}, "causal False is not supported (has True)"),
        ("fla-nsa", {**FOR_FLA, "num_kv_heads": 4}, "query heads for each key/value head, not 8"),
        ("fla-nsa", {**FOR_FLA, "num_heads": 48}, "query heads for each key/value head, not 24"),
        ("fla-nsa", {**FOR_FLA, "pattern": {**SELECTED, "top_k": 3}}, "a power of two of blocks, not top_k 3"),
        ("fla-nsa", {**FOR_FLA, "pattern": {**SELECTED, "block_size": 48}}, "64 ... tokens, not of 48"),
        ("fla-nsa", {**FOR_FLA, "pattern": {**SELECTED, "block_size": 1}}, "64 ... tokens, not of 1"),
        (LUCIDRAINS, FOR_FLA, None),
        (LUCIDRAINS, {**FOR_FLA, "pattern": {**SELECTED, "block_size": 48, "top_k": 3}}, None),
        (LUCIDRAINS, {**FOR_FLA, "pattern": {**SELECTED, "block_size": 1}}, "16 or more tokens, not single ones"),
        (LUCIDRAINS, {**FOR_FLA, "num_heads": 48}, "a power of two of query heads for each key/value head, not 24"),
        (LUCIDRAINS, {**FOR_FLA, "scale": 0.5}, "computes scale=1/sqrt(D), not 0.5"),
        (LUCIDRAINS, {**FOR_FLA, "head_dim": 256}, "head_dim 256 is above 128"),
    ],
)
def test_libraries_of_sparse_patterns_are_asked_for_what_they_compute(installed, name, asked, reason):
    found = reasons(name, ranks=1, backend=None, **asked)
    assert found == () if reason is None else reason in "; ".join(found)


TORCHSCALES = {"offset": "blocked", "padding": "zero_key", "merge_grad": "detached"}


@pytest.mark.parametrize(
    ("pattern", "fields", "reason"),
    [
        (TORCHSCALES, {"causal": False}, None),
        # Behind a causal mask nobody sees the zeros, and 512 positions in segments of 64 have none.
        ({**TORCHSCALES, "padding": "masked"}, {"seq_len": 500}, None),
        ({**TORCHSCALES, "padding": "masked"}, {"causal": False}, None),
        ({**TORCHSCALES, "padding": "masked"}, {"causal": False, "seq_len": 500}, "torchscale attends to the zeros"),
        ({**TORCHSCALES, "offset": "modulo"}, {}, "torchscale computes offset=blocked, not offset=modulo"),
        ({**TORCHSCALES, "merge_grad": "exact"}, {}, "merge_grad exact is not supported"),
        ({**TORCHSCALES, "merge_grad": "exact"}, {"mode": "forward"}, None),
        ({**TORCHSCALES, "padding": "masked", "segment_lengths": (63, 512)}, {}, "2 does not divide 63"),
        (TORCHSCALES, {"scale": 0.5}, "torchscale computes scale=1/sqrt(D), not 0.5"),
        (TORCHSCALES, {"num_kv_heads": 4}, "num_kv_heads 4 below num_heads 8 is not supported"),
    ],
)
def test_torchscale_is_asked_for_its_own_function_only(installed, pattern, fields, reason):
    branches = {"kind": "dilated", "segment_lengths": (64, 128), "dilation_rates": (2, 4)}
    found = reasons("torchscale", ranks=1, **{"num_kv_heads": 8, "pattern": {**branches, **pattern}, **fields})
    assert found == () if reason is None else reason in "; ".join(found)


def test_what_is_no_longnet_attention_is_refused_with_the_reason(installed):
    dilated = {"kind": "dilated", "segment_lengths": (512,), "dilation_rates": (1,)}
    (reason,) = reasons("dilated-attention-pytorch", ranks=1, pattern=dilated)
    assert "does not compute LongNet attention. Each head has only one branch" in reason


@pytest.mark.parametrize("there", [set(), {"torchscale"}])
def test_a_torchscale_without_dilated_attention_is_named(monkeypatch, there, tmp_path):
    for name in there:
        (tmp_path / name).mkdir()
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    # Looking into a package imports it: what is imported here leaves again.
    monkeypatch.setitem(sys.modules, "torchscale", None)
    del sys.modules["torchscale"]
    missing = "torchscale.component" if there else "torchscale"
    assert f"module {missing} is not installed" in reasons("torchscale", ranks=1)


def test_a_folder_of_peers_that_is_none_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("DILABENCH_PEERS", f"{tmp_path}:/no/such/folder")
    with pytest.raises(ConfigError, match="DILABENCH_PEERS names '/no/such/folder', which is no folder; give"):
        discover()
    assert sys.path[-1] == str(tmp_path)


def test_a_missing_package_is_a_reason(monkeypatch):
    monkeypatch.setattr("dilabench.plugins.catalogue.find_spec", lambda name: None)
    assert reasons("ring-flash-attn-zigzag") == ("module ring_flash_attn is not installed",)


@pytest.mark.parametrize(
    ("name", "chosen"),
    [("zigzag-ring", "flash3"), ("torch-context-parallel", "sdpa-cudnn"), ("ring-flash-attn-zigzag", "sdpa-flash")],
)
def test_auto_takes_a_kernel_that_the_project_can_call(installed, name, chosen):
    planner = Planner(CATALOGUE, HOPPERS, RunRequest(suite="ring", nproc=4))
    request = WorkloadRequest.model_validate({"pattern": "dense", **SHAPE})
    (planned,) = planner.plan(CATALOGUE.implementations.get(name), request)
    assert (planned.case.backend, planned.skip) == (chosen, None)
