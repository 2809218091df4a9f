"""How long the sequences can get that a workload's pattern lies over. No tensors."""

from dataclasses import replace

from dilabench.workload.spec import MAX_SEQ_LEN, Workload


def last_length(workload: Workload) -> int:
    """The last length up to which the pattern takes longer sequences than the workload's; MAX_SEQ_LEN for any length.

    Zero keys, for one, end at the first segment that its rate does not divide. Longer ones that are possible again are
    not looked for. A length that is given is the last one, too.
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
