"""The longest sequence that fits: few traces, since sizes grow almost in proportion to the length."""

from dilabench.plugins.catalogue import Catalogue
from dilabench.predict.memory.plan import plan_memory
from dilabench.record import Case
from dilabench.workload.cuts import uncut_step
from dilabench.workload.last_length import last_length
from dilabench.workload.spec import MAX_SEQ_LEN

# The answer is right to this part of it: a step more does not fit.
RESOLUTION = 256


def longest_that_fits(case: Case, device: str, capacity_bytes: int, catalogue: Catalogue) -> int | None:
    """The largest sequence length of the case whose plan fits into so many bytes; None without a plan, 0 if none.

    The batch size, heads and branches stay; packed sequences and a mask from a file have the length that they have,
    and give None; a pattern that refuses long sequences may end the search at its own longest. To a step of about a
    three-hundredth, and confirmed: it fits, a step more does not. Over ranks lengths that cut segments need more than
    those that do not: there only the latter are looked at, where a few of them fit. It is a prediction: `extreme` finds
    the length by real runs.
    """
    if case.workload.has_given_length:
        return None

    def peak(length: int) -> int | None:
        workload = case.workload.replace(seq_len=length)
        plan = plan_memory(case.model_copy(update={"workload": workload}), device, catalogue)
        return None if plan is None else plan.peak_bytes

    length, last = case.workload.seq_len, last_length(case.workload)
    fits, too_long = (0, 0), (MAX_SEQ_LEN, MAX_SEQ_LEN)
    uncut = uncut_step(case.workload, case.world_size)
    while (needed := peak(length)) is not None:
        if needed <= capacity_bytes:
            fits = (length, needed)
        else:
            too_long = (length, needed)
        low, high = fits[0], too_long[0]
        step = _step(low or high)
        if case.world_size > 1 and 4 * uncut <= _guess(fits, too_long, capacity_bytes, step):
            # Where ranks cut no segment; elsewhere a trace of many segments takes long.
            step = max(step, uncut)
        if high - low <= step or low >= min(last, MAX_SEQ_LEN // 2):
            return low
        length = min(last, _guess(fits, too_long, capacity_bytes, step))
    return None


def _step(length: int) -> int:
    """The power of two that is about a three-hundredth of a length."""
    return max(1, 1 << max(0, length.bit_length() - RESOLUTION.bit_length()))


def _guess(fits: tuple[int, int], too_long: tuple[int, int], capacity: int, step: int) -> int:
    """Where a line through what is known reaches the capacity, inside what is not known, on a multiple of the step."""
    (low, low_bytes), (high, high_bytes) = fits, too_long
    if high == MAX_SEQ_LEN:
        # Nothing was too long yet: in proportion, and a step beyond, so that the next may be the end.
        return min(MAX_SEQ_LEN // 2, max(low + step, low * capacity // max(1, low_bytes) // step * step + step))
    at = low + (high - low) * (capacity - low_bytes) // max(1, high_bytes - low_bytes)
    nearest = at // step * step
    return min(max(nearest, low + step), high - 1) if low else max(1, min(nearest, high // 2))
