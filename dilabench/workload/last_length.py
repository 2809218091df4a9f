"""The longest sequences to which a workload's pattern applies. No tensors."""

from dataclasses import replace

from dilabench.workload.spec import MAX_SEQ_LEN, Workload


def last_length(workload: Workload) -> int:
    """Return the longest length the pattern supports without a gap from the workload's on; MAX_SEQ_LEN if unlimited.

    Zero keys, for example, end at the first segment that its rate does not divide. Longer lengths beyond such a gap are
    not considered. A fixed length is also the longest.
    """
    if workload.has_given_length:
        return workload.seq_len
    (shape,) = workload.shapes

    def possible(length: int) -> bool:
        return workload.pattern.why_not_over(replace(shape, length=length)) is None

    low, high = workload.seq_len, MAX_SEQ_LEN
    if possible(high):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if possible(middle) else (low, middle)
    return low
