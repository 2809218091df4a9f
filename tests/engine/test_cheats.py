"""Implementations that cheat get no time."""

import pytest

from dilabench.record import Failed, Measured


def outcome_of(record, name):
    return next(row.outcome for row in record.rows if row.case.implementation == name)


@pytest.mark.parametrize("name", ["cached", "mutates", "wrong_when_long"])
def test_wrong_output_fails_verification_and_carries_no_time(engine, name):
    outcome = outcome_of(engine(name, "honest"), name)
    assert isinstance(outcome, Failed)
    assert outcome.stage == "verify"
    assert outcome.verification is not None
    assert not outcome.verification.passed
    assert not hasattr(outcome, "timings")


def test_a_wrong_backward_is_right_forward_and_wrong_with_gradients(engine):
    assert isinstance(outcome_of(engine("wrong_backward"), "wrong_backward"), Measured)
    outcome = outcome_of(engine("wrong_backward", workload={"mode": "both"}), "wrong_backward")
    assert outcome.stage == "verify"
    assert "d" in outcome.why


def test_a_row_must_show_the_kernel_of_the_backend_it_claims(engine, dense_case, named_backend):
    named_backend("flashy", (r"_scaled_dot_product_flash_attention_for_cpu",))
    engine.register("ignores_backend")
    engine.register("uses_backend")
    record = engine(planned=[dense_case("ignores_backend", "flashy"), dense_case("uses_backend", "flashy")])
    cheat = outcome_of(record, "ignores_backend")
    assert cheat.stage == "verify"
    assert "claims flashy but no such kernel ran" in cheat.why
    assert cheat.verification.passed
    honest = outcome_of(record, "uses_backend")
    assert any("flash_attention_for_cpu" in kernel.name for kernel in honest.kernels)
