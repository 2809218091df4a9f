"""Attention over ranks as a library: exact, refused with a reason, and good for training."""

import multiprocessing
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dilabench.attention import as_implementation, sequence_shards
from dilabench.contracts import BuildContext
from dilabench.engine.verify import summary, verify
from dilabench.impls.operator_rules import from_bytes
from dilabench.workload.spec import Workload
from tests.conftest import slow

pytestmark = pytest.mark.distributed
FOLDER = Path(__file__).parent


def test_results_are_those_of_one_device_and_refusals_say_why(launch):
    import library_cases

    (wrong, said), other = launch(library_cases.wrong_and_refused, 2)
    assert (wrong, said) == other
    assert wrong == []
    reasons = (
        "ring-allgather: it takes tokens in another order than zigzag",
        "must be [B, N_local, H, D]",
        "must have the axes of query (2, 12, 4, 8)",
        "must share dtype and device",
        "unknown implementation 'no-such'",
        "strided: ",
        "scale is a tensor",
        "window None must be two integers",
        "segment_lengths 4 must be a sequence of integers",
        "ranks exchange data; give tensors that have some",
        "give the axis of tokens as dim",
        "give one of them",
        "must rise from 0",
        "bounds that rise from 0",
        "'striped' must be one of zigzag, contiguous, balanced",
        "another order than balanced: those were assigned for causal attention",
        "causal attention with the window that sequence_shards was given",
        "a DeviceMesh of 2 dimensions",
    )
    for text, reason in zip(said, reasons, strict=True):
        assert reason in text


@pytest.mark.parametrize(("ranks", "step"), [(2, 2), slow(2, 1), slow(3, 1)])
def test_sinks_and_their_summed_gradients_are_those_of_one_device(launch, ranks, step):
    import library_cases

    some = [*range(0, len(library_cases.WITH_SINKS), step)]
    assert launch(library_cases.wrong_with_sinks, ranks, [some]) == [[]] * ranks


@pytest.mark.parametrize("bounds", [(0, 60), (0, 1, 60), (0, 20, 41, 60)])
def test_packed_sequences_stay_packed_however_few_there_are(bounds):
    """The library's own function for a single process."""
    packed = {"batch_size": 1, "layout": "packed", "cu_seqlens": bounds, "seq_len": 60}
    shape = {"num_heads": 3, "num_kv_heads": 3, "head_dim": 8, "dtype": "float64"}
    workload = Workload.model_validate({"pattern": {"kind": "dense"}, "causal": True, **packed, **shape})
    attend = as_implementation.build_over_ranks(workload, BuildContext(device=torch.device("cpu")))
    verification = verify(attend, workload)
    assert verification.passed, summary(verification)


USUAL = (2, 4, "float32")
RING = {"algorithm": "ring-overlap"}
CHANGES = {
    "scale": ("contiguous", RING, {"scale": 0.5}, USUAL),
    "causal": ("contiguous", RING, {"causal": False}, USUAL),
    "window": ("contiguous", RING, {"window": (9, 0)}, USUAL),
    "pattern": ("contiguous", RING, {"segment_lengths": (6, 24), "dilation_rates": (1, 2)}, USUAL),
    "algorithm": ("contiguous", RING, {"algorithm": "ring"}, USUAL),
    "pass": ("contiguous", RING, {"sink": True}, USUAL),
    "dtype": ("contiguous", RING, {}, (2, 4, "float64")),
    "batch_size": ("contiguous", RING, {}, (1, 4, "float32")),
    "num_heads": ("contiguous", RING, {}, (2, 2, "float32")),
    **{
        f"scale in {name}": (order, {"algorithm": name}, {"scale": 0.5}, USUAL)
        for order, name in (
            ("contiguous", "ring"),
            ("contiguous", "ring-allgather"),
            ("contiguous", "ulysses"),
            ("zigzag", "zigzag-ring"),
            ("zigzag", "zigzag-allgather"),
            ("balanced", "balanced-allgather"),
        )
    },
}


@pytest.mark.parametrize(("ranks", "known"), [(2, True), slow(2, False), slow(3, True), slow(3, False)])
def test_two_calls_that_meet_are_refused_with_both(launch, ranks, known):
    import library_cases

    changes = [(order, known, *changed) for order, *changed in CHANGES.values()]
    results = launch(library_cases.in_different_calls, ranks, [changes])
    for change, *said in zip(CHANGES, *results, strict=True):
        for text, _ in said:
            assert text.startswith("RanksDisagreeError: ranks disagree on the workload: rank "), change
            assert text.count(f"{change.split()[0]} ") == 2


def test_a_rank_that_is_late_is_waited_for(launch):
    import library_cases

    assert launch(library_cases.with_a_late_rank, 2) == [[True] * 4] * 2


@pytest.mark.parametrize("tokens", [-1, "64", 64.0])
def test_a_length_that_is_no_number_of_tokens_is_refused(tokens):
    with pytest.raises(ValueError, match=f"seq_len {tokens!r} must be a whole number of at least 0"):
        sequence_shards(tokens)


@pytest.mark.slow
def test_under_a_compiler_is_one_graph_and_gives_the_same(launch):
    import compiled_cases

    for wrong, ranks, differences, kept, said in launch(compiled_cases.everything, 2):
        assert wrong == []
        assert ranks == 2
        assert max(differences) <= 1e-12
        assert kept
        assert "SequenceShards of this call are gone; keep them until its backward pass is done" in said


@pytest.mark.slow
def test_inductor_gives_the_same(launch):
    import compiled_cases

    assert launch(compiled_cases.wrong, 2, ["inductor", ["packed", "dilated"]]) == [[], []]


@pytest.mark.parametrize(
    ("end", "compiled", "cause"),
    [
        ("killed", False, "Connection (closed|reset) by peer"),
        slow("killed", True, "Connection (closed|reset) by peer"),
        slow("stalled", False, "Timed out waiting 2000ms"),
    ],
)
def test_a_rank_that_is_gone_ends_the_others_with_the_cause(end, compiled, cause, tmp_path):
    import leaving_rank

    context = multiprocessing.get_context("forkserver")
    pipes = [context.Pipe(duplex=False) for _ in range(3)]
    ranks = [
        context.Process(target=leaving_rank.run, args=(rank, str(tmp_path / "store"), end, compiled, told))
        for rank, (_, told) in enumerate(pipes)
    ]
    try:
        for rank in ranks:
            rank.start()
        for rank in (0, 2):
            heard = pipes[rank][0]
            assert heard.poll(60), "it still waits"
            assert re.search(cause, heard.recv())
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


@pytest.mark.slow
def test_calls_of_a_hundred_shapes_leave_nothing_behind(launch):
    import many_calls_cases

    for before, after in launch(many_calls_cases.many, 2, [100, 40]):
        groups, descriptors, threads, tensors, kib = (late - early for early, late in zip(before, after, strict=True))
        assert (groups, descriptors, threads) == (0, 0, 0)
        assert tensors <= 0
        # The allocators of Python and torch keep some freed memory.
        assert kib < 4096


@pytest.mark.slow
def test_calls_of_many_shapes_on_one_cut_keep_few_functions(launch):
    import many_calls_cases

    for numbers in launch(many_calls_cases.in_one_cut, 2, [40, 8]):
        functions, entries = zip(*numbers, strict=True)
        assert functions == (*range(1, 9), *[8] * 33)
        # Both ranks write their count as soon as they have one.
        assert len({*entries[20:]}) == 1


def test_a_backward_pass_whose_function_was_dropped_is_refused():
    """What the forward pass kept has no shapes then."""
    with pytest.raises(RuntimeError, match="more different calls were made"):
        from_bytes(SimpleNamespace(kept=()), torch.zeros(16, dtype=torch.uint8))


def losses(script: str, ranks: int, *arguments: str) -> list[float]:
    import launching

    return [float(line) for line in launching.printed(FOLDER / script, ranks, arguments).split()]


@pytest.mark.slow
def test_a_transformer_has_the_losses_of_one_rank_on_two():
    """Started by torchrun, as a user would."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(FOLDER.parents[1])}
    command = [*launcher, str(FOLDER / "train_over_ranks.py")]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    alone, together = losses("train_over_ranks.py", 1), [float(line) for line in done.stdout.split()]
    assert len(alone) == 20
    assert together == pytest.approx(alone, rel=1e-9)
    assert alone[-1] < alone[0]


@pytest.mark.slow
def test_batches_over_one_axis_and_tokens_over_the_other_have_the_losses_of_one_rank():
    alone = losses("train_on_two_axes.py", 1, "ddp", "1")
    assert len(alone) == 5
    for kind in ("ddp", "fsdp2"):
        assert losses("train_on_two_axes.py", 4, kind, "2") == pytest.approx(alone, rel=1e-9), kind
    assert alone[-1] < alone[0]


@pytest.mark.slow
def test_layers_that_may_be_graphs_have_the_losses_of_one_rank():
    alone = losses("train_with_graphs.py", 1, "cpu")
    assert len(alone) == 5
    assert losses("train_with_graphs.py", 2, "cpu") == pytest.approx(alone, rel=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_layers_in_graphs_have_the_losses_of_one_rank():
    alone = losses("train_with_graphs.py", 1, "cpu")
    assert losses("train_with_graphs.py", 2, "cuda") == pytest.approx(alone, rel=1e-3)
