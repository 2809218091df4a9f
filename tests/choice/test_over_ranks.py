"""The algorithm that is expected to be the fastest over ranks, beside times that were measured."""

from __future__ import annotations

import json
from itertools import groupby, pairwise
from pathlib import Path

import pytest
import torch

from dilabench.attention import over_ranks
from dilabench.choice.over_ranks import expected_seconds, fastest_expected
from dilabench.choice.rules import choose
from dilabench.choice.ways import Way, own_ways
from dilabench.comparison.verdicts import medians_over
from dilabench.distributed.single_rank import SingleRank
from dilabench.impls.call import Call
from dilabench.impls.ring.schedule.function import ShardedAttention
from dilabench.machine import GpuInfo, Machine
from dilabench.patterns.dense import DENSE
from dilabench.plugins.catalogue import HeldSharding
from dilabench.plugins.manager import discover
from dilabench.record import Case, Measured
from dilabench.store.run_files import read_record
from dilabench.suites.planner import workload_request
from dilabench.units import counted
from dilabench.workload.spec import Workload

FIGURES = Path(__file__).parents[2] / "docs" / "figures"
RESULTS = Path(__file__).parents[2] / "docs" / "results"
GOLDEN = Path(__file__).parents[1] / "golden" / "records"
OF_THE_LIBRARY = ("zigzag-ring", "zigzag-allgather", "ulysses")
MEASURED = {
    "h200-ring-two-gpus": 2,
    "h200-ring-two-gpus-flash4": 2,
    "h200-ring-four-gpus-cudnn": 4,
    "h200-ring-four-gpus-flash4": 4,
}
CATALOGUE = discover().catalogue


def preset(name: str, **fields: object) -> Workload:
    return workload_request(CATALOGUE, name, {"mode": "both", **fields}).resolve("bfloat16")


def h200s(count: int) -> Machine:
    return Machine(device="cuda", gpus=(GpuInfo(name="NVIDIA H200", compute_capability="9.0"),) * count)


@pytest.mark.parametrize("file", MEASURED)
def test_of_what_was_measured_no_other_algorithm_was_much_faster(file: str) -> None:
    ranks, told = MEASURED[file], json.loads((FIGURES / f"{file}.json").read_text(encoding="utf-8"))["timed"]
    compared = 0
    for name, rows in groupby(sorted(told, key=lambda row: row["preset"]), key=lambda row: row["preset"]):
        took = {row["algorithm"]: row["total_ms"] for row in rows}
        if len(took) > 1:
            cases = [Case(implementation=one, workload=preset(name), world_size=ranks) for one in took]
            (chosen, seconds), *_ = fastest_expected(cases, "cuda", CATALOGUE)
            assert seconds is not None
            assert took[chosen.implementation] <= 1.02 * min(took.values()), (name, took)
            # It is no prediction of a backend's time, but no fantasy either.
            assert 0.7 < 1e3 * seconds / took[chosen.implementation] < 1.3, counted(len(took), "algorithm")
            compared += 1
    assert compared


@pytest.mark.parametrize(
    "path", [RESULTS / "h200-four-gpus.json.xz", GOLDEN / "h200-four-gpus-qwen.json.xz"], ids=lambda path: path.stem
)
def test_the_library_takes_the_fastest_of_what_a_record_shows(path: Path) -> None:
    """Forward and backward alone, too."""
    took: dict[Workload, dict[str, float]] = {}
    for row in read_record(path).rows:
        if isinstance(row.outcome, Measured) and row.case.implementation in OF_THE_LIBRARY:
            took.setdefault(row.case.workload, {})[row.case.implementation] = medians_over([row.outcome.timings[:1]])[0]
    compared = 0
    for workload, times in took.items():
        if len(times) > 1:
            ((chosen, _), *_) = fastest_expected(
                [Case(implementation=name, workload=workload, world_size=4) for name in times], "cuda", CATALOGUE
            )
            assert times[chosen.implementation] <= 1.06 * min(times.values()), (workload.mode, times)
            compared += 1
    assert compared


@pytest.mark.parametrize(
    ("name", "ranks", "algorithm"),
    [
        ("large", 4, "zigzag-ring"),
        # Few K/V heads: little to send, but a ring adds up results of all query heads.
        ("qwen3_32b", 4, "zigzag-allgather"),
        ("packed_documents_128k", 4, "balanced-allgather"),
        # Of nested segments that do not cross ranks nothing is sent.
        ("longnet_128k", 4, "ring-allgather"),
    ],
)
def test_auto_takes_it_and_says_what_is_expected(name: str, ranks: int, algorithm: str) -> None:
    choice = choose(CATALOGUE, h200s(ranks), preset(name), ranks)
    assert choice.implementation in {algorithm, "fused-sharded"}
    if choice.implementation == algorithm:
        assert " expected" in choice.source


@pytest.mark.parametrize("length", [4096, 4001])
@pytest.mark.parametrize("ranks", [4, 8])
def test_a_short_call_is_the_one_that_its_host_launches_soonest(length: int, ranks: int) -> None:
    """Its device would be done sooner with a ring, whose messages are hidden; on CPUs that decides."""
    asked = preset("medium", batch_size=1, seq_len=length)
    names = ("zigzag-ring", "zigzag-allgather")
    for device, fastest in (("cuda", "zigzag-allgather"), ("cpu", "zigzag-ring")):
        cases = [Case(implementation=name, workload=asked, world_size=ranks) for name in names]
        (chosen, seconds), *_ = fastest_expected(cases, device, CATALOGUE)
        assert seconds is not None
        assert chosen.implementation == fastest


def test_launches_of_an_algorithm_grow_with_ranks_only_if_its_keys_come_step_by_step() -> None:
    asked, found = preset("medium"), {}
    for name in ("zigzag-ring", "ring", "zigzag-allgather", "balanced-allgather", "ulysses"):
        sharding = CATALOGUE.sharding_of(name)
        assert sharding is not None
        found[name] = [tuple(sharding.launches(asked, ranks)) for ranks in (2, 4, 8)]
    assert found == {
        "zigzag-ring": [(2, 1, 1), (4, 3, 5), (8, 7, 13)],
        "ring": [(2, 1, 2), (4, 3, 6), (8, 7, 14)],
        "zigzag-allgather": [(2, 1, 1), (3, 1, 1), (3, 1, 1)],
        "balanced-allgather": [(2, 1, 1), (3, 1, 1), (3, 1, 1)],
        "ulysses": [(1, 2, 2)] * 3,
    }


def test_a_window_is_not_sent_round() -> None:
    asked = preset("large", window=(512, 0))
    ring, deal = (
        expected_seconds(Case(implementation=name, workload=asked, world_size=4), "cuda", CATALOGUE)
        for name in ("zigzag-ring", "zigzag-allgather")
    )
    assert deal is not None
    assert ring is not None
    assert deal < ring / 2


def test_what_is_unknown_comes_last_or_leaves_the_ranking_as_it_is() -> None:
    known, unknown = (
        Case(implementation=name, workload=preset("medium"), world_size=2) for name in ("zigzag-ring", "fused-sharded")
    )
    assert [case for case, _ in fastest_expected((known, unknown), "cuda", CATALOGUE)] == [known, unknown]
    assert [case for case, _ in fastest_expected((unknown, known), "cuda", CATALOGUE)] == [unknown, known]


@pytest.mark.parametrize("balance", [0.0, -1.0, float("nan")])
def test_a_balance_that_is_none_tells_nothing(balance: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HeldSharding, "load_balance", lambda *_: balance)
    case = Case(implementation="zigzag-ring", workload=preset("medium"), world_size=2)
    assert expected_seconds(case, "cuda", CATALOGUE) is None


def test_a_sharding_that_was_written_before_the_question_does_not_add_up() -> None:
    class Older:
        def load_balance(self, workload: Workload, ranks: int) -> float:
            return 1.0

    held = HeldSharding(Older(), "older", "sharding of 'older'", CATALOGUE)
    assert held.load_balance(preset("medium"), 2) == 1.0
    assert held.sums_hops(preset("medium"), 2) is False


@pytest.mark.parametrize(
    ("installed", "chosen"),
    [((), "sdpa-cudnn"), (("flash-attn",), "sdpa-cudnn"), (("flash-attn", "flash-attn-4"), "flash4")],
)
@pytest.mark.parametrize("implementation", ["balanced-allgather", "zigzag-allgather", "ulysses"])
def test_packed_sequences_over_ranks_take_the_backend_of_one_device(
    implementation: str, installed: tuple[str, ...], chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows on the same rows go by dilabench's tiles where cuDNN has no kernel for packed sequences."""
    kernels = {"flash-attn>=2.7", "flash-attn-4", "flash_attn_interface"}

    def unmet(requires: tuple[str, ...], *_: object) -> tuple[str, ...]:
        lacking = (name for name in requires if name in kernels and name.split(">")[0] not in installed)
        return tuple(f"needs {name}" for name in lacking)

    monkeypatch.setattr("dilabench.choice.ways.unmet", unmet)
    machine = h200s(4)
    for workload in map(preset, ("packed_documents_128k", "large")):
        assert own_ways(over_ranks=True).choose_backend(Way(implementation, None, workload, 4), machine)[0] == chosen
        assert own_ways().choose_backend(Way("dense", None, workload), machine)[0] == chosen
    on_cpu = Way(implementation, None, preset("packed_documents_128k"), 2)
    assert own_ways(over_ranks=True).choose_backend(on_cpu, Machine(device="cpu"))[0] == "flash-cpu"


def test_tokens_in_a_known_order_need_no_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    """One algorithm takes balanced packings, so that the pairs of a new one are not counted rank by rank."""

    def refused(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr("dilabench.choice.over_ranks.expected_seconds", refused)
    bounds = preset("packed_documents_128k", num_heads=2, num_kv_heads=2, head_dim=8).cu_seqlens
    assert bounds is not None
    bounds = tuple(edge // 64 for edge in bounds if edge % 3 == 0 or edge == bounds[-1])
    world = SingleRank.of(0, 2)
    cut = over_ranks._cut(tuple(pairwise(bounds)), "balanced", (-1, -1), 2)
    shards = over_ranks.SequenceShards(world, bounds, True, "balanced", cut)
    x = torch.zeros(shards.rows, 2, 8)
    function = shards._computation_for(x, x, x, Call(DENSE, causal=True, algorithm="auto"))
    assert isinstance(function, ShardedAttention)
    assert function.shards == cut


@pytest.mark.parametrize("ranks", [2, 16])
@pytest.mark.parametrize("name", ["medium", "longnet_128k", "packed_documents_32k"])
def test_ranks_that_see_their_own_gpu_alone_have_an_algorithm(name: str, ranks: int) -> None:
    """As with CUDA_VISIBLE_DEVICES for each process, or on several nodes; a command needs the GPUs of its ranks."""
    workload = preset(name)
    choice = choose(own_ways(over_ranks=True), h200s(1), workload, ranks)
    case = Case(implementation=choice.implementation, workload=workload, world_size=ranks)
    assert f"{ranks} ranks need as many GPUs, have 1" in CATALOGUE.reasons_against(case, h200s(1))
