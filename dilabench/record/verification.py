"""The checks of a case before and during its timing, as the record has them."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from dilabench.validation import Model, Several


class CheckName(StrEnum):
    """The names of verification checks (docs/reference/semantics.md §4).

    `_slope`: the regression on the oracle. `_all_rows`: every row against a confirmed implementation.
    `_from_every_row`: under an upstream gradient that is random in every row. `timed_`: a call of the timed sequence.
    """

    SHAPE = "shape"
    DTYPE = "dtype"
    DEVICE = "device"
    FINITE = "finite"
    OUT = "out"
    OUT_SLOPE = "out_slope"
    OUT_ALL_ROWS = "out_all_rows"
    OUT_WITH_LSE = "out_with_lse"
    LSE = "lse"
    LSE_SLOPE = "lse_slope"
    DQ = "dq"
    DQ_SLOPE = "dq_slope"
    DQ_ALL_ROWS = "dq_all_rows"
    DK = "dk"
    DK_SLOPE = "dk_slope"
    DK_ALL_ROWS = "dk_all_rows"
    DK_FROM_EVERY_ROW = "dk_from_every_row"
    DV = "dv"
    DV_SLOPE = "dv_slope"
    DV_ALL_ROWS = "dv_all_rows"
    DV_FROM_EVERY_ROW = "dv_from_every_row"
    DX = "dx"
    DX_SLOPE = "dx_slope"
    SECOND_CALL = "second_call"
    ONES = "ones"
    DEPENDENCY = "dependency"
    LARGE_SCORES = "large_scores"
    RESULT_KEPT = "result_kept"
    REPEAT = "repeat"
    CACHE = "cache"
    STREAM = "stream"
    INPUTS = "inputs"
    SETTINGS = "settings"
    INTACT = "intact"
    CORE = "core"
    TIMED_FORM = "timed_form"
    TIMED_THREADS = "timed_threads"
    TIMED_KEPT = "timed_kept"
    TIMED_INPUTS = "timed_inputs"
    TIMED_MESSAGES = "timed_messages"
    TIMED_GRADIENTS = "timed_gradients"
    TIMED_OUT = "timed_out"
    TIMED_OUT_SLOPE = "timed_out_slope"
    TIMED_DQ = "timed_dq"
    TIMED_DQ_SLOPE = "timed_dq_slope"
    TIMED_DK = "timed_dk"
    TIMED_DV = "timed_dv"


class Check(Model):
    """One verification check. `name` is a text if a parameter gave it ('d q_proj.weight'), or another version."""

    name: Annotated[CheckName | str, Field(union_mode="left_to_right")]
    passed: bool
    error: float | None = None
    tolerance: float | None = None
    where: str | None = None
    detail: str | None = None

    @property
    def text(self) -> str:
        """The failed check, the error against its tolerance, and the place of the largest error."""
        known = self.error is not None and self.tolerance is not None
        far = f"error {self.error:.3g}, allowed {self.tolerance:.3g}" if known else None
        parts = filter(None, (self.detail, far, self.where and f"at {self.where}"))
        return f"{self.name}: {'; '.join(parts) or 'failed'}"


class Verification(Model):
    """The checks before and during timing. `sampled_rows`: rows compared with the oracle, None if every row was.

    `against`: the built-in, confirmed by the oracle, that every row was compared with. `timed_calls`: number of checked
    calls of the timed sequence; `timed_rows`: of these call, batch item, position, head. `diagnosis`: a near miss.
    """

    checks: Several[Check]
    sampled_rows: int | None = None
    against: str | None = None
    timed_calls: int = 0
    timed_rows: Several[tuple[int, int, int, int]] = ()
    diagnosis: str | None = None
    duration_ns: int = 0

    @property
    def passed(self) -> bool:
        """All checks passed, and there was at least one."""
        return bool(self.checks) and all(check.passed for check in self.checks)
