"""Backend order, dtype and kernels from rows whose answer is known."""

from importlib.machinery import ModuleSpec

import pytest

from dilabench.machine import GpuInfo
from dilabench.plugins.manager import discover
from dilabench.suites.backends import analyse, recommended, standings_of

CATALOGUE = discover().catalogue

FLASH = (("void pytorch_flash::flash_fwd_kernel<bf16>(params)", 900), ("void copy(x)", 100))


def standings(record, *rows):
    return standings_of(record(*rows, suite="backends"))


def test_backends_stand_in_the_order_of_their_times(row, record):
    rows = [
        row("dense", ms, at=at, backend=name) for at, (name, ms) in enumerate({"math": 30, "a": 10, "b": 20}.items())
    ]
    (standing,) = standings(record, *rows)
    assert standing.order_text() == "a, b (2.00x), math (3.00x)"


def test_what_nobody_can_tell_apart_is_tied(row, record):
    rows = [row("dense", 10.0, at=0, backend="a"), row("dense", 10.05, at=1, backend="b")]
    (standing,) = standings(record, *rows)
    assert standing.order_text() == "a, b (1.00x, tied)"


def test_bfloat16_wins_where_it_is_hardly_slower(row, record):
    rows = [row("dense", ms, dtype=dtype) for dtype, ms in (("float32", 90), ("float16", 10.0), ("bfloat16", 10.2))]
    assert recommended(standings(record, *rows)).best.case.workload.dtype == "bfloat16"
    rows[2] = row("dense", 11.0, dtype="bfloat16")
    assert recommended(standings(record, *rows)).best.case.workload.dtype == "float16"


def test_the_recommendation_says_whether_auto_is_right(row, record):
    rows = [row("strided", 10.0, at=0, backend="math"), row("strided", 20.0, at=1, backend="sdpa-flash")]
    recommendation, *_ = analyse(record(*rows, suite="backends"), CATALOGUE)
    assert "math in float32" in recommendation.sentence
    assert "test CPU" in recommendation.sentence
    assert recommendation.rows[0][-1] == "sdpa-flash: 2.00x the time of math"
    rows[0] = row("strided", 40.0, at=0, backend="math")
    assert analyse(record(*rows, suite="backends"), CATALOGUE)[0].rows[0][-1] == "sdpa-flash: right"


def test_the_longest_kernel_is_named(row, record):
    _, kernels, *_ = analyse(record(row("dense", 10.0, kernels=FLASH), suite="backends"), CATALOGUE)
    assert kernels.rows[0][3:] == ("pytorch_flash::flash_fwd_kernel<bf16>", "90%", "1", "2")


def test_skipped_backends_give_no_recommendation(row, record):
    assert analyse(record(row("dense"), suite="backends"), CATALOGUE) == ()


def test_generations_of_a_kernel_face_each_other_and_the_missing_say_why(row, record):
    times = {"math": 1.0, "flash2": 30.0, "flash4": 10.0}
    rows = [row("dense", ms, at=at, backend=name) for at, (name, ms) in enumerate(times.items())]
    missing = row("dense", backend="flash3")
    _, family, *_ = analyse(record(*rows, missing, suite="backends"), CATALOGUE)
    assert family.rows[0][2:] == ("flash4", "flash2 (3.00x)")
    assert family.sentence == f"Fastest of the backends that ran: flash4. flash3 did not run: {missing.outcome.why}."


@pytest.mark.parametrize(
    ("device", "more"), [("cpu", ""), ("cuda", "; fused needs no backend: `-i auto` prefers it here")]
)
def test_the_answer_names_what_it_is_about_and_what_auto_prefers(row, record, monkeypatch, device, more):
    monkeypatch.setattr(CATALOGUE, "find_module", lambda _: ModuleSpec("triton", None))
    rows = [row("strided", 10.0, at=at, backend=name, dtype="bfloat16") for at, name in enumerate(("math", "a"))]
    found = record(*rows, suite="backends")
    gpu = GpuInfo(name="H200", compute_capability="9.0")
    environment = found.environment.model_copy(update={"gpus": (gpu,) if device == "cuda" else ()})
    found = found.model_copy(update={"device": device, "environment": environment})
    answer = analyse(found, CATALOGUE)[-1]
    assert answer.answers
    assert answer.sentence.startswith("No difference proven at 384 between strided over math and strided over a (")
    assert answer.sentence.endswith(f"\nAmong backends of strided{more}.")
